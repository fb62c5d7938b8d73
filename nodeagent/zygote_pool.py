"""Conversations with the zygotes of this node, one for each interpreter."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Container
from pathlib import Path
from typing import Final

import psutil
import structlog

from nodeagent.agent_errors import NodeStartError, StartError
from nodeagent.process_identity import start_ticks
from nodeagent.worker_folders import FRAME, NodeFolders, WorkerFolder
from schemas.codec import FROM_ZYGOTE, MAX_BYTES, encode
from schemas.errors import OnesError
from schemas.messages import Message
from schemas.messages.worker import Fork, Forked, ForkFailed, ZygoteReady

log = structlog.get_logger("zygotes")
START_LIMIT_S: Final = 180.0  # a cold import of torch on a busy host
FOUND_AGAIN_S: Final = 5.0  # one that runs looks for its socket's file every second
FORK_LIMIT_S: Final = 60.0
FROM_OUTSIDE: Final = frozenset({signal.SIGKILL, signal.SIGTERM})  # by the node, not its own end
PROBE_S: Final = 0.05
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
MODULE: Final = "elastic.worker.zygote"
NOT_PASSED_ON: Final = (
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "RANK",
    "WORLD_SIZE",
    "TORCH_DISTRIBUTED_DEBUG",  # DETAIL has torch end the process when another one of a group dies
)


class ZygoteConnection:
    """One connection to one zygote.

    Args:
        reader: of the zygote's Unix socket.
        writer: of the same; closed by `close`.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: dict[str, asyncio.Future[Forked]] = {}
        self._task = asyncio.create_task(self._listen())
        self.ready: asyncio.Future[ZygoteReady] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        """Whether it can still be asked."""
        return not self._task.done()

    async def fork(self, folder: Path) -> Forked:
        """Have it start the worker of `folder`.

        Args:
            folder: of the worker, with its assignment in it.

        Returns:
            Its pid and start time.

        Raises:
            StartError: if it did not.
        """
        answer: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        self._waiting[str(folder)] = answer
        data = encode(Fork(folder=str(folder)))
        try:
            self._writer.write(FRAME.pack(len(data)) + data)
            await self._writer.drain()
            return await asyncio.wait_for(answer, FORK_LIMIT_S)
        except (OSError, TimeoutError) as error:
            raise NodeStartError("the zygote did not fork", str(error)) from None
        finally:
            self._waiting.pop(str(folder), None)

    async def _listen(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError, OnesError):
            while True:
                (length,) = FRAME.unpack(await self._reader.readexactly(FRAME.size))
                if length > MAX_BYTES:
                    break  # it is no zygote of ours
                self._take(FROM_ZYGOTE.decode(await self._reader.readexactly(length)))
        gone = NodeStartError("the zygote is gone", "it is started again for the next worker")
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(gone)
        if not self.ready.done():
            self.ready.set_exception(gone)
            self.ready.exception()  # seen, even if nobody waits for it

    def _take(self, message: Message) -> None:
        match message:
            case ZygoteReady():
                if not self.ready.done():
                    self.ready.set_result(message)
            case Forked(folder=folder):
                if (waiting := self._waiting.get(folder)) and not waiting.done():
                    waiting.set_result(message)
            case ForkFailed(folder=folder, error=error):
                if (waiting := self._waiting.get(folder)) and not waiting.done():
                    waiting.set_exception(NodeStartError(error))

    def close(self) -> None:
        """Hang up; the zygote lives on."""
        self._task.cancel()
        self._writer.close()


class ZygotePool:
    """Finds running zygotes again and starts missing ones; never ends one.

    Args:
        folders: of the node; sockets and output of zygotes lie in its `sockets`.
    """

    def __init__(self, folders: NodeFolders) -> None:
        self._folders = folders
        self._folder = folders.sockets
        self._known: dict[str, ZygoteConnection] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def fork(self, python: str, folder: Path) -> Forked:
        """Start a worker; a zygote that died meanwhile is replaced once.

        Args:
            python: path or name of the job's interpreter.
            folder: of the worker, with its assignment in it.

        Returns:
            Its pid and start time.

        Raises:
            StartError: naming the interpreter and what it said.
        """
        zygote = await self.get(python)
        try:
            return await zygote.fork(folder)
        except StartError:
            if zygote.alive:
                raise
        if (
            mark := WorkerFolder(folder).mark()
        ) is not None:  # it forked, and died before it said so
            return Forked(folder=str(folder), pid=mark.pid, started_ticks=mark.started_ticks)
        return await (await self.get(python)).fork(folder)

    async def knows_tokens(self, python: str) -> bool:
        """Whether workers of an interpreter's zygote show tokens; one that runs may be older.

        Args:
            python: path or name of the interpreter.

        Raises:
            StartError: naming the interpreter and what it said.
        """
        return (await (await self.get(python)).ready).tokens

    async def get(self, python: str) -> ZygoteConnection:
        """The zygote of an interpreter, running: one that is found, or a new one.

        Args:
            python: path or name of the interpreter; each spelling has a zygote of its own.

        Raises:
            StartError: naming the interpreter and what it said.
        """
        async with self._locks.setdefault(python, asyncio.Lock()):
            known = self._known.get(python)
            if known is not None and known.alive:
                return known
            zygote = await self._connect(self._socket(python)) or await self._start(python)
            self._known[python] = zygote
            return zygote

    async def warm_up(self, python: str) -> None:
        """Have an interpreter's zygote ready before the first job needs it.

        Args:
            python: the default one; nothing happens where it is this one, and has no torch.
        """
        if python == sys.executable and importlib.util.find_spec("torch") is None:
            return
        try:
            await self.get(python)
        except StartError as error:
            log.warning("no zygote yet", error=str(error))

    def _socket(self, python: str) -> Path:
        return self._folder / f"zygote-{hashlib.sha256(python.encode()).hexdigest()[:12]}.sock"

    async def _connect(self, path: Path) -> ZygoteConnection | None:
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except OSError:
            return None
        zygote = ZygoteConnection(reader, writer)
        try:
            await asyncio.wait_for(asyncio.shield(zygote.ready), START_LIMIT_S)
        except (StartError, TimeoutError):
            zygote.close()
            return None
        return zygote

    async def _start(self, python: str) -> ZygoteConnection:
        path = self._socket(python)
        if (found := await self._await_former(path)) is not None:
            log.info("zygote found", python=python)
            return found
        output = path.with_suffix(".log")
        path.unlink(missing_ok=True)
        process = _spawn(python, path, output)
        deadline = asyncio.get_running_loop().time() + START_LIMIT_S
        while asyncio.get_running_loop().time() < deadline:
            zygote = await self._connect(path)
            if zygote is not None:
                log.info("zygote ready", python=python, pid=process.pid)
                return zygote
            if (code := process.poll()) is not None:
                if -code in FROM_OUTSIDE:
                    what = f"python {python!r} was ended by signal {-code} as it began"
                    raise NodeStartError(what)
                raise _cannot(python, output)
            await asyncio.sleep(PROBE_S)
        process.kill()
        raise StartError(f"python {python} was not ready after {START_LIMIT_S:.0f} s")

    async def _await_former(self, path: Path) -> ZygoteConnection | None:
        """One that a former life of this agent started.

        It imports torch at this moment, or looks for its socket's file, which somebody deleted.
        """
        workers = {mark.pid for folder in self._folders.workers() if (mark := folder.mark())}
        loop = asyncio.get_running_loop()
        for pid, ticks, age_s in await asyncio.to_thread(_former, path, workers):
            deadline = loop.time() + max(START_LIMIT_S - age_s, FOUND_AGAIN_S)
            while start_ticks(pid) == ticks and loop.time() < deadline:
                if (zygote := await self._connect(path)) is not None:
                    return zygote
                await asyncio.sleep(PROBE_S)
        return None

    def close(self) -> None:
        """Hang up on all of them."""
        for zygote in self._known.values():
            zygote.close()


def _former(path: Path, workers: Container[int]) -> list[tuple[int, int, float]]:
    """Zygotes for this socket that do not answer yet, as pid, start time and age in seconds.

    A worker has its zygote's command line, but a mark; and what a worker forked leads no session.
    """
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    found = []
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"] or []
        if MODULE not in arguments or str(path) not in arguments or process.pid in workers:
            continue
        ticks = start_ticks(process.pid)
        with contextlib.suppress(OSError):
            if os.getsid(process.pid) == process.pid and ticks is not None:
                found.append((process.pid, ticks, now_s - ticks / TICKS_PER_S))
    return found


def _spawn(python: str, path: Path, output: Path) -> subprocess.Popen[bytes]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("ONES_")}
    for name in NOT_PASSED_ON:
        environ.pop(name, None)
    environ["OPENBLAS_NUM_THREADS"] = "1"  # its threads would not survive the fork
    # torch's store asks the name service for every peer; a lost answer should not cost 5 s.
    environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # lost peers are ours to tell of
    command = [python, "-P", "-m", MODULE, "--socket", str(path)]
    try:
        sink = output.open("wb")
    except OSError as error:
        raise NodeStartError(f"cannot write {output}: {error.strerror}") from None
    try:
        with sink:
            return subprocess.Popen(  # noqa: S603 - an interpreter that the job's owner named
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=environ,
                start_new_session=True,
            )
    except OSError as error:
        hint = "give an interpreter that exists on every node and has torch and ONES"
        raise StartError(f"python {python!r}: {error.strerror}", hint) from None


def _cannot(python: str, output: Path) -> StartError:
    lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    said = lines[-1] if lines else "it said nothing"
    hint = f"in a checkout of ONES: {python} -m pip install '.[train]'"
    return StartError(f"python {python!r} cannot run workers: {said}", hint)
