"""Health of a node. Repair folders and socket, and report what keeps workers from starting."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import getpass
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import structlog

from nodeagent.folders import NodeFolders
from schemas.errors import OnesError

log = structlog.get_logger("health")
folder_log = structlog.get_logger("folders")
PROBE: Final = ".ones-probe"
PROBE_BYTES: Final = 4096
CLEAR_FACTOR: Final = 2  # after a disk was full, this multiple of the reserve has to be free
HOST_ERRNOS: Final = frozenset({  # errors of the host, which no job or archive can cause
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
    errno.EAGAIN, errno.ESTALE,
})  # fmt: skip
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
CHECK_INTERVAL_S: Final = 2.0
SHARED_INTERVAL: Final = 10  # a shared folder is checked at every tenth check
RESPONSE_TIMEOUT_S: Final = 20.0  # a file system that takes longer is considered hung


def is_node_fault(error: OSError) -> bool:
    """True if the host, and not the data, caused this error of a file operation or fork."""
    return error.errno in HOST_ERRNOS


def free_bytes(folder: Path) -> int:
    """Return the free space of the file system that holds a folder."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


@dataclass(frozen=True, slots=True)
class Place:
    """A folder, and the name of its setting."""

    setting: str
    path: Path
    reserve_bytes: int  # less free space counts as full; 0: no limit
    own: bool = False  # True: must belong to the agent's user
    mode: int = 0o700  # mode when it is created

    def problem(self, *, full: bool) -> str:
        """Create a missing folder. Return what keeps workers from using the folder, and a remedy.

        `full` is True if the last check found a problem. Then more space has to be free.
        """
        try:
            self._make()
            if self.own and self.path.stat().st_uid != os.getuid():
                return self._describe("it belongs to another user", "choose a shorter path for run")
            self._probe()
        except OSError as error:
            return self._describe(error.strerror or str(error), _remedy(error))
        if free_bytes(self.path) < self.reserve_bytes * (CLEAR_FACTOR if full else 1):
            return self._describe(
                f"less than {self.reserve_bytes >> 20} MiB left", "free space there"
            )
        return ""

    @property
    def timeout_problem(self) -> str:
        """Problem to report if a check of the folder does not finish."""
        return self._describe("it does not respond", "check its file system")

    def _describe(self, what: str, remedy: str) -> str:
        return f"{self.setting} {self.path}: {what}; {remedy}"

    def _make(self) -> None:
        if not self.path.is_dir():
            # mkdir's `parents` would make all folders readable for all. Others may create them too.
            missing = [path for path in self.path.parents if not path.exists()]
            for path in (*reversed(missing), self.path):
                path.mkdir(mode=self.mode, exist_ok=True)
                path.chmod(self.mode)
            folder_log.warning("folder was missing, created again", path=str(self.path))

    def _probe(self) -> None:
        path = self.path / f"{PROBE}-{os.uname().nodename}-{os.getpid()}"
        try:
            with path.open("wb", buffering=0) as file:
                if file.write(bytes(PROBE_BYTES)) != PROBE_BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            with contextlib.suppress(OSError):
                path.unlink()


def _remedy(error: OSError) -> str:
    if error.errno in _NO_ROOM:
        return "free space there"
    if error.errno == errno.EROFS:
        return "mount it writable"
    if error.errno in {errno.EACCES, errno.EPERM}:
        return f"give it to user {_user()}"
    return "check its file system"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def checked_places(
    folders: NodeFolders, reserve_bytes: int
) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """Return the node's own folders that workers need, and the folders that nodes share."""
    run, workers, work, checkpoints = (
        Place(setting, path, reserve_bytes, mode=folders.mode)
        for setting, path in (
            ("run", folders.run),
            ("run", folders.run / "workers"),
            ("work", folders.work),
            ("checkpoints", folders.checkpoints),
        )
    )
    sockets = Place("run", folders.sockets, 0, own=True, mode=folders.mode)
    return (run, workers, sockets, work), (checkpoints,)


class Checked(Protocol):
    """A part of the node that is checked in a thread of its own."""

    @property
    def setting(self) -> str:
        """Name of the setting that the problem concerns."""

    @property
    def timeout_problem(self) -> str:
        """Problem to report if a check does not finish."""

    def problem(self, *, full: bool) -> str:
        """Return what keeps workers from starting, and a remedy, or ""."""


@dataclass(slots=True)
class _FolderCheck:
    """Check of a folder or of GPUs, with the running check and the result of the last check."""

    place: Checked
    every: int  # 1: checked at every check of the watch; 10: at every tenth check
    found: str = ""
    began: float | None = None
    ended: asyncio.Event | None = None


class HealthWatch:
    """Periodic checks of the folders and of the workers' socket.

    `listen` binds the socket again and may raise an `OnesError` or `OSError`. `changed` receives
    the current problems whenever they change.
    """

    def __init__(
        self,
        *,
        places: Sequence[Place],
        shared: Sequence[Checked],
        socket: Path,
        listen: Callable[[], None],
        changed: Callable[[tuple[str, ...]], None],
    ) -> None:
        self._checks = [_FolderCheck(place, 1) for place in places]
        self._checks += [_FolderCheck(place, SHARED_INTERVAL) for place in shared]
        self._socket = socket
        self._identity = _identity(socket)
        self._listen = listen
        self._changed = changed
        self._count = 0
        self.problems: tuple[str, ...] = ()

    def reserve(self, reserve_bytes: int) -> None:
        """Change the free space below which a disk is full. The sockets' folder has no limit."""
        for look in self._checks:
            if isinstance(look.place, Place) and not look.place.own:
                look.place = replace(look.place, reserve_bytes=reserve_bytes)

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await self.look(everything=False)

    async def look(self, *, everything: bool = True) -> None:
        """Check once, and report changes. With `everything`, also check the shared folders."""
        loop = asyncio.get_running_loop()
        due = [
            look
            for look in self._checks
            if everything or not self._count % look.every or look.found
        ]
        self._count += 1
        for look in due:
            if look.began is None:
                self._start_check(look, loop)
        waits = [asyncio.ensure_future(look.ended.wait()) for look in due if look.ended]
        if waits:
            _, late = await asyncio.wait(waits, timeout=CHECK_INTERVAL_S)
            for wait in late:
                wait.cancel()
        for look in due:
            if look.began is not None and loop.time() - look.began > RESPONSE_TIMEOUT_S:
                look.found = look.place.timeout_problem
        found = {look.place.setting: look.found for look in reversed(self._checks) if look.found}
        self._report_changes([*reversed(found.values()), self._repair_socket()])

    def _start_check(self, look: _FolderCheck, loop: asyncio.AbstractEventLoop) -> None:
        """Check a folder in its own thread, so that a hanging file system blocks nothing else."""
        ended = look.ended = asyncio.Event()
        look.began = loop.time()

        def end(found: str) -> None:
            look.found, look.began = found, None
            ended.set()

        def work() -> None:
            found = look.place.problem(full=bool(look.found))
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(end, found)

        threading.Thread(target=work, name=f"check of {look.place.setting}", daemon=True).start()

    def _repair_socket(self) -> str:
        if self._identity is not None and _identity(self._socket) == self._identity:
            return ""
        try:
            self._listen()
        except (OnesError, OSError) as error:
            return f"run {self._socket}: workers cannot connect: {error}"
        self._identity = _identity(self._socket)
        log.warning("workers' socket was deleted, bound again", path=str(self._socket))
        return ""

    def _report_changes(self, found: Sequence[str]) -> None:
        problems = tuple(dict.fromkeys(filter(None, found)))
        if problems == self.problems:
            return
        self.problems = problems
        if problems:
            log.error("this node cannot start workers", problems=problems)
        else:
            log.info("this node can start workers again")
        self._changed(problems)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116 - follows links
    except OSError:
        return None
    return status.st_dev, status.st_ino
