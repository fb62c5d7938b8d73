"""Webhooks: HTTP requests for events of the feed, in order, by https://www.standardwebhooks.com.

The number of the last delivered event is stored after each delivery, so that a restarted controller
continues behind it. If the controller is killed between the receiver's reply and that write, the
event is sent again with the same `webhook-id`, by which the receiver recognises it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, urlsplit

import h11
import msgspec
import structlog

from controlplane.core.model.job import JobOwner
from controlplane.journal.reader import Reader
from controlplane.service.event_feed import EventFeed
from controlplane.service.settings import Webhook
from schemas.errors import SettingsError
from schemas.host.state_files import sync_folder
from schemas.host.tasks import supervised
from schemas.ids import JobId
from schemas.transport.keys import require_private
from schemas.wire.feed import FeedEvent

log = structlog.get_logger("webhooks")
FILE: Final = "webhooks.json"
PAGE: Final = 500  # events read at a time
WAIT_S: Final = 30.0  # for the next event
TIMEOUT_S: Final = 10.0  # for a request from the connection to the reply's headers
RETRY_FIRST_S: Final = 1.0  # the pause doubles with each failure
RETRY_LONGEST_S: Final = 300.0
STORE_S: Final = 5.0  # between two writes while events are skipped
MAX_SECRET_BYTES: Final = 4096
ENCODED: Final = b"whsec_"  # begins a secret that is written in base64


class _Progress(msgspec.Struct, frozen=True, kw_only=True):
    journal: str  # the numbers are of this journal's events
    delivered: dict[str, int]  # number of the last event that is done, by webhook


_progress: Final = msgspec.json.Decoder(_Progress)


def load_secret(path: Path) -> bytes:
    """Return the secret with which requests are signed.

    Raises:
        SettingsError: if the file cannot be read, has no secret, or is accessible to other users.
    """
    require_private(path)
    secret = path.read_bytes()[:MAX_SECRET_BYTES].strip()
    if secret.startswith(ENCODED):
        try:
            secret = base64.b64decode(secret.removeprefix(ENCODED), validate=True)
        except binascii.Error:
            raise SettingsError(
                f"{path} is not base64 after whsec_", "write the secret again", "webhooks.key"
            ) from None
    if not secret:
        raise SettingsError(f"{path} is empty", "write a random secret into it", "webhooks.key")
    return secret


def check_webhooks(hooks: tuple[Webhook, ...], home: Path) -> None:
    """Check that names differ, that addresses are complete, and that secrets can be read."""
    names = [hook.name for hook in hooks]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"webhooks: two are named {name}", "rename one", "webhooks.name")
    for hook in hooks:
        _address(hook)
        if hook.key:
            load_secret(home / hook.key)


def _address(hook: Webhook) -> SplitResult:
    try:
        url = urlsplit(hook.url)
        host = (url.hostname or "").encode("idna")  # as a connection does
        valid = bool(host) and url.port != 0 and hook.url.isascii()
    except ValueError:  # not a port, not an IPv6 address, or an empty label
        valid = False
    if not valid:
        raise SettingsError(
            f"webhook {hook.name}: {hook.url} is not an address", "use http://HOST:PORT/PATH",
            "webhooks.url",
        )  # fmt: skip
    return url


class Webhooks:
    """Delivery of events to all webhooks, each at its own pace.

    Args:
        home: folder in which relative paths of the settings start.
        state: folder of the file with the numbers of the delivered events.
        owner_of: returns the owner of a job, or None if the job is no longer kept.
    """

    def __init__(
        self,
        hooks: tuple[Webhook, ...],
        *,
        home: Path,
        state: Path,
        journal: str,
        reader: Reader,
        feed: EventFeed,
        owner_of: Callable[[JobId], JobOwner | None],
    ) -> None:
        check_webhooks(hooks, home)
        self._hooks = hooks
        self._secrets = {hook.name: load_secret(home / hook.key) for hook in hooks if hook.key}
        self._journal = journal
        self._reader = reader
        self._feed = feed
        self._owner_of = owner_of
        self._path = state / FILE
        self._writing = asyncio.Lock()
        self._delivered = self._read()  # number of the last event that is done, by webhook
        self._stored_at = 0.0  # time of the event loop

    def waiting(self) -> dict[str, int]:
        """Return how many events each webhook still has to look at."""
        last = self._feed.last_seq
        return {hook.name: last - self._delivered.get(hook.name, last) for hook in self._hooks}

    async def run(self) -> None:
        """Deliver events until cancelled. A new webhook begins with the next event."""
        async with asyncio.TaskGroup() as tasks:
            for hook in self._hooks:
                self._delivered.setdefault(hook.name, self._feed.last_seq)
                work = partial(self._follow, hook)
                tasks.create_task(supervised(f"webhook {hook.name}", work, lambda: False))

    async def _follow(self, hook: Webhook) -> None:
        await self._done(hook, self._delivered[hook.name])
        now = asyncio.get_running_loop().time
        skip = partial(log.error, "damaged event skipped", name=hook.name)
        while True:
            first, last = self._delivered[hook.name] + 1, self._feed.last_seq
            if first > last:
                await self._feed.wait(WAIT_S)
                continue
            events = self._reader.feed(first, PAGE, lambda error: skip(why=error.message))
            events = tuple(event for event in events if event.seq <= last)
            for event in events:
                if event.event in hook.events:
                    await self._deliver(hook, event)
                    await self._done(hook, event.seq)
            # A page without events has only numbers that were deleted or damaged.
            done = events[-1].seq if events else min(first + PAGE - 1, last)
            if now() > self._stored_at + STORE_S:
                await self._done(hook, done)
            self._delivered[hook.name] = done
            await asyncio.sleep(0)

    async def _deliver(self, hook: Webhook, event: FeedEvent) -> None:
        """Send an event until the receiver accepts it."""
        pause_s, body = RETRY_FIRST_S, self._body(event)
        while True:
            error = await self._send(hook, event, body)
            if not error:
                return
            log.warning("webhook failed", name=hook.name, seq=event.seq, why=error, again_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_LONGEST_S)

    def _body(self, event: FeedEvent) -> bytes:
        owner = self._owner_of(event.job) if event.job is not None else None
        return msgspec.json.encode(
            {
                "type": event.event,
                "timestamp": event.time,
                "data": {
                    **event.detail,  # metrics of a sweep have any name
                    "seq": event.seq,
                    "job": event.job,
                    "node": event.node,
                    "user": owner.user if owner else None,
                    "project": owner.project if owner else None,
                },
            }
        )

    async def _send(self, hook: Webhook, event: FeedEvent, body: bytes) -> str:
        """Send an event. Return why that failed, or "" if the receiver accepted it."""
        # The time keeps ids apart if a restored journal uses its numbers again.
        name, at = f"{self._journal}-{event.seq}-{event.time * 1000:.0f}", str(int(time.time()))
        headers = {
            "content-type": "application/json",
            "user-agent": "ones",
            "webhook-id": name,
            "webhook-timestamp": at,
        }
        if (secret := self._secrets.get(hook.name)) is not None:
            signed = hmac.digest(secret, f"{name}.{at}.".encode() + body, hashlib.sha256)
            headers["webhook-signature"] = f"v1,{base64.b64encode(signed).decode()}"
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status = await _post(_address(hook), headers, body)
        except TimeoutError:
            return f"no reply within {TIMEOUT_S:g} s"
        except (OSError, h11.ProtocolError) as error:
            return str(error) or repr(error)
        return "" if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES else f"status {status}"

    async def _done(self, hook: Webhook, seq: int) -> None:
        """Store durably that a webhook is done with all events up to number `seq`."""
        self._delivered[hook.name] = seq
        self._stored_at = asyncio.get_running_loop().time()
        names = {one.name for one in self._hooks}
        while True:
            async with self._writing:
                known = {name: done for name, done in self._delivered.items() if name in names}
                try:
                    stored = _Progress(journal=self._journal, delivered=known)
                    return await asyncio.to_thread(self._write, msgspec.json.encode(stored))
                except OSError as error:  # such as a full disk
                    log.warning("progress of webhooks not stored", why=error.strerror)
            await asyncio.sleep(RETRY_FIRST_S)

    def _read(self) -> dict[str, int]:
        try:
            stored = _progress.decode(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            raise SettingsError(
                f"{self._path}: {error}", "delete it to begin with new events", "webhooks"
            ) from None
        last, delivered = self._feed.last_seq, stored.delivered
        of_other = {n for n, done in delivered.items() if not 0 <= done <= last}
        if stored.journal != self._journal:
            of_other = set(delivered)
        if of_other:
            why = "another journal, or a newer one, was delivered: begins with the next event"
            log.warning("webhooks begin again", names=sorted(of_other), why=why)
        return {name: last if name in of_other else done for name, done in delivered.items()}

    def _write(self, data: bytes) -> None:
        fresh = self._path.with_suffix(".new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)
        sync_folder(self._path.parent)


async def _post(url: SplitResult, headers: Mapping[str, str], body: bytes) -> int:
    """Send a request and return the status of the reply. A redirect is not followed.

    Raises:
        OSError: if the receiver cannot be reached, or has no valid certificate.
        h11.ProtocolError: if the reply is not HTTP.
    """
    secure = url.scheme == "https"
    port = url.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(url.hostname, port, ssl=secure or None)
    try:
        connection = h11.Connection(h11.CLIENT)
        target = (url.path or "/") + (f"?{url.query}" if url.query else "")
        fields = {
            "host": url.netloc.rpartition("@")[2], "content-length": str(len(body)),
            "connection": "close", **headers,
        }  # fmt: skip
        request = h11.Request(method="POST", target=target, headers=list(fields.items()))
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            writer.write(connection.send(event) or b"")
        while not isinstance(reply := connection.next_event(), h11.Response):
            if reply is h11.NEED_DATA:
                connection.receive_data(await reader.read(1 << 16))
        return reply.status_code
    finally:
        writer.transport.abort()
