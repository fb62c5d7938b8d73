"""Where things lie on a node, and what a worker's folder says about its process."""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from schemas.codec import ASSIGNMENT, EXIT_STATUS, PROCESS_MARK, REPORT, encode
from schemas.errors import OnesError, SettingsError
from schemas.ids import JobId, WorkerId
from schemas.messages.agent import ScriptReport
from schemas.messages.logs import LOG, SAMPLES
from schemas.messages.worker import Assignment, ExitStatus, ProcessMark

FRAME: Final = struct.Struct(">I")
SOCKET: Final = "agent.sock"
LONGEST_FOLDER: Final = 75  # sun_path holds 108 bytes, and our names take up to 30


@dataclass(frozen=True, slots=True)
class WorkerFolder:
    """One worker's files; every one is written by exactly one process.

    assignment (agent), process (worker), reports (worker), log (worker's stdout and stderr),
    samples (worker, if recorded), exit (zygote).
    """

    path: Path

    @property
    def worker(self) -> WorkerId:
        """Whose it is."""
        return WorkerId(self.path.name)

    def stream(self, name: str) -> Path:
        """The file behind a shipped stream.

        Args:
            name: `LOG` or `SAMPLES`.
        """
        return self.path / {LOG: "log", SAMPLES: "samples"}[name]

    def write_assignment(self, assignment: Assignment) -> None:
        """Make the folder; the assignment is there whole or not at all.

        Args:
            assignment: replaces one that is there.

        Raises:
            OSError: if the disk does not take it.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = self.path / "assignment.new"
        fresh.write_bytes(encode(assignment))
        fresh.rename(self.path / "assignment")

    @property
    def written(self) -> bool:
        """Whether the folder is still there, with the assignment that it began with."""
        return (self.path / "assignment").exists()

    def assignment(self) -> Assignment | None:
        """What the worker is to do; None for a folder that was never finished."""
        with contextlib.suppress(OSError, OnesError):
            return ASSIGNMENT.decode((self.path / "assignment").read_bytes())
        return None

    def mark(self) -> ProcessMark | None:
        """Which process it is; None before it began."""
        with contextlib.suppress(OSError, OnesError):
            return PROCESS_MARK.decode((self.path / "process").read_bytes())
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
        with contextlib.suppress(OSError, OnesError):
            return EXIT_STATUS.decode((self.path / "exit").read_bytes())
        return None

    def reports(self, position: int) -> tuple[list[ScriptReport], int]:
        """What the worker reported since it was last asked.

        Args:
            position: in the report file, bytes; 0 is its start.

        Returns:
            Whole reports from there on, and the position behind them.
        """
        found: list[ScriptReport] = []
        try:
            with (self.path / "reports").open("rb") as file:
                file.seek(position)
                data = file.read()
        except OSError:  # it is not there yet, or not for now
            return found, position
        start = 0
        while start + FRAME.size <= len(data):
            (length,) = FRAME.unpack_from(data, start)
            end = start + FRAME.size + length
            if end > len(data):
                break
            with contextlib.suppress(OnesError):  # the file is the script's to damage
                found.append(REPORT.decode(data[start + FRAME.size : end]))
            start = end
        return found, position + start


@dataclass(frozen=True, slots=True)
class NodeFolders:
    """The agent's part of the file system."""

    run: Path
    work: Path
    checkpoints: Path

    def make(self) -> None:
        """Make what is missing; others than the owner may not enter.

        Raises:
            SettingsError: if the folder of sockets belongs to another user.
            OSError: if one cannot be made.
        """
        for path in (self.run, self.run / "workers"):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.run.chmod(0o700)
        self.sockets.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.sockets.stat().st_uid != os.getuid():
            raise SettingsError(f"{self.sockets} belongs to somebody else", "choose a shorter run")
        self.work.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.checkpoints.mkdir(mode=0o700, parents=True, exist_ok=True)

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
        for path in sorted((self.run / "workers").iterdir()):
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
