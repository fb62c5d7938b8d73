"""Each end of a job reaches each webhook, in order, and once, across failures and restarts."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.service import webhooks
from controlplane.service.settings import ControllerSettings, Webhook
from controlplane.service.webhooks import FILE, Webhooks, check_webhooks, load_secret
from schemas.errors import SettingsError
from schemas.host.settings import convert
from schemas.ids import JobId
from tests.support import builders
from tests.support.schemas_examples import EXAMPLES
from tests.support.service import LiveService, until
from tests.support.webhook_receiver import Receiver

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "RETRY_FIRST_S", 0.0)


@dataclass
class Site:
    """A service without jobs, and a receiver of its webhooks."""

    service: LiveService
    receiver: Receiver
    home: Path

    def webhooks(self, *hooks: Webhook) -> Webhooks:
        """These webhooks, or one that the receiver has."""
        service = self.service
        return Webhooks(
            hooks or (Webhook(name="a", url=self.receiver.url),), home=self.home, state=self.home,
            journal="cafe", reader=service.loop.reader, feed=service.feed,
            owner_of=service.server._owners.of,
        )  # fmt: skip

    def ends(self, *names: str) -> None:
        """Jobs are submitted and cancelled."""
        for name in names:
            self.service.take(builders.submission(name))
            number = self.service.loop.reactor.state.jobs_accepted
            self.service.take(builders.cancelled(JobId(f"{name}-{number}")))

    @property
    def heard_of(self) -> list[str]:
        return [job for _, job in self.receiver.jobs]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    made = Site(LiveService(tmp_path), Receiver(), tmp_path)
    made.service.loop.begin("")
    await made.service.loop.caught_up()
    yield made
    made.receiver.close()
    made.service.loop.close()


@asynccontextmanager
async def running(made: Webhooks) -> AsyncIterator[None]:
    task = asyncio.create_task(made.run())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_an_end_is_sent_with_its_owner_and_a_signature(site: Site) -> None:
    (site.home / "secret").write_text("between us\n")
    (site.home / "secret").chmod(0o600)
    made = site.webhooks(Webhook(name="a", url=site.receiver.url, key="secret"))
    async with running(made):
        site.ends("a")
        await site.receiver.until(1)

    ((headers, body),) = site.receiver.accepted
    seq = body["data"].pop("seq")
    assert body["type"] == "job.cancelled"
    assert {name: body["data"][name] for name in ("job", "user", "project", "reason")} == {
        "job": "a-1", "user": "ann", "project": "ann", "reason": "cancelled by ann",
    }  # fmt: skip
    assert headers["webhook-id"] == f"cafe-{seq}-{body['timestamp'] * 1000:.0f}"
    assert abs(int(headers["webhook-timestamp"]) - time.time()) < LIMIT_S
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.{headers['body']}"
    expected = hmac.digest(b"between us", signed.encode(), hashlib.sha256)
    assert headers["webhook-signature"] == f"v1,{base64.b64encode(expected).decode()}"


async def test_a_metric_cannot_replace_the_owner_of_an_event(site: Site) -> None:
    made = site.webhooks(Webhook(name="a", url=site.receiver.url))
    example: Any = EXAMPLES["feed.event.1"]
    event = msgspec.structs.replace(example, detail={"user": 0.5, "seq": 0.5})

    data = json.loads(made._body(event))["data"]

    assert (data["seq"], data["user"]) == (event.seq, None)


def test_a_secret_in_base64_is_decoded(tmp_path: Path) -> None:
    (path := tmp_path / "secret").write_text("whsec_YmV0d2VlbiB1cw==")
    path.chmod(0o600)

    assert load_secret(path) == b"between us"


@pytest.mark.parametrize(
    "reply", [b"SSH-2.0-OpenSSH_9.2\r\n", b"", b"HTTP/1.1 200 OK\r\nx: " + b"x" * 99_999, b"\0" * 9]
)
async def test_a_server_that_is_no_receiver_disturbs_no_other_webhook(
    site: Site, reply: bytes
) -> None:
    requests = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"}}"))
        writer.write(reply)
        writer.close()

    other = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}/"
    hooks = Webhook(name="bad", url=url), Webhook(name="good", url=site.receiver.url)
    async with running(site.webhooks(*hooks)):
        site.ends("a", "b")
        await site.receiver.until(2)
        await until(lambda: len(requests) >= 3)
    other.close()

    assert site.heard_of == ["a-1", "b-2"]
    assert all(b"a-1" in request for request in requests)  # the first event, again and again


async def test_a_receiver_that_replies_too_slowly_counts_as_failed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "TIMEOUT_S", 0.05)
    requests = 0

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        requests += 1
        with contextlib.suppress(OSError), contextlib.closing(writer):
            while True:
                writer.write(b"H")
                await writer.drain()
                await asyncio.sleep(0.01)

    other = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}/"
    made = site.webhooks(Webhook(name="slow", url=url))
    async with running(made):
        site.ends("a")
        await until(lambda: requests >= 2)
    other.close()

    assert made.waiting()["slow"] > 0


async def test_a_damaged_event_is_skipped(site: Site) -> None:
    made = site.webhooks()
    made._delivered = {"a": site.service.feed.last_seq}
    site.ends("a", "b")
    await site.service.loop.caught_up()
    damaged = next(
        e.seq for e in site.service.loop.reader.feed(1, 99) if e.event == "job.cancelled"
    )
    with contextlib.closing(sqlite3.connect(site.service.loop.reader.path)) as database:
        database.execute("UPDATE feed SET crc = crc + 1 WHERE seq = ?", (damaged,))
        database.commit()

    async with running(made):
        await site.receiver.until(1)

    assert site.heard_of == ["b-2"]


@pytest.mark.parametrize("stored", ["other", "cafe"])
async def test_a_webhook_begins_again_with_another_or_older_journal(
    site: Site, stored: str
) -> None:
    number = 100_000 if stored == "cafe" else 0
    (site.home / FILE).write_text(f'{{"journal": "{stored}", "delivered": {{"a": {number}}}}}')
    site.ends("a")
    await site.service.loop.caught_up()

    async with running(site.webhooks()):
        site.ends("b")
        await site.receiver.until(1)

    assert site.heard_of == ["b-2"]


@pytest.mark.parametrize("status", [500, 404, 302])
async def test_a_refused_event_is_sent_again_before_the_next_one(site: Site, status: int) -> None:
    site.receiver.close()
    site.receiver = Receiver(refuses=2, status=status)
    async with running(site.webhooks()):
        site.ends("a", "b", "c")
        await site.receiver.until(3)

    assert site.receiver.refused == 2
    assert site.receiver.jobs == [("job.cancelled", job) for job in ("a-1", "b-2", "c-3")]


async def test_events_during_an_absence_follow_and_no_event_comes_twice(site: Site) -> None:
    async with running(site.webhooks()):
        site.ends("a")
        await site.receiver.until(1)
        seq = site.receiver.accepted[0][1]["data"]["seq"]
        await until(lambda: json.loads((site.home / FILE).read_bytes())["delivered"]["a"] >= seq)
    site.ends("b")
    await site.service.loop.caught_up()

    async with running(site.webhooks()):
        site.ends("c")
        await site.receiver.until(3)

    assert site.heard_of == ["a-1", "b-2", "c-3"]


async def test_an_event_whose_delivery_was_not_stored_has_the_same_id_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = site.webhooks()
    async with running(made):
        await until((site.home / FILE).exists)
        monkeypatch.setattr(made, "_write", lambda _: None)  # as if killed before it
        site.ends("a")
        await site.receiver.until(1)

    async with running(site.webhooks()):
        await site.receiver.until(2)

    first, second = (headers["webhook-id"] for headers, _ in site.receiver.accepted)
    assert first == second


async def test_a_new_webhook_begins_with_the_next_event_and_waits_for_no_other(site: Site) -> None:
    site.ends("a")
    await site.service.loop.caught_up()
    dead = Webhook(name="dead", url="http://127.0.0.1:1/")
    made = site.webhooks(dead, Webhook(name="a", url=site.receiver.url))
    async with running(made):
        site.ends("b")
        await site.receiver.until(1)
        assert made.waiting()["dead"] > 0

    assert site.heard_of == ["b-2"]


@pytest.mark.parametrize(("table", "said"), [
    ({"name": "a", "url": "ftp://host/"}, "webhooks"),
    ({"name": "a", "url": "http://host/", "events": ["job.sneezed"]}, "job.sneezed"),
    ({"name": "a b", "url": "http://host/"}, "webhooks"),
    ({"url": "http://host/"}, "name"),
])  # fmt: skip
def test_invalid_webhooks_are_refused_by_their_field(table: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        convert(ControllerSettings, {"webhooks": [table]}, Path("controller.toml"))


@pytest.mark.parametrize(
    "url", ["http://", "http://:80/", "http://host:99999/", "http://a..b/", "http://h\u00e9/"]
)
def test_an_address_without_host_or_port_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is not an address"):
        check_webhooks((Webhook(name="a", url=url),), tmp_path)


async def test_secrets_and_names_are_checked(site: Site) -> None:
    hook = Webhook(name="a", url="http://host/", key="secret")
    (site.home / "secret").write_text("x")
    (site.home / "secret").chmod(0o644)
    with pytest.raises(SettingsError, match="accessible to other users"):
        site.webhooks(hook)
    (site.home / "secret").chmod(0o600)
    with pytest.raises(SettingsError, match="two are named a"):
        site.webhooks(hook, msgspec.structs.replace(hook, key=""))
    (site.home / FILE).write_text("{")
    with pytest.raises(SettingsError, match=FILE):
        site.webhooks(hook)
