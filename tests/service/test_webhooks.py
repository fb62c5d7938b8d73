"""Each end of a job reaches each webhook, in order, and once, across failures and restarts."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
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
from tests.support.service import LiveService, until
from tests.support.webhook_receiver import Receiver

LIMIT_S = 60.0


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "RETRY_FIRST_S", 0.0)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[LiveService]:
    made = LiveService(tmp_path)
    made.loop.begin("")
    await made.loop.caught_up()
    yield made
    made.loop.close()


def webhooks_of(service: LiveService, home: Path, *hooks: Webhook) -> Webhooks:
    return Webhooks(
        hooks, home=home, state=home, journal="cafe", reader=service.loop.reader,
        feed=service.feed, owner_of=service.server._owners.of,
    )  # fmt: skip


@asynccontextmanager
async def running(made: Webhooks) -> AsyncIterator[None]:
    task = asyncio.create_task(made.run())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


def ends(service: LiveService, name: str) -> None:
    """A job is submitted and cancelled."""
    service.take(builders.submission(name))
    number = service.loop.reactor.state.jobs_accepted
    service.take(builders.cancelled(JobId(f"{name}-{number}")))


async def test_an_end_is_sent_with_its_owner_and_a_signature(
    service: LiveService, receiver: Receiver, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("between us\n")
    (tmp_path / "secret").chmod(0o600)
    made = webhooks_of(service, tmp_path, Webhook(name="a", url=receiver.url, key="secret"))
    async with running(made):
        ends(service, "a")
        await receiver.until(1)

    ((headers, body),) = receiver.accepted
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


def test_a_secret_in_base64_is_decoded(tmp_path: Path) -> None:
    (path := tmp_path / "secret").write_text("whsec_YmV0d2VlbiB1cw==")
    path.chmod(0o600)

    assert load_secret(path) == b"between us"


@pytest.mark.parametrize(
    "reply", [b"SSH-2.0-OpenSSH_9.2\r\n", b"", b"HTTP/1.1 200 OK\r\nx: " + b"x" * 99_999, b"\0" * 9]
)
async def test_a_server_that_is_no_receiver_disturbs_no_other_webhook(
    service: LiveService, receiver: Receiver, tmp_path: Path, reply: bytes
) -> None:
    requests = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"}}"))
        writer.write(reply)
        writer.close()

    other = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}/"
    hooks = Webhook(name="bad", url=url), Webhook(name="good", url=receiver.url)
    async with running(webhooks_of(service, tmp_path, *hooks)):
        for name in ("a", "b"):
            ends(service, name)
        await receiver.until(2)
        await until(lambda: len(requests) >= 3)
    other.close()

    assert [job for _, job in receiver.jobs] == ["a-1", "b-2"]
    assert all(b"a-1" in request for request in requests)  # the first event, again and again


async def test_a_receiver_that_replies_too_slowly_counts_as_failed(
    service: LiveService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    made = webhooks_of(service, tmp_path, Webhook(name="slow", url=url))
    async with running(made):
        ends(service, "a")
        await until(lambda: requests >= 2)
    other.close()

    assert made.waiting()["slow"] > 0


async def test_a_damaged_event_is_skipped(
    service: LiveService, receiver: Receiver, tmp_path: Path
) -> None:
    made = webhooks_of(service, tmp_path, Webhook(name="a", url=receiver.url))
    made._delivered = {"a": service.feed.last_seq}
    for name in ("a", "b"):
        ends(service, name)
    await service.loop.caught_up()
    damaged = next(e.seq for e in service.loop.reader.feed(1, 99) if e.event == "job.cancelled")
    with contextlib.closing(sqlite3.connect(service.loop.reader.path)) as database:
        database.execute("UPDATE feed SET crc = crc + 1 WHERE seq = ?", (damaged,))
        database.commit()

    async with running(made):
        await receiver.until(1)

    assert [job for _, job in receiver.jobs] == ["b-2"]


@pytest.mark.parametrize("stored", ["other", "cafe"])
async def test_a_webhook_begins_again_with_another_or_older_journal(
    service: LiveService, receiver: Receiver, tmp_path: Path, stored: str
) -> None:
    number = 100_000 if stored == "cafe" else 0
    (tmp_path / FILE).write_text(f'{{"journal": "{stored}", "delivered": {{"a": {number}}}}}')
    ends(service, "a")
    await service.loop.caught_up()

    async with running(webhooks_of(service, tmp_path, Webhook(name="a", url=receiver.url))):
        ends(service, "b")
        await receiver.until(1)

    assert [job for _, job in receiver.jobs] == ["b-2"]


@pytest.mark.parametrize("status", [500, 404, 302])
async def test_a_refused_event_is_sent_again_before_the_next_one(
    service: LiveService, tmp_path: Path, status: int
) -> None:
    receiver = Receiver(refuses=2, status=status)
    async with running(webhooks_of(service, tmp_path, Webhook(name="a", url=receiver.url))):
        for name in ("a", "b", "c"):
            ends(service, name)
        await receiver.until(3)
    receiver.close()

    assert receiver.refused == 2
    assert receiver.jobs == [("job.cancelled", job) for job in ("a-1", "b-2", "c-3")]


async def test_events_during_an_absence_follow_and_no_event_comes_twice(
    service: LiveService, receiver: Receiver, tmp_path: Path
) -> None:
    hook = Webhook(name="a", url=receiver.url)
    async with running(webhooks_of(service, tmp_path, hook)):
        ends(service, "a")
        await receiver.until(1)
        await asyncio.to_thread(lambda: None)
    ends(service, "b")
    await service.loop.caught_up()

    async with running(webhooks_of(service, tmp_path, hook)):
        ends(service, "c")
        await receiver.until(3)

    assert [job for _, job in receiver.jobs] == ["a-1", "b-2", "c-3"]


async def test_an_event_whose_delivery_was_not_stored_has_the_same_id_again(
    service: LiveService, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook, made = Webhook(name="a", url=receiver.url), None
    made = webhooks_of(service, tmp_path, hook)
    async with running(made):
        await until((tmp_path / FILE).exists)
        monkeypatch.setattr(made, "_write", lambda _: None)  # as if killed before it
        ends(service, "a")
        await receiver.until(1)

    async with running(webhooks_of(service, tmp_path, hook)):
        await receiver.until(2)

    first, second = (headers["webhook-id"] for headers, _ in receiver.accepted)
    assert first == second


async def test_a_new_webhook_begins_with_the_next_event_and_waits_for_no_other(
    service: LiveService, receiver: Receiver, tmp_path: Path
) -> None:
    ends(service, "a")
    await service.loop.caught_up()
    dead = Webhook(name="dead", url="http://127.0.0.1:1/")
    made = webhooks_of(service, tmp_path, dead, Webhook(name="a", url=receiver.url))
    async with running(made):
        ends(service, "b")
        await receiver.until(1)
        assert made.waiting()["dead"] > 0

    assert [job for _, job in receiver.jobs] == ["b-2"]


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


async def test_secrets_and_names_are_checked(service: LiveService, tmp_path: Path) -> None:
    hook = Webhook(name="a", url="http://host/", key="secret")
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0o644)
    with pytest.raises(SettingsError, match="accessible to other users"):
        webhooks_of(service, tmp_path, hook)
    (tmp_path / "secret").chmod(0o600)
    with pytest.raises(SettingsError, match="two are named a"):
        webhooks_of(service, tmp_path, hook, msgspec.structs.replace(hook, key=""))
    (tmp_path / FILE).write_text("{")
    with pytest.raises(SettingsError, match=FILE):
        webhooks_of(service, tmp_path, hook)
