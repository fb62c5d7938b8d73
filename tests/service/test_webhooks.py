"""Each end of a job reaches each webhook, in order, and once, across failures and restarts."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.service import webhooks
from controlplane.service.settings import ControllerSettings, Webhook
from controlplane.service.webhooks import FILE, Webhooks
from schemas.errors import SettingsError
from schemas.host.settings import convert
from schemas.ids import JobId
from tests.support import builders
from tests.support.service import LiveService
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
    assert headers["webhook-id"] == f"cafe-{seq}"
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.{headers['body']}"
    expected = hmac.digest(b"between us", signed.encode(), hashlib.sha256)
    assert headers["webhook-signature"] == f"v1,{base64.b64encode(expected).decode()}"


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
        async with asyncio.timeout(LIMIT_S):
            while not (tmp_path / FILE).exists():
                await asyncio.sleep(0.005)
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


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"name": "a", "url": "ftp://host/"}, "webhooks"),
        ({"name": "a", "url": "http://host/", "events": ["job.sneezed"]}, "job.sneezed"),
        ({"name": "a b", "url": "http://host/"}, "webhooks"),
        ({"url": "http://host/"}, "name"),
    ],
)
def test_invalid_webhooks_are_refused_by_their_field(table: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        convert(ControllerSettings, {"webhooks": [table]}, Path("controller.toml"))


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
