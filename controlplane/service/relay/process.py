"""Relay process, a child of the controller.

Run as `python -P -m controlplane.service.relay.process`. The process reads messages from standard
input and writes messages to standard output. It exits at the end of the input, so that it cannot
outlive the controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog
import uvloop
from setproctitle import setproctitle

from controlplane.service.file_keeper import OutputKeeper, tidy_repeatedly
from controlplane.service.pipes import MessagePipe
from controlplane.service.relay import messages
from controlplane.service.relay.job_files import JobFiles
from controlplane.service.relay.log_relay import LogRelay
from controlplane.service.relay.log_store import LogStore
from controlplane.service.relay.state_follower import StateFollower
from controlplane.service.relay.stream_relay import StreamRelay
from controlplane.service.uploads import StoredArchives
from schemas.errors import OnesError, UnavailableError
from schemas.host.logging import Audit, configure_logging
from schemas.host.memory import collect_garbage_seldom
from schemas.host.tasks import supervised
from schemas.ids import JobId, NodeId
from schemas.transport.keys import Identity, KeyPair, KnownKeys
from schemas.transport.sockets import Link
from schemas.wire.files import AskFiles, AskPiece
from schemas.wire.streams import OpenStream

log = structlog.get_logger("relay")
MAX_QUESTION: Final = 64 << 10  # bytes of a request
QUEUED_PAGES: Final = 2  # pages of 1 MiB that are queued for a follower that does not read
IO_THREADS: Final = 2
POLL_S: Final = 0.1  # between two looks at the controller's messages, if nothing else arrives
NICENESS: Final = 3  # the controller takes precedence; a search has 5


class RelayProcess:
    """Parts of the relay process. `run` ends when the controller has ended, or is silent."""

    _link: Link | None = None

    def __init__(
        self,
        source: int,
        sink: int,
        make_link: Callable[[KeyPair], Link] = lambda keys: Link(keys, io_threads=IO_THREADS),
    ) -> None:
        self._make_link = make_link
        self._loop = asyncio.get_running_loop()
        self._pipe = MessagePipe(source, sink, messages.TO_RELAY, self._receive)
        self._started: asyncio.Future[messages.StartRelay] = self._loop.create_future()
        self._early: list[messages.ToRelay] | None = []  # messages before all parts are made
        self._heard_at = self._loop.time()

    async def run(self) -> None:
        """Start as the first message says, and serve the ports."""
        try:
            await self._wait_for(self._started)
            if not self._started.done():
                return
            self._open(self._started.result())
            await self._serve()
        finally:
            self._pipe.close()
            if self._link is not None:
                self._link.close()

    def _open(self, start: messages.StartRelay) -> None:
        state = Path(start.state)
        self._start = start
        self._audit = Audit()
        self._known = KnownKeys(start.keys)
        self._follower = StateFollower(Path(start.journal), start.acknowledged, self._job_changed)
        self._logs = LogStore(state / "logs", start.store.log_bytes_per_job)
        self._keeper = OutputKeeper(lambda: self._follower.state, self._logs, start.store)
        link = self._link = self._make_link(start.server)
        self._authority = link.authority(
            self._known, lambda why, address: self._audit.refused("key", why, peer=address)
        )
        self._guard = lambda: link.guard_connections(partial(self._audit.refused, "connection"))
        shippers = link.bind("ROUTER", start.shippers.address, listener=start.shippers.descriptor)
        followers = link.bind(
            "ROUTER",
            start.followers.address,
            queued=QUEUED_PAGES,
            largest=MAX_QUESTION,
            listener=start.followers.descriptor,
        )
        self._files = JobFiles(state=lambda: self._follower.state, ask=self._ask)
        self._streams = StreamRelay(
            shippers=shippers, followers=followers, job=self._follower.job, ask=self._ask,
            audit=self._audit, clock=time.monotonic,
        )  # fmt: skip
        self._log_relay = LogRelay(
            shippers=shippers,
            followers=followers,
            streams=self._streams,
            store=self._logs,
            snapshots=StoredArchives(state / "snapshots"),
            files=self._files,
            state=lambda: self._follower.state,
            job=self._follower.job,
            records=self._follower.records,
            catch_up=self._catch_up,
            now=self._follower.now,
            audit=self._audit,
            bytes_per_s=start.store.log_bytes_per_s,
        )
        early, self._early = self._early or [], None
        for message in early:
            self._receive(message)
        # Without reading at each commit, this process does not compete with the controller.
        self._pipe.read_on_demand()
        self._heard_at = self._loop.time()

    async def _serve(self) -> None:
        works: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "audit": self._audit.log_suppressed,
            "connections": self._guard,
            "shippers": self._log_relay.serve_shippers,
            "followers": self._log_relay.serve_followers,
            "streams": self._streams.watch,
            "files": lambda: tidy_repeatedly(self._keeper.tidy),
        }
        failed = asyncio.create_task(self._follower.failure())
        authority = asyncio.create_task(self._authority.run())
        tasks = [
            failed,
            authority,
            *(asyncio.create_task(supervised(name, work)) for name, work in works.items()),
        ]
        self._pipe.send(messages.RelayReady())
        try:
            while not (failed.done() or authority.done() or self._pipe.ended.done()):
                self._pipe.read()
                if self._is_controller_silent():
                    log.error("controller is silent, ending", silence_s=self._start.silence_s)
                    return
                self._pipe.send(messages.RelayAlive())
                await self._wait_for(failed, POLL_S)
            if failed.done():
                log.error("journal cannot be followed, ending", why=repr(failed.result()))
            if authority.done():
                log.error("keys cannot be checked, ending", why=repr(authority.exception()))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._follower.close()

    async def _wait_for(self, event: asyncio.Future[Any], timeout_s: float | None = None) -> None:
        """Wait for an event, the end of the pipe, or the timeout."""
        ends: list[asyncio.Future[Any]] = [event, self._pipe.ended]
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    def _catch_up(self) -> None:
        """Receive all messages of the controller that have arrived.

        Raises:
            UnavailableError: if the controller is silent, so that another one might be active, or
                if the journal cannot be followed.
        """
        self._pipe.read()
        self._follower.follow(self._follower.last)
        if self._is_controller_silent():
            raise UnavailableError("the controller does not respond", "try again")

    def _is_controller_silent(self) -> bool:
        return self._loop.time() - self._heard_at > self._start.silence_s

    def _receive(self, message: messages.ToRelay) -> None:
        self._heard_at = self._loop.time()
        if isinstance(message, messages.StartRelay):
            self._started.set_result(message)
            return
        if self._early is not None:
            self._early.append(message)
            return
        match message:
            case messages.InputsAcknowledged(last=last):
                with contextlib.suppress(UnavailableError):  # `_serve` logs the reason
                    self._follower.follow(last)
            case messages.KeysChanged(valid=valid, gone=gone):
                self._change_keys(valid, gone)
            case messages.StoreChanged(store=store):
                self._logs.max_bytes = store.log_bytes_per_job
                self._log_relay.bytes_per_s = store.log_bytes_per_s
                self._keeper.settings = store
            case messages.NodeAway(message=OpenStream() as asked):
                self._streams.node_away(asked)
            case messages.NodeAway(message=AskFiles(request=request) | AskPiece(request=request)):
                self._files.node_away(request)

    def _change_keys(self, valid: dict[bytes, Identity], gone: list[bytes]) -> None:
        self._known.listed |= valid
        for key in gone:
            self._known.listed.pop(key, None)
        self._log_relay.waiting.end_revoked()
        self._streams.end_revoked()

    def _ask(self, node: NodeId, message: AskFiles | AskPiece | OpenStream) -> None:
        self._pipe.send(messages.AskNode(node=node, message=message))

    def _job_changed(self, job: JobId) -> None:
        self._log_relay.job_changed(job)


async def _serve_and_exit(source: int, sink: int) -> None:
    await RelayProcess(source, sink).run()
    os._exit(0)  # the next process needs the ports, even if a thread still scans files


def main() -> None:
    """Serve until the end of standard input, which the controller closes."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to the whole group
        signal.signal(name, signal.SIG_IGN)
    source, sink = os.dup(0), os.dup(1)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # a stray print must not corrupt the stream
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    setproctitle("ones: relay")
    configure_logging()
    collect_garbage_seldom()
    try:
        uvloop.run(_serve_and_exit(source, sink))
    except OnesError as error:
        raise SystemExit(f"log relay: {error}") from None


if __name__ == "__main__":
    main()
