"""Where things lie on a node, and what a worker's folder says about its process.

One agent on a run folder and on a work folder: two would take each other's workers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
from msgspec.structs import replace

from nodeagent.owned_files import (
    Owner,
    acting_as,
    make_folder,
    open_regular,
    owner_of,
    read_small,
    write_private,
)
from nodeagent.process_identity import belongs_to
from schemas.codec import ASSIGNMENT, EXIT_STATUS, MAX_BYTES, PROCESS_MARK, REPORT, encode
from schemas.errors import OnesError, SettingsError
from schemas.host.files import try_lock
from schemas.host.logging import Audit
from schemas.ids import JobId, WorkerId
from schemas.sweeps import are_bounded, bounded_metrics
from schemas.wire.agent import EpochReported, ScriptReport
from schemas.wire.feed import LOG, SAMPLES
from schemas.wire.worker import Assignment, ExitStatus, ProcessMark

FRAME: Final = struct.Struct(">I")
SOCKET: Final = "agent.sock"
RUN_ID: Final = "run_id"
LONGEST_FOLDER: Final = 75  # sun_path holds 108 bytes, and our names take up to 30
OWN: Final = "own"  # a worker's folder within its folder, where it runs as another user
READ: Final = 1 << 20  # bytes of reports at a time
LARGEST: Final = MAX_BYTES + FRAME.size  # bytes of one report, with its length
PRIVATE, PASSABLE = 0o700, 0o711  # folders of the agent, where jobs run as it does, and as others
LARGEST_ASSIGNMENT: Final = 2 * MAX_BYTES
_AUDIT: Final = Audit()  # of what is passed over


@dataclass(frozen=True, slots=True)
class WorkerFolder:
    """One worker's files; every one is written by exactly one process.

    assignment (agent), process (worker), reports (worker), log (worker's stdout and stderr),
    samples (worker, if recorded), exit (zygote).

    A worker that runs as another user than the agent has them in a folder of its own in there,
    and can change all of them: they are read with its rights, and what it is and does (assignment,
    process) stands in a second copy beside that folder, which is the agent's.
    """

    path: Path

    @property
    def worker(self) -> WorkerId:
        """Whose it is."""
        return WorkerId(self.path.name)

    @property
    def own(self) -> Path:
        """The worker's part of it."""
        inner = self.path / OWN
        return inner if inner.is_dir() else self.path

    @property
    def owner(self) -> Owner | None:
        """Who the worker runs as; None: as the agent does."""
        return owner_of(self.path / OWN)

    def stream(self, name: str) -> Path:
        """The file behind a shipped stream."""
        return self.own / {LOG: "log", SAMPLES: "samples"}[name]

    def write_assignment(self, assignment: Assignment, owner: Owner | None = None) -> None:
        """Make the folder; the assignment is there whole or not at all.

        Args:
            owner: who the worker runs as; None: as the agent does.

        Raises:
            OSError: if the disk does not take it.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = encode(assignment)
        write_private(self.path / "assignment", data)
        if owner is None:
            return
        self.path.chmod(PASSABLE)
        make_folder(self.path / OWN, owner)
        with acting_as(owner):
            write_private(self.path / OWN / "assignment", data)

    @property
    def written(self) -> bool:
        """Whether the folder is still there, with the assignment that it began with."""
        return (self.path / "assignment").exists()

    def assignment(self) -> Assignment | None:
        """What the worker is to do; None for a folder that was never finished."""
        with contextlib.suppress(OSError, OnesError):
            return ASSIGNMENT.decode(read_small(self.path / "assignment", LARGEST_ASSIGNMENT))
        return None

    def write_mark(self, mark: ProcessMark) -> None:
        """Note which process the worker is, where it runs as another user and may say anything.

        Raises:
            OSError: if the disk does not take it.
        """
        if self.own != self.path:
            write_private(self.path / "process", encode(mark))

    def mark(self) -> ProcessMark | None:
        """Which process it is; None before it began, and where it names somebody else's."""
        owner = self.owner
        for path in dict.fromkeys((self.path, self.own)):
            with contextlib.suppress(OSError, OnesError), acting_as(owner_of(path)):
                mark = PROCESS_MARK.decode(read_small(path / "process"))
                if owner is None or belongs_to(mark.pid, owner.uid) is not False:
                    return mark
        return None

    def mark_stopped(self) -> None:
        """Note that the node's operator ends this worker, whatever it then exits with."""
        (self.path / "stopped").touch()

    @property
    def stopped(self) -> bool:
        """Whether the node's operator ended it."""
        return (self.path / "stopped").exists()

    def exit(self) -> ExitStatus | None:
        """How it ended; None while it runs or when nobody saw it end."""
        with contextlib.suppress(OSError, OnesError), acting_as(self.owner):
            return EXIT_STATUS.decode(read_small(self.own / "exit"))
        return None

    def reports(self, position: int) -> tuple[list[ScriptReport], int]:
        """What the worker reported since it was last asked, or the next of it.

        Args:
            position: in the report file, bytes; 0 is its start.

        Returns:
            Whole reports from there on, from a bounded piece of the file, and the position behind
            them; one that stays the same has nothing more. A report beyond any bound is passed
            over, with a line in the agent's log.
        """
        try:
            with acting_as(self.owner):
                descriptor = open_regular(self.own / "reports")
            try:
                data = os.pread(descriptor, READ, position)
                data = data if not _cut(data) else os.pread(descriptor, LARGEST, position)
            finally:
                os.close(descriptor)
        except (OSError, OverflowError):  # it is not there yet, or not for now, or no file
            return [], position
        found: list[ScriptReport] = []
        start = 0
        while start + FRAME.size <= len(data):
            (length,) = FRAME.unpack_from(data, start)
            end = start + FRAME.size + length
            if length > MAX_BYTES:  # nobody would take it; it may be as long as a file can be
                why = f"it has {length} bytes, more than {MAX_BYTES}, and is passed over"
                _AUDIT.refused("report of a worker", why, peer=self.worker)
                start = end
                break
            if end > len(data):
                break
            with contextlib.suppress(OnesError):  # the file is the script's to damage
                found.append(_bounded(REPORT.decode(data[start + FRAME.size : end])))
            start = end
        return found, position + start


def _bounded(report: ScriptReport) -> ScriptReport:
    """The report with no more metrics of an epoch than the library lets a script give."""
    if not isinstance(report, EpochReported) or are_bounded(report.metrics):
        return report
    return replace(report, metrics=bounded_metrics(report.metrics))


def _cut(data: bytes) -> bool:
    """Whether a single report is longer than what was read, and within its bound."""
    return len(data) == READ and READ - FRAME.size < FRAME.unpack_from(data)[0] <= MAX_BYTES


@dataclass(frozen=True, slots=True)
class NodeFolders:
    """The agent's part of the file system."""

    run: Path
    work: Path
    checkpoints: Path
    mode: int = PRIVATE  # of folders that jobs' own folders lie in

    def make(self) -> None:
        """Make what is missing; who is no job's user may not look into it.

        Raises:
            SettingsError: if the folder of sockets belongs to another user.
            OSError: if one cannot be made.
        """
        for path in (self.run, self.run / "workers"):
            path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        self.run.chmod(self.mode)
        self.sockets.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        if self.sockets.stat().st_uid != os.getuid():
            raise SettingsError(f"{self.sockets} belongs to somebody else", "choose a shorter run")
        self.work.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        self.checkpoints.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        if self.mode == PASSABLE:
            self.all_states.mkdir(mode=PRIVATE, exist_ok=True)
            self._let_pass()

    def _let_pass(self) -> None:
        """Let jobs reach their own folders, whose names they know."""
        inner = (self.run / "workers", self.sockets, self.work, self.all_states, self.checkpoints)
        for path in inner:
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
        """Tell this run folder from another one in its place, as after a reboot.

        Returns:
            What was written into it when it was new; empty if the disk takes nothing now.
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
        """What zygotes of other users say, which they are not to change."""
        return self.run / "zygotes"

    @property
    def sockets(self) -> Path:
        """Where Unix sockets lie: in `run`, or in a short folder if their names would not fit."""
        inside = self.run / "sockets"
        if len(str(inside)) <= LONGEST_FOLDER:
            return inside
        name = hashlib.sha256(str(self.run).encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"ones-{os.getuid()}-{name}"

    @property
    def socket(self) -> str:
        """The agent's ipc address for workers."""
        return f"ipc://{self.sockets}/{SOCKET}"

    def worker(self, worker: WorkerId) -> WorkerFolder:
        """The folder of one worker.

        Args:
            worker: its name; the folder need not exist.
        """
        return WorkerFolder(self.run / "workers" / worker)

    def workers(self) -> Iterator[WorkerFolder]:
        """All folders of workers."""
        for path in sorted((self.run / "workers").glob("*")):
            if not path.name.startswith("."):
                yield WorkerFolder(path)

    def job(self, job: JobId) -> Path:
        """The working directory of a job on this node.

        Args:
            job: its name; the directory need not exist.
        """
        return self.work / job

    @property
    def all_states(self) -> Path:
        """Where the states of sweeps lie, a folder for each job."""
        return self.work / ".states"

    def states(self, job: JobId) -> Path:
        """The states of a sweep on this node.

        Args:
            job: its name; the directory need not exist.
        """
        return self.all_states / job


log = structlog.get_logger("folders")


class FolderLocks:
    """The folders of one agent, which are its own until it ends, however it ends.

    Args:
        folders: of the node, which are there; `checkpoints` is for all nodes.
        node: its name, told to whoever else wants them.

    Raises:
        SettingsError: if another agent has one of them.
    """

    def __init__(self, folders: NodeFolders, node: str) -> None:
        self._held: list[int] = []
        for setting, folder, name in (
            ("run", folders.run, "agent.lock"),
            ("work", folders.work, ".agent.lock"),
        ):
            try:
                self._take(setting, folder, folder / name, node)
            except OSError as error:  # such a node is unhealthy, and says so
                log.warning("folder not locked", folder=str(folder), why=error.strerror)
            except SettingsError:
                self.close()
                raise

    def _take(self, setting: str, folder: Path, path: Path, node: str) -> None:
        lock = try_lock(path)
        if lock is None:
            what = f"{setting} {folder} is in use by another agent{_owner(path)}"
            remedy = f"stop that one, or give each agent a {setting} of its own"
            raise SettingsError(what, remedy, setting)
        self._held.append(lock)
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()} {node}\n".encode())

    def close(self) -> None:
        """Let the next agent have them."""
        for lock in self._held:
            os.close(lock)
        self._held = []


def _owner(path: Path) -> str:
    """Who wrote that it has the lock, as far as it came to that."""
    words: Sequence[str] = path.read_text(encoding="utf-8", errors="replace").split()
    return f" (node {words[1]}, pid {words[0]})" if len(words) == 2 else ""  # noqa: PLR2004
