"""Whether a folder that workers need is there, takes files and has room; makes a missing one."""

from __future__ import annotations

import contextlib
import errno
import getpass
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from nodeagent.worker_folders import NodeFolders

log = structlog.get_logger("folders")
PROBE: Final = ".ones-probe"
PROBE_BYTES: Final = 4096
CLEAR: Final = 2  # times the reserve have to be free again
OURS: Final = frozenset(  # errors of a host, which no job or archive can bring about
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EIO,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EAGAIN,
        errno.ESTALE,
    }
)
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_node_fault(error: OSError) -> bool:
    """Whether an error says something of the host, not of what was to be written.

    Args:
        error: of a file operation or a fork.
    """
    return error.errno in OURS


@dataclass(frozen=True, slots=True)
class Place:
    """A folder, and the setting that names it."""

    setting: str
    path: Path
    reserve_bytes: int  # less room than this counts as full; 0: only none at all
    own: bool = False  # nobody else may own it
    mode: int = 0o700  # of one that is made

    def problem(self, *, full: bool) -> str:
        """What keeps workers from using it, and what helps; empty: nothing.

        A folder that is missing is made.

        Args:
            full: whether it was full at the last look; it has to have more room then.
        """
        try:
            self._make()
            if self.own and self.path.stat().st_uid != os.getuid():
                return self._say("it belongs to somebody else", "choose a shorter run")
            self._probe()
        except OSError as error:
            return self._say(error.strerror or str(error), _remedy(error))
        status = os.statvfs(self.path)
        free = status.f_bavail * status.f_frsize
        if free < self.reserve_bytes * (CLEAR if full else 1):
            return self._say(f"less than {self.reserve_bytes >> 20} MiB left", "free space there")
        return ""

    @property
    def silence(self) -> str:
        """What to say if a look at it does not come back."""
        return self._say("it does not answer", "see to its file system")

    def _say(self, what: str, remedy: str) -> str:
        return f"{self.setting} {self.path}: {what}; {remedy}"

    def _make(self) -> None:
        if not self.path.is_dir():
            # `parents` would let everybody read those above; another thread may look for them now.
            missing = [path for path in self.path.parents if not path.exists()]
            for path in (*reversed(missing), self.path):
                path.mkdir(mode=self.mode, exist_ok=True)
                path.chmod(self.mode)
            log.warning("folder was gone, and is made again", path=str(self.path))

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
    return "see to its file system"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def places_of(
    folders: NodeFolders, reserve_bytes: int
) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """The folders that workers need: the node's own, and those that all nodes share.

    Args:
        reserve_bytes: of room, below which one counts as full.
    """
    run = Place("run", folders.run, reserve_bytes, mode=folders.mode)
    workers = Place("run", folders.run / "workers", reserve_bytes, mode=folders.mode)
    sockets = Place("run", folders.sockets, 0, own=True, mode=folders.mode)
    work = Place("work", folders.work, reserve_bytes, mode=folders.mode)
    return (run, workers, sockets, work), (
        Place("checkpoints", folders.checkpoints, reserve_bytes, mode=folders.mode),
    )
