"""The controller's side of the relay process: starts it, keeps it informed, and restarts it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import structlog

from controlplane.journal.releases import child_command, child_environment
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.pipes import MessagePipe
from controlplane.service.relay import messages
from controlplane.service.settings import Store
from schemas.errors import OnesError, UnavailableError
from schemas.ids import NodeId
from schemas.transport.keys import Identity
from schemas.wire.files import AskFiles, AskPiece
from schemas.wire.streams import OpenStream

log = structlog.get_logger("relay")
RELAY_MODULE: Final = "controlplane.service.relay.process"
HANG_S: Final = 30.0  # without a message, after which the process is killed
START_S: Final = 600.0  # the same until it is ready, because it may have to replay inputs
STOP_S: Final = 5.0  # for its end, once its input has ended
RESTART_DELAYS_S: Final = (0.0, 0.5, 1.0, 2.0, 5.0)  # after 1, 2, 3, ... failures in a row
STABLE_AFTER_S: Final = 60.0  # a process that ran longer resets the number of failures
MAX_FIRST_STARTS: Final = 3  # the controller ends if the process has never become ready
MAX_UNSENT_BYTES: Final = 64 << 20  # above which the process is considered hung


class Process(Protocol):
    """Part of `asyncio.subprocess.Process` that is used here."""

    def kill(self) -> None:
        """End the process at once."""

    async def wait(self) -> object:
        """Wait for the end of the process."""


class Launch(Protocol):
    """Function that starts a relay process.

    The process reads messages from `source` and writes messages to `sink`. It runs `code`, a zip
    file, or the installed code if `code` is None. It inherits the descriptors in `listeners`.
    """

    def __call__(
        self, code: Path | None, source: int, sink: int, listeners: Sequence[int]
    ) -> Awaitable[Process]:
        """Start the process."""


async def launch(code: Path | None, source: int, sink: int, listeners: Sequence[int]) -> Process:
    """Start a relay process, see `Launch`."""
    return await asyncio.create_subprocess_exec(
        *child_command(RELAY_MODULE),
        stdin=source,
        stdout=sink,
        pass_fds=listeners,
        env=child_environment(code),
    )


@dataclass(kw_only=True, eq=False)
class RelayChild:
    """Relay process of this controller.

    `start` makes the first message for each process. `ask` sends an agent a request, and returns
    False if the node is not connected.
    """

    commit_loop: CommitLoop
    start: Callable[[], messages.StartRelay]
    ask: Callable[[NodeId, AskFiles | AskPiece | OpenStream], bool]
    code: Path | None = None  # zip file of the process's code; None: the installed code
    launch: Launch = launch

    def __post_init__(self) -> None:
        """Set up the state that no caller passes."""
        self._loop = asyncio.get_running_loop()
        self._pipe: MessagePipe[messages.FromRelay] | None = None
        self._heard_at = 0.0
        self.is_up = False  # True while the process serves its ports
        self.restarts = 0
        self.first_ready: asyncio.Future[None] = self._loop.create_future()
        self.failed: asyncio.Future[OnesError] = self._loop.create_future()
        self.commit_loop.on_acknowledged = self._acknowledged

    def change_keys(self, valid: dict[bytes, Identity], gone: Sequence[bytes]) -> None:
        """Report keys that became valid or have another owner, and keys that are not valid."""
        self._send(messages.KeysChanged(valid=valid, gone=list(gone)))

    def change_store(self, store: Store) -> None:
        """Apply these settings from now on."""
        self._send(messages.StoreChanged(store=store))

    async def run(self) -> None:
        """Run the process and restart it whenever it ends, until cancelled or failed."""
        failures = 0
        while True:
            began = self._loop.time()
            try:
                await self._run_process()
            except (OSError, ValueError) as error:
                log.warning("log relay failed", why=str(error))
            is_stable = self.first_ready.done() and self._loop.time() - began > STABLE_AFTER_S
            failures = 1 if is_stable else failures + 1
            if not self.first_ready.done() and failures >= MAX_FIRST_STARTS:
                what = "the log relay does not start"
                self.failed.set_result(UnavailableError(what, "see the log above"))
                return
            self.restarts += 1
            log.warning("log relay ended, restarting", restarts=self.restarts)
            await asyncio.sleep(RESTART_DELAYS_S[min(failures, len(RESTART_DELAYS_S)) - 1])

    async def _run_process(self) -> None:
        ends = [*os.pipe()]
        try:
            ends += os.pipe()
        except OSError:  # no descriptors are left
            for end in ends:
                os.close(end)
            raise
        source, child_sink, child_source, sink = ends
        pipe = self._pipe = MessagePipe(source, sink, messages.FROM_RELAY, self._receive)
        process = None
        try:
            try:
                start = self.start()
                pipe.send(start)  # before anything can change
                listeners = (start.shippers.descriptor, start.followers.descriptor)
                process = await self.launch(self.code, child_source, child_sink, listeners)
            finally:
                os.close(child_source)
                os.close(child_sink)
            self._heard_at = self._loop.time()
            await self._keep_informed(pipe)
        finally:
            self._pipe, self.is_up = None, False
            pipe.close()
            if process is not None:
                await _end(process)

    async def _keep_informed(self, pipe: MessagePipe[messages.FromRelay]) -> None:
        """Send how far inputs are acknowledged, until the process has ended or hangs."""
        while not pipe.ended.done():
            self._acknowledged(self.commit_loop.acknowledged)
            await asyncio.wait({pipe.ended}, timeout=messages.PULSE_S)
            pipe.read()
            limit_s = HANG_S if self.is_up else START_S
            is_silent = self._loop.time() - self._heard_at > limit_s
            if is_silent or pipe.unsent_bytes > MAX_UNSENT_BYTES:
                log.warning("log relay hangs, ending it")
                return

    def _receive(self, message: messages.FromRelay) -> None:
        self._heard_at = self._loop.time()
        match message:
            case messages.RelayReady():
                self.is_up = True
                if not self.first_ready.done():
                    self.first_ready.set_result(None)
            case messages.AskNode(node=node, message=asked):
                if not self.ask(node, asked):
                    self._send(messages.NodeAway(message=asked))

    def _acknowledged(self, last: int) -> None:
        self._send(messages.InputsAcknowledged(last=last))

    def _send(self, message: messages.ToRelay) -> None:
        if self._pipe is not None:
            self._pipe.send(message)


async def _end(process: Process) -> None:
    """Wait for the end of a process whose input has ended, or kill it."""
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
