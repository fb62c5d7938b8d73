"""Processes and connections of this node's zygotes, one for each interpreter and user.

The fork servers of rigid jobs are zygotes without an interpreter of the job: one for each user.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import psutil
import structlog

from nodeagent.accounts import PRLIMIT, SETPRIV, Account
from nodeagent.cgroups import PIDS
from nodeagent.errors import NodeStartError, StartError
from nodeagent.folders import NodeFolders, zygote_outputs
from nodeagent.job_cgroups import JobGroups
from nodeagent.owned_files import make_folder, remove_tree
from nodeagent.process_identity import (
    belongs_to,
    has_exited,
    is_child,
    leads_session,
    runs,
    start_ticks,
)
from nodeagent.settings import Jobs
from schemas.codec import FROM_ZYGOTE
from schemas.errors import MalformedMessageError, OnesError, install_hint
from schemas.host.files import open_regular
from schemas.host.fork_server import NO_SECRETS, framed, read_frame
from schemas.host.logging import Audit
from schemas.jobs import is_reserved
from schemas.wire import Message
from schemas.wire.worker import (
    ZYGOTE_TITLE,
    Fork,
    Forked,
    ForkFailed,
    Held,
    LetGo,
    ProcessMark,
    ZygoteReady,
)

log = structlog.get_logger("zygotes")
NODE_SIGNALS: Final = frozenset({signal.SIGKILL, signal.SIGTERM})  # signals that the node sends
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
MODULE: Final = "elastic.worker.zygote"
LAUNCHER: Final = "nodeagent.launcher"  # stands for the interpreter of rigid jobs
WAITING_SHELL: Final = ("/bin/sh", "-c", 'read -r _ && exec "$@" </dev/null', "sh")
MAX_OUTPUT_BYTES: Final = 1 << 16  # bytes at the end of the output
VARIABLES: Final = (  # of the agent, which jobs get; patterns of names
    "PATH", "LANG", "LANGUAGE", "LC_*", "TZ", "LD_LIBRARY_PATH", "CUDA_*", "NVIDIA_*", "NCCL_*",
    "GLOO_*", "UCX_*", "FI_*", "ROCR_*", "HIP_*", "RES_OPTIONS", "SSL_CERT_DIR", "SSL_CERT_FILE",
    "TORCH_CPP_LOG_LEVEL",
)  # fmt: skip
OWN_VARIABLES: Final = (  # further variables, for jobs that run as the agent
    "HOME", "USER", "LOGNAME", "TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_*", "TRITON_*",
)  # fmt: skip
START_TIMEOUT_S: Final = 180.0  # a cold import of torch on a busy host
RECONNECT_TIMEOUT_S: Final = 5.0  # a running zygote checks its socket's file every second
FORK_TIMEOUT_S: Final = 60.0
LEADER_TIMEOUT_S: Final = 5.0  # from a fork to the new session of the child
PROBE_S: Final = 0.05
SESSION_PROBE_S: Final = 0.002
MAX_ZYGOTE_MESSAGE_BYTES: Final = 1 << 16  # bytes of a message
_AUDIT: Final = Audit()
PEER: Final = struct.Struct("iII")  # pid, uid and gid of the peer, see unix(7)


def starting_zygotes(path: Path, workers: Container[int], uid: int) -> list[tuple[int, int, float]]:
    """Return pid, start time and age (s) of each zygote that does not reply on its socket yet.

    A starting worker has the command line of its zygote, but is skipped because its pid is in
    `workers`. A process that a worker forked is skipped because it leads no session. Processes of
    users other than `uid` are skipped because any user can fake a command line.
    """
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if process.pid in workers or not is_zygote(process, str(path)):
            continue
        if not belongs_to(process.pid, uid):
            continue
        ticks = start_ticks(process.pid)
        with contextlib.suppress(OSError):
            if os.getsid(process.pid) == process.pid and ticks is not None:
                found.append((process.pid, ticks, now_s - ticks / TICKS_PER_S))
    return found


def is_zygote(process: psutil.Process, where: str) -> bool:
    """True if a process is a zygote with a socket path that begins with `where`.

    A serving zygote shows its title as command line. `process.info` must have `cmdline`.
    """
    arguments = process.info["cmdline"] or [""]
    ours = MODULE in arguments or LAUNCHER in arguments
    begins = ours and any(one.startswith(where) for one in arguments)
    return begins or arguments[0].startswith(f"{ZYGOTE_TITLE} {where}")


def spawn(
    python: str,
    path: Path,
    output: Path,
    account: Account | None = None,
    *,
    limits: Jobs | None = None,
    enter: Callable[[int], None] | None = None,
    job_umask: int = -1,
) -> subprocess.Popen[bytes]:
    """Start a zygote under `account`, or under the agent's account if `account` is None.

    The limits apply to the zygote and its workers. `output` must not be in a folder of the account.
    `enter` moves the process into its control group before its interpreter starts. `job_umask` is
    for jobs that run as the agent; -1 keeps the umask of this process.
    """
    environ = _environment(limits or Jobs(), account)
    identity: dict[str, Any] = {"umask": job_umask}
    if account is not None:
        uid, gid = account.owner
        identity = {
            "user": uid, "group": gid, "extra_groups": list(account.groups), "umask": 0o077,
            "cwd": "/",
        }  # fmt: skip
    own = python == LAUNCHER
    module = [sys.executable, "-P", "-m", LAUNCHER] if own else [python, "-P", "-m", MODULE]
    zygote = [*module, "--socket", str(path)]
    # Files with a setuid bit must not give jobs more rights.
    restricted = [SETPRIV, "--no-new-privs", "--"] if account is not None else []
    command = [*_limited(limits), *restricted, *zygote]
    if enter is not None:
        command = [*WAITING_SHELL, *command]
    try:
        sink = output.open("wb")
    except OSError as error:
        raise NodeStartError(f"cannot write {output}: {error.strerror}") from None
    try:
        with sink:
            process = subprocess.Popen(  # noqa: S603 - an interpreter that the job's owner named
                command,
                stdin=subprocess.DEVNULL if enter is None else subprocess.PIPE,
                stdout=sink,
                stderr=sink,
                env=environ,
                start_new_session=True,
                **identity,
            )
    except OSError as error:
        hint = "give an interpreter that exists on every node and has torch and ONES"
        raise StartError(f"python {python!r}: {error.strerror}", hint) from None
    if enter is not None:
        _release_shell(process, enter)
    return process


def _environment(jobs: Jobs, account: Account | None) -> dict[str, str]:
    """Return the variables of a zygote. Unknown variables may be secrets of the agent."""
    names = (*VARIABLES, *jobs.variables, *(OWN_VARIABLES if account is None else ()))
    environ = {
        key: value
        for key, value in os.environ.items()
        if any(fnmatchcase(key, name) for name in names) and not is_reserved(key)
    }
    environ["OPENBLAS_NUM_THREADS"] = "1"  # threads would not survive the fork
    environ["PYTHONHASHSEED"] = "0"  # the same order of sets in all workers of a group
    # torch's store resolves the name of every peer; a lost reply should not cost 5 s.
    environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the library itself reports lost peers
    if account is not None:
        environ.update(HOME=account.home, USER=account.name, LOGNAME=account.name)
    return environ


def _release_shell(process: subprocess.Popen[bytes], enter: Callable[[int], None]) -> None:
    """Let the waiting shell continue. A shell that receives no input exits."""
    if (gate := process.stdin) is None:
        return
    with gate:
        enter(process.pid)
        with contextlib.suppress(BrokenPipeError):
            gate.write(b"\n")
            gate.flush()


def _limited(limits: Jobs | None) -> list[str]:
    if limits is None:
        return []
    words = [f"--nofile={limits.files}:{limits.files}"] if limits.files else []
    words += [f"--nproc={limits.pids}:{limits.pids}"] if limits.pids else []
    return [PRLIMIT, *words, "--"] if words else []


def start_error(python: str, output: Path) -> StartError:
    """Return the error of a zygote that exited during its start."""
    descriptor = open_regular(output)
    try:
        start = max(0, os.fstat(descriptor).st_size - MAX_OUTPUT_BYTES)
        text = os.pread(descriptor, MAX_OUTPUT_BYTES, start).decode(errors="replace")
    finally:
        os.close(descriptor)
    lines = text.strip().splitlines()
    text = lines[-1] if lines else "no output"
    return StartError(
        f"python {python!r} cannot run workers: {text}", install_hint("train", python)
    )


class Peer(NamedTuple):
    """Process at the other end of a Unix socket, named by the kernel (SO_PEERCRED)."""

    pid: int
    uid: int


@dataclass(slots=True)
class _Start:
    folder: str
    answer: asyncio.Future[Forked]
    enter: Callable[[int], None] | None
    secrets: Mapping[str, str]
    named: bool = False  # the zygote has named a process
    process: ProcessMark | None = None  # after it was checked and may start


class ZygoteConnection:
    """Connection to one zygote. `close` also closes the writer.

    The owner of the job chose the interpreter, so the zygote is not trusted: it may name only
    its own children, and these must run as its user.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: Peer
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._peer = peer
        self._starts: dict[str, _Start] = {}
        self._abandoned: set[str] = set()  # folders of starts that are no longer waited for
        self._letting_go: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._listen())
        self.ready: asyncio.Future[ZygoteReady] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        """True while the connection can be used."""
        return not self._task.done()

    async def fork(
        self,
        folder: Path,
        enter: Callable[[int], None] | None = None,
        secrets: Mapping[str, str] = NO_SECRETS,
    ) -> Forked:
        """Have the zygote start the worker of a folder that contains an assignment.

        `enter` moves the process into its control group before the worker starts. `secrets` are
        further variables of the worker, which only its process receives. If the zygote exits after
        the worker was allowed to start, the worker counts as started.

        Raises:
            StartError: if the worker did not start, or if the zygote named another process.
        """
        name = str(folder)
        start = _Start(name, asyncio.get_running_loop().create_future(), enter, secrets)
        self._starts[name] = start
        try:
            if not self.alive:
                raise ConnectionError("it has exited")
            self._send(Fork(folder=name))
            await self._writer.drain()
            return await asyncio.wait_for(start.answer, FORK_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            self._abandoned.add(name)
            raise NodeStartError("the zygote did not fork", str(error)) from None
        finally:
            self._starts.pop(name, None)

    def _send(self, message: Message) -> None:
        self._writer.write(framed(message))

    async def _let_go(self, start: _Start, held: Held) -> None:
        try:
            deadline = time.monotonic() + LEADER_TIMEOUT_S
            while not leads_session(held.pid) and time.monotonic() < deadline:
                await asyncio.sleep(SESSION_PROBE_S)  # not in a thread, of which there are few
            start.process = await asyncio.to_thread(self._check, held.pid, start.enter)
        except StartError as error:
            self._refuse(start, error)
            self._send(LetGo(folder=held.folder, error=error.message))
        except OSError as error:
            self._send(LetGo(folder=held.folder, error=f"its control group: {error}"))
        else:
            self._send(LetGo(folder=held.folder, secrets=dict(start.secrets)))

    def _check(self, pid: int, enter: Callable[[int], None] | None) -> ProcessMark:
        """Move a child of the zygote into its control group. The pidfd excludes a reused pid.

        The child must lead a session, because its process group is stopped as a whole.
        """
        other = StartError(f"its zygote named process {pid}, which is not its child")
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise other from None
        try:
            ticks = start_ticks(pid)
            own = is_child(pid, self._peer.pid) and belongs_to(pid, self._peer.uid) is True
            if ticks is None or not own or has_exited(pidfd):
                raise other
            if not leads_session(pid):
                raise StartError(f"its zygote named process {pid}, which leads no session")
            if enter is not None:
                enter(pid)
            if has_exited(pidfd):
                raise StartError("its process exited before the worker started")
        finally:
            os.close(pidfd)
        return ProcessMark(pid=pid, started_ticks=ticks)

    def _refuse(self, start: _Start, error: StartError) -> None:
        _AUDIT.refused("message of a zygote", error.message, peer=f"uid {self._peer.uid}")
        if not start.answer.done():
            start.answer.set_exception(error)

    async def _listen(self) -> None:
        gone: StartError = NodeStartError(
            "the zygote has exited", "it is restarted for the next worker"
        )
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            try:
                while True:
                    data = await read_frame(self._reader, MAX_ZYGOTE_MESSAGE_BYTES)
                    self._take(FROM_ZYGOTE.decode(data))
            except OnesError as error:
                gone = StartError(f"its zygote does not follow the protocol: {error}")
                self._writer.transport.abort()  # with what was not sent
                for start in self._starts.values():
                    self._refuse(start, gone)
        for start in self._starts.values():
            if start.answer.done():
                continue
            if start.process is not None:  # the reply was lost
                start.answer.set_result(_forked(start, start.process))
            else:
                start.answer.set_exception(gone)
        if not self.ready.done():
            self.ready.set_exception(gone)
            self.ready.exception()  # marks the exception as retrieved

    def _take(self, message: Message) -> None:
        match message:
            case ZygoteReady():
                if not self.ready.done():
                    self.ready.set_result(message)
            case Held(folder=folder) if folder in self._abandoned:
                self._abandoned.remove(folder)
                self._send(LetGo(folder=folder, error="the start was cancelled"))
            case Held(folder=folder):
                start = self._starts.get(folder)
                if start is None or start.named:
                    raise MalformedMessageError(f"a process for folder {folder[:200]!r}")
                start.named = True
                task = asyncio.create_task(self._let_go(start, message))
                self._letting_go.add(task)
                task.add_done_callback(self._letting_go.discard)
            case Forked(folder=folder) if start := self._starts.get(folder):
                if start.process is None or message != _forked(start, start.process):
                    what = f"its zygote named process {message.pid}, which it may not start"
                    self._refuse(start, StartError(what))
                elif not start.answer.done():
                    start.answer.set_result(message)
            case ForkFailed(folder=folder, error=error) if start := self._starts.get(folder):
                if not start.answer.done():
                    start.answer.set_exception(NodeStartError(error))

    def close(self) -> None:
        """Close the connection. The zygote continues."""
        self._task.cancel()
        self._writer.close()


class ZygotePool:
    """Connections to zygotes. The pool finds running zygotes and starts missing ones."""

    def __init__(
        self,
        folders: NodeFolders,
        limits: Jobs | None = None,
        groups: JobGroups | None = None,
        job_umask: int = -1,
    ) -> None:
        self._job_umask = job_umask
        self._folders = folders
        self._groups = groups or JobGroups()
        self.limits = limits
        self._folder = folders.sockets
        self._known: dict[tuple[str, int], ZygoteConnection] = {}
        self._locks: dict[tuple[str, int], asyncio.Lock] = {}

    async def fork(
        self,
        python: str,
        folder: Path,
        account: Account | None = None,
        enter: Callable[[int], None] | None = None,
        secrets: Mapping[str, str] = NO_SECRETS,
    ) -> Forked:
        """Start a worker. If the zygote exits meanwhile, replace the zygote once.

        `enter` and `secrets` are those of `ZygoteConnection.fork`.

        Raises:
            StartError: if the worker did not start. It names the interpreter and quotes its output.
        """
        zygote = await self.get(python, account)
        try:
            return await zygote.fork(folder, enter, secrets)
        except NodeStartError:
            if zygote.alive:
                raise
        return await (await self.get(python, account)).fork(folder, enter, secrets)

    async def get(self, python: str, account: Account | None = None) -> ZygoteConnection:
        """Return the zygote of an interpreter and account. Start a zygote if none is found.

        Each spelling of `python` has a zygote of its own.
        """
        uid = account.owner.uid if account else os.geteuid()
        key = python, uid
        async with self._locks.setdefault(key, asyncio.Lock()):
            known = self._known.get(key)
            if known is not None and known.alive:
                return known
            path = self._socket(python, account)
            zygote = await self._connect(path, uid) or await self._start(python, path, account)
            self._known[key] = zygote
            return zygote

    def forget(self, uid: int) -> None:
        """Close the connections to a user's zygotes, which are being killed. Delete their files."""
        for key in [key for key in self._known if key[1] == uid]:
            self._known.pop(key).close()
            self._locks.pop(key, None)
        remove_tree(self._folder / str(uid))
        for output in zygote_outputs(self._folders, uid):
            output.unlink(missing_ok=True)

    async def warm_up(self, python: str) -> None:
        """Start a zygote before the first job, unless the agent's interpreter has no torch."""
        if python == sys.executable and importlib.util.find_spec("torch") is None:
            return
        try:
            await self.get(python)
        except StartError as error:
            log.warning("zygote could not be started", error=str(error))

    def _socket(self, python: str, account: Account | None = None) -> Path:
        name = hashlib.sha256(python.encode()).hexdigest()
        if account is None:
            return self._folder / f"zygote-{name[:12]}.sock"
        return self._folder / str(account.owner.uid) / f"z-{name[:8]}.sock"

    async def _connect(self, path: Path, uid: int) -> ZygoteConnection | None:
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except OSError:
            return None
        peer = peer_of(writer.get_extra_info("socket"))
        if peer.uid != uid:  # a link, or another user's socket
            writer.close()
            return None
        zygote = ZygoteConnection(reader, writer, peer)
        try:
            await asyncio.wait_for(asyncio.shield(zygote.ready), START_TIMEOUT_S)
        except (StartError, TimeoutError):
            zygote.close()
            return None
        return zygote

    async def _start(self, python: str, path: Path, account: Account | None) -> ZygoteConnection:
        uid = account.owner.uid if account else os.geteuid()
        if (found := await self._await_former(path, uid)) is not None:
            log.info("zygote found", python=python, uid=uid)
            return found
        output = self._clear(path, account)
        enter = None
        if account is not None and self._groups.there:
            enter = partial(self._groups.enter_zygote, account.cgroup)
        process = spawn(
            python,
            path,
            output,
            account,
            limits=self._rlimits(),
            enter=enter,
            job_umask=self._job_umask,
        )
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while asyncio.get_running_loop().time() < deadline:
            zygote = await self._connect(path, uid)
            if zygote is not None:
                log.info("zygote ready", python=python, pid=process.pid, uid=uid)
                return zygote
            if (code := process.poll()) is not None:
                if -code in NODE_SIGNALS:
                    what = f"python {python!r} was killed by signal {-code} during its start"
                    raise NodeStartError(what)
                raise start_error(python, output)
            await asyncio.sleep(PROBE_S)
        process.kill()
        raise StartError(f"python {python} was not ready after {START_TIMEOUT_S:.0f} s")

    def _rlimits(self) -> Jobs | None:
        """Return the limits that control groups do not enforce. Running zygotes keep old limits."""
        if self.limits is not None and self._groups.bounds(PIDS):
            return msgspec.structs.replace(self.limits, pids=0)
        return self.limits

    def _clear(self, path: Path, account: Account | None) -> Path:
        path.unlink(missing_ok=True)
        if account is None:
            return path.with_suffix(".log")
        make_folder(path.parent, account.owner)
        self._folders.zygotes.mkdir(mode=0o700, exist_ok=True)
        return self._folders.zygotes / f"{account.owner.uid}-{path.stem}.log"

    async def _await_former(self, path: Path, uid: int) -> ZygoteConnection | None:
        """Wait until a zygote of an earlier agent replies, and return its connection.

        Such a zygote may still import torch, or may have to create its socket's file again. Return
        None if no such zygote exists, or if none replies in time.
        """
        workers = {mark.pid for folder in self._folders.workers() if (mark := folder.mark())}
        loop = asyncio.get_running_loop()
        for pid, ticks, age_s in await asyncio.to_thread(starting_zygotes, path, workers, uid):
            deadline = loop.time() + max(START_TIMEOUT_S - age_s, RECONNECT_TIMEOUT_S)
            while runs(pid, ticks) and loop.time() < deadline:
                if (zygote := await self._connect(path, uid)) is not None:
                    return zygote
                await asyncio.sleep(PROBE_S)
        return None

    def close(self) -> None:
        """Close all connections."""
        for zygote in self._known.values():
            zygote.close()


def _forked(start: _Start, process: ProcessMark) -> Forked:
    """Return the reply that a zygote must give after it started a checked process."""
    return Forked(folder=start.folder, pid=process.pid, started_ticks=process.started_ticks)


def peer_of(connection: socket.socket) -> Peer:
    """Return the process at the other end of a Unix socket."""
    pid, uid, _ = PEER.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
    )
    return Peer(pid, uid)
