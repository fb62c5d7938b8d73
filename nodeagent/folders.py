"""Folders of a node and of its workers, and the locks that keep a second agent out of them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from nodeagent.owned_files import Owner, acting_as, make_folder, owner_of, read_small, write_private
from nodeagent.process_identity import belongs_to
from schemas.codec import ASSIGNMENT, EXIT_STATUS, MAX_BYTES, PROCESS_MARK, REPORT, encode
from schemas.errors import OnesError, SettingsError
from schemas.host.files import open_regular, try_lock
from schemas.host.logging import Audit
from schemas.ids import JobId, WorkerId
from schemas.wire.agent import ScriptReport, bounded_report
from schemas.wire.feed import LOG, SAMPLES
from schemas.wire.worker import Assignment, ExitStatus, ProcessMark

log = structlog.get_logger("folders")
FRAME: Final = struct.Struct(">I")
SOCKET: Final = "agent.sock"
FOR_CONTAINERS: Final = "containers"  # folder with a link to the socket
RUN_ID: Final = "run_id"
MAX_SOCKET_FOLDER_BYTES: Final = 75  # sun_path holds 108 bytes, and socket names take up to 30
OWN_FOLDER: Final = "own"  # inner folder of a worker that runs as another user
READ_BYTES: Final = 1 << 20  # bytes of reports at a time
MAX_REPORT_BYTES: Final = MAX_BYTES + FRAME.size  # bytes of one report, with its length
PRIVATE, PASSABLE = 0o700, 0o711  # agent's folders if jobs run as the agent, or as other users
MAX_ASSIGNMENT_BYTES: Final = 2 * MAX_BYTES
_AUDIT: Final = Audit()  # logs skipped reports


@dataclass(frozen=True, slots=True)
class WorkerFolder:
    """Files of one worker. Each is written by exactly one process.

    The agent writes `assignment`, and the zygote writes `exit`. The worker writes `process`,
    `reports`, `log` (stdout and stderr) and, if recorded, `samples`.

    A worker that runs as another user has these files in an inner folder that it owns, so it can
    change all of them. The agent reads them with the worker's rights. It relies on its own copies
    of `assignment` and `process` in the outer folder.
    """

    path: Path

    @property
    def worker(self) -> WorkerId:
        """Worker to which this folder belongs."""
        return WorkerId(self.path.name)

    @property
    def own(self) -> Path:
        """Folder of the worker's own files."""
        inner = self.path / OWN_FOLDER
        return inner if inner.is_dir() else self.path

    @property
    def owner(self) -> Owner | None:
        """User that the worker runs as, or None if it runs as the agent."""
        return owner_of(self.path / OWN_FOLDER)

    @property
    def uid(self) -> int | None:
        """Uid that the worker runs as, or None if it runs as the agent."""
        return owner.uid if (owner := self.owner) else None

    def stream(self, name: str) -> Path:
        """Return the file of an output stream."""
        return self.own / {LOG: "log", SAMPLES: "samples"}[name]

    def write_assignment(self, assignment: Assignment, owner: Owner | None = None) -> None:
        """Create the folder for `owner` (None: the agent), and write the assignment atomically."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = encode(assignment)
        write_private(self.path / "assignment", data)
        if owner is None:
            return
        self.path.chmod(PASSABLE)
        make_folder(self.path / OWN_FOLDER, owner)
        with acting_as(owner):
            write_private(self.path / OWN_FOLDER / "assignment", data)

    @property
    def written(self) -> bool:
        """True if the folder and its assignment still exist."""
        return (self.path / "assignment").exists()

    @property
    def age_s(self) -> float:
        """Seconds since the assignment was written, or 0 if that is unknown."""
        with contextlib.suppress(OSError):
            return max(0.0, time.time() - (self.path / "assignment").stat().st_mtime)
        return 0.0

    def assignment(self) -> Assignment | None:
        """Return the assignment, or None if it was never written completely."""
        with contextlib.suppress(OSError, OnesError):
            return ASSIGNMENT.decode(read_small(self.path / "assignment", MAX_ASSIGNMENT_BYTES))
        return None

    def write_mark(self, mark: ProcessMark) -> None:
        """Record the worker's process in the agent's copy, which the worker's user cannot forge."""
        if self.own != self.path:
            write_private(self.path / "process", encode(mark))

    def mark(self) -> ProcessMark | None:
        """Return the worker's process, or None before its start or if another user owns it."""
        owner = self.owner
        for path in dict.fromkeys((self.path, self.own)):
            with contextlib.suppress(OSError, OnesError), acting_as(owner_of(path)):
                mark = PROCESS_MARK.decode(read_small(path / "process"))
                if owner is None or belongs_to(mark.pid, owner.uid) is not False:
                    return mark
        return None

    def mark_stopped(self) -> None:
        """Record that the node stopped this worker, whatever its exit code will be."""
        (self.path / "stopped").touch()

    @property
    def stopped(self) -> bool:
        """True if the node stopped this worker."""
        return (self.path / "stopped").exists()

    def mark_warned(self) -> bool:
        """Record that the worker was warned of its end. Return False if it was before."""
        with contextlib.suppress(FileExistsError):
            (self.path / "warned").touch(exist_ok=False)
            return True
        return False

    def mark_asked(self) -> None:
        """Record that the worker was asked to stop, for an agent that finds it ended."""
        (self.path / "asked").touch()

    @property
    def asked(self) -> bool:
        """True if the worker was asked to stop."""
        return (self.path / "asked").exists()

    def exit(self) -> ExitStatus | None:
        """Return the exit status. It is None while the worker runs, or if its exit was not seen."""
        with contextlib.suppress(OSError, OnesError), acting_as(self.owner):
            return EXIT_STATUS.decode(read_small(self.own / "exit"))
        return None

    def reports(self, position: int, most: int = READ_BYTES) -> tuple[list[ScriptReport], int]:
        """Return the next complete reports from a position in the file, and the new position.

        A call reads a limited number of bytes and at most `most` reports. If `most` is above 0 and
        the position does not change, no more reports are left to read. A report above the size
        limit is skipped and logged.
        """
        if most < 1:
            return [], position
        try:
            with acting_as(self.owner):
                descriptor = open_regular(self.own / "reports")
            try:
                data = os.pread(descriptor, READ_BYTES, position)
                if _is_truncated(data):
                    data = os.pread(descriptor, MAX_REPORT_BYTES, position)
            finally:
                os.close(descriptor)
        except (OSError, OverflowError):  # missing, not readable now, or not a file
            return [], position
        found: list[ScriptReport] = []
        start = 0
        while len(found) < most and start + FRAME.size <= len(data):
            (length,) = FRAME.unpack_from(data, start)
            end = start + FRAME.size + length
            if length > MAX_BYTES:  # the controller would refuse the report
                why = f"{length} bytes exceed the limit of {MAX_BYTES}, skipped"
                _AUDIT.refused("report of a worker", why, peer=self.worker)
                start = end
                break
            if end > len(data):
                break
            with contextlib.suppress(OnesError):  # the script may have damaged the file
                found.append(bounded_report(REPORT.decode(data[start + FRAME.size : end])))
            start = end
        return found, position + start


def _is_truncated(data: bytes) -> bool:
    """True if the data end within the first report, and that report is within the size limit."""
    return (
        len(data) == READ_BYTES
        and READ_BYTES - FRAME.size < FRAME.unpack_from(data)[0] <= MAX_BYTES
    )


@dataclass(frozen=True, slots=True)
class NodeFolders:
    """Folders of the agent."""

    run: Path
    work: Path
    checkpoints: Path
    mode: int = PRIVATE  # mode of the folders that contain jobs' folders

    def make(self) -> None:
        """Create missing folders, with modes for the agent only or for passage by other users.

        Raises:
            SettingsError: if the folder of sockets belongs to another user.
            OSError: if a folder cannot be created.
        """
        made = (self.run, self.run / "workers", self.sockets, self.work, self.checkpoints)
        for path in made:
            path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        self.run.chmod(self.mode)
        if self.sockets.stat().st_uid != os.getuid():
            raise SettingsError(
                f"{self.sockets} belongs to another user", "choose a shorter path for run"
            )
        if self.mode == PASSABLE:
            self.all_states.mkdir(mode=PRIVATE, exist_ok=True)
            self.environments.mkdir(mode=PRIVATE, exist_ok=True)
            self._make_passable()

    def _make_passable(self) -> None:
        run = (self.run / "workers", self.sockets)
        inner = (self.work, self.all_states, self.environments, self.checkpoints)
        for path in (*run, *inner):
            if path.stat().st_uid == os.geteuid():
                path.chmod(PASSABLE)
        for name, path in (
            ("run", self.run),
            ("work", self.work),
            ("checkpoints", self.checkpoints),
        ):
            for parent in (path, *path.parents):
                if not parent.stat().st_mode & 0o001:
                    what = f"{name}: jobs run as other users, who cannot pass through {parent}"
                    raise SettingsError(what, f"chmod o+x {parent}, or choose another {name}", name)

    def run_id(self) -> str:
        """Return the id of this run folder, which changes when a reboot empties the folder.

        The id is empty if the disk cannot store a new one.
        """
        path = self.run / RUN_ID
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if known := read_small(path).decode("ascii"):
                return known
        fresh = uuid.uuid4().hex[:12]
        with contextlib.suppress(OSError):
            write_private(path, fresh.encode())
            return fresh
        return ""

    @property
    def zygotes(self) -> Path:
        """Folder for the output of other users' zygotes. These users cannot change the folder."""
        return self.run / "zygotes"

    @property
    def sockets(self) -> Path:
        """Folder of Unix sockets, in `run` or, if paths are too long, in the temporary folder."""
        inside = self.run / "sockets"
        if len(str(inside)) <= MAX_SOCKET_FOLDER_BYTES:
            return inside
        name = hashlib.sha256(str(self.run).encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"ones-{os.getuid()}-{name}"

    @property
    def socket(self) -> str:
        """The ipc address at which the agent listens for workers."""
        return f"ipc://{self.sockets}/{SOCKET}"

    @property
    def container_socket(self) -> str:
        """The same for workers in containers, which see its folder, but no zygotes' sockets."""
        return f"ipc://{self.sockets}/{FOR_CONTAINERS}/{SOCKET}"

    def worker(self, worker: WorkerId) -> WorkerFolder:
        """Return the path of a worker's folder, even if the folder does not exist."""
        return WorkerFolder(self.run / "workers" / worker)

    def workers(self) -> Iterator[WorkerFolder]:
        """Yield the folders of all workers."""
        for path in sorted((self.run / "workers").glob("*")):
            if not path.name.startswith("."):
                yield WorkerFolder(path)

    def job(self, job: JobId) -> Path:
        """Return the path of a job's working directory on this node, even if it does not exist."""
        return self.work / job

    @property
    def all_states(self) -> Path:
        """Folder with the states of all sweeps. It contains a folder for each job."""
        return self.work / ".states"

    @property
    def environments(self) -> Path:
        """Folder with the environments of jobs. It contains a folder for each environment."""
        return self.work / ".environments"

    def states(self, job: JobId) -> Path:
        """Return the path of a sweep's states on this node, even if the folder does not exist."""
        return self.all_states / job


def zygote_outputs(folders: NodeFolders, uid: int) -> list[Path]:
    """Return the files with the output of a user's zygotes."""
    return list(folders.zygotes.glob(f"{uid}-*.log"))


class FolderLocks:
    """Locks of an agent on its `run` and `work` folders until it exits."""

    def __init__(self, folders: NodeFolders, node: str) -> None:
        self._held = [lock_run(folders, node)]
        try:
            self._held.append(_lock("work", folders.work, ".agent.lock", node))
        except SettingsError:
            self.close()
            raise

    def close(self) -> None:
        """Release the locks."""
        for lock in self._held:
            if lock is not None:
                os.close(lock)
        self._held = []


def lock_run(folders: NodeFolders, node: str) -> int | None:
    """Lock the run folder and return the descriptor. If it cannot be locked, log why, return None.

    Raises:
        SettingsError: if an agent has locked the folder.
    """
    return _lock("run", folders.run, "agent.lock", node)


def _lock(setting: str, folder: Path, name: str, node: str) -> int | None:
    path, lock = folder / name, None
    try:
        if (lock := try_lock(path)) is not None:
            os.ftruncate(lock, 0)
            os.write(lock, f"{os.getpid()} {node}\n".encode())
            return lock
        owner = path.read_text(encoding="utf-8", errors="replace").split()
    except OSError as error:  # the health watch reports the node
        log.warning("folder not locked", folder=str(folder), why=error.strerror)
        return lock
    named = len(owner) == 2  # noqa: PLR2004 - shorter: not written yet
    by = f" (node {owner[1]}, pid {owner[0]})" if named else ""
    remedy = f"stop that agent, or give each agent a {setting} of its own"
    what = f"{setting} {folder} is in use by another agent{by}"
    raise SettingsError(what, remedy, setting)
