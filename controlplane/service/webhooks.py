"""Webhooks: HTTP requests for events of the feed, in order, by https://www.standardwebhooks.com.

The number of the last delivered event is stored after each delivery, so that a restarted controller
continues behind it. If the controller is killed between the receiver's reply and that write, the
event is sent again with the same `webhook-id`, by which the receiver recognises it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from controlplane.core.model.job import JobOwner
from controlplane.journal.reader import Reader
from controlplane.service.event_feed import EventFeed
from controlplane.service.settings import Webhook
from schemas.errors import SettingsError
from schemas.host.state_files import sync_folder
from schemas.ids import JobId
from schemas.transport.keys import require_private
from schemas.wire.feed import FeedEvent

log = structlog.get_logger("webhooks")
FILE: Final = "webhooks.json"
PAGE: Final = 500  # events read at a time
WAIT_S: Final = 30.0  # for the next event
TIMEOUT_S: Final = 10.0  # for a reply
RETRY_FIRST_S: Final = 1.0  # the pause doubles with each failure
RETRY_LONGEST_S: Final = 300.0
MAX_SECRET_BYTES: Final = 4096
_progress: Final = msgspec.json.Decoder(dict[str, int])


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect counts as a failure, because its target is not in the settings."""

    def redirect_request(self, *_: Any) -> None:
        return None


def load_secret(path: Path) -> bytes:
    """Return the secret with which requests are signed.

    Raises:
        SettingsError: if the file cannot be read, is empty, or is accessible to other users.
    """
    require_private(path)
    secret = path.read_bytes()[:MAX_SECRET_BYTES].strip()
    if not secret:
        raise SettingsError(f"{path} is empty", "write a random secret into it", "webhooks.key")
    return secret


def check_webhooks(hooks: tuple[Webhook, ...], home: Path) -> None:
    """Check that names differ and that secrets can be read.

    Raises:
        SettingsError: if that is not so.
    """
    names = [hook.name for hook in hooks]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"webhooks: two are named {name}", "rename one", "webhooks.name")
    for hook in hooks:
        if hook.key:
            load_secret(home / hook.key)


class Webhooks:
    """Delivery of events to all webhooks, each at its own pace.

    Args:
        home: folder in which relative paths of the settings start.
        state: folder of the file with the numbers of the delivered events.
        owner_of: returns the owner of a job, or None if the job is no longer kept.

    Raises:
        SettingsError: if a secret or the stored numbers cannot be read.
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
        self._opener = urllib.request.build_opener(_NoRedirects)

    def waiting(self) -> dict[str, int]:
        """Return how many events each webhook still has to look at."""
        last = self._feed.last_seq
        return {hook.name: last - self._delivered.get(hook.name, last) for hook in self._hooks}

    async def run(self) -> None:
        """Deliver events until cancelled. A new webhook begins with the next event."""
        async with asyncio.TaskGroup() as tasks:
            for hook in self._hooks:
                self._delivered.setdefault(hook.name, self._feed.last_seq)
                tasks.create_task(self._follow(hook))

    async def _follow(self, hook: Webhook) -> None:
        await self._done(hook, self._delivered[hook.name])
        while True:
            done = self._delivered[hook.name]
            last = self._feed.last_seq
            events = [one for one in self._reader.feed(done + 1, PAGE) if one.seq <= last]
            for event in events:
                if event.event in hook.events:
                    await self._deliver(hook, event)
                    await self._done(hook, event.seq)
            if events:
                self._delivered[hook.name] = events[-1].seq
            else:
                await self._feed.wait(WAIT_S)

    async def _deliver(self, hook: Webhook, event: FeedEvent) -> None:
        """Send an event until the receiver accepts it."""
        pause_s, body = RETRY_FIRST_S, self._body(event)
        while True:
            request = self._request(hook, event, body)
            error = await asyncio.to_thread(self._send, request)
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
                    "seq": event.seq,
                    "job": event.job,
                    "node": event.node,
                    "user": owner.user if owner else None,
                    "project": owner.project if owner else None,
                    **event.detail,
                },
            }
        )

    def _request(self, hook: Webhook, event: FeedEvent, body: bytes) -> urllib.request.Request:
        name, at = f"{self._journal}-{event.seq}", str(int(event.time))
        headers = {
            "content-type": "application/json",
            "user-agent": "ones",
            "webhook-id": name,
            "webhook-timestamp": at,
        }
        if (secret := self._secrets.get(hook.name)) is not None:
            signed = hmac.digest(secret, f"{name}.{at}.".encode() + body, hashlib.sha256)
            headers["webhook-signature"] = f"v1,{base64.b64encode(signed).decode()}"
        return urllib.request.Request(hook.url, body, headers)  # noqa: S310 - the settings allow http and https only

    def _send(self, request: urllib.request.Request) -> str:
        """Send a request. Return why it failed, or "" if the receiver accepted the event."""
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as reply:
                status = reply.status
        except urllib.error.HTTPError as error:
            status = error.code
        except (OSError, ValueError) as error:  # ValueError: not HTTP
            return str(error) or repr(error)
        return "" if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES else f"status {status}"

    async def _done(self, hook: Webhook, seq: int) -> None:
        """Store durably that a webhook is done with all events up to number `seq`."""
        self._delivered[hook.name] = seq
        names = {one.name for one in self._hooks}
        while True:
            async with self._writing:
                known = {name: done for name, done in self._delivered.items() if name in names}
                try:
                    return await asyncio.to_thread(self._write, msgspec.json.encode(known))
                except OSError as error:  # such as a full disk
                    log.warning("progress of webhooks not stored", why=error.strerror)
            await asyncio.sleep(RETRY_FIRST_S)

    def _read(self) -> dict[str, int]:
        try:
            return _progress.decode(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            raise SettingsError(
                f"{self._path}: {error}", "delete it to begin with new events", "webhooks"
            ) from None

    def _write(self, data: bytes) -> None:
        fresh = self._path.with_suffix(".new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)
        sync_folder(self._path.parent)
