"""Real worker processes that a test forks and hears, be they of a job or of a sweep."""

from __future__ import annotations

import os
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import ClassVar, Final, Generic, TypeVar

import zmq

from schemas.codec import FROM_WORKER, REPORT, encode
from schemas.ids import WorkerId, worker_id
from schemas.wire.agent import ScriptFailed, ScriptReport, StepsReported
from schemas.wire.worker import Assignment, WorkerHello
from tests.training.peers import FORKS

LOOK_MS: Final = 5
FRAME: Final = struct.Struct(">I")
R = TypeVar("R", bound=ScriptReport)


@dataclass(kw_only=True)
class ForkedWorker:
    """One process and what it reported."""

    name: WorkerId
    folder: Path
    process: ForkServerProcess
    route: bytes = b""
    reports: list[ScriptReport] = field(default_factory=list)
    read: int = 0

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def hear(self) -> None:
        """Take in what its report file has more than before."""
        path = self.folder / "reports"
        data = path.read_bytes()[self.read :] if path.exists() else b""
        start = 0
        while start + FRAME.size <= len(data):
            (length,) = FRAME.unpack_from(data, start)
            end = start + FRAME.size + length
            if end > len(data):
                break
            self.reports.append(REPORT.decode(data[start + FRAME.size : end]))
            start = end
        self.read += start


W = TypeVar("W", bound=ForkedWorker)


class ForkedWorkers(Generic[W]):
    """A socket that workers greet, and their reports."""

    limit_s: ClassVar[float] = 120.0

    def __init__(self, home: Path) -> None:
        self.home = home
        self._socket_path = home / "s"
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(f"ipc://{self._socket_path}")
        self.workers: dict[WorkerId, W] = {}
        self.told: list[StepsReported] = []  # telemetry

    def reported(self, kind: type[R]) -> list[R]:
        """All reports of one kind."""
        return [r for w in self.workers.values() for r in w.reports if isinstance(r, kind)]

    def last(self, name: WorkerId, kind: type[R]) -> R | None:
        """The last one of a worker."""
        found = [r for r in self.workers[name].reports if isinstance(r, kind)]
        return found[-1] if found else None

    def until(self, there: Callable[[], bool], what: str) -> None:
        """Hear the workers until something is `there`."""
        deadline = time.monotonic() + self.limit_s
        while True:
            self._hear()
            if there():
                return
            if failed := self._failures():
                raise AssertionError(f"{failed[0]}\n{self.said()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {self.limit_s} s: {what}\n{self.said()}")
            self._router.poll(LOOK_MS)

    def said(self) -> str:
        """Reports and logs of all workers, for a test that fails."""
        parts = []
        for worker in self.workers.values():
            log = worker.folder / "log"
            parts.append(f"--- {worker.name}: {worker.process.exitcode}")
            parts += [repr(report)[:240] for report in worker.reports[-6:]]
            parts.append(log.read_text()[-1500:] if log.exists() else "")
        return "\n".join(parts)

    def close(self) -> None:
        """Leave no process behind."""
        for worker in self.workers.values():
            worker.process.kill()
        for worker in self.workers.values():
            worker.process.join(5)
            worker.process.close()
        self._router.close(linger=0)
        self._context.term()

    def _failures(self) -> list[str]:
        """Why waiting is in vain."""
        return [report.error for report in self.reported(ScriptFailed)]

    def _greeted(self, name: WorkerId) -> None:
        """A worker can be reached now, perhaps once more."""

    def _hear(self) -> None:
        while self._router.poll(0):
            route, data = self._router.recv_multipart()
            message = FROM_WORKER.decode(data)
            if isinstance(message, StepsReported):
                self.told.append(message)
            elif isinstance(message, WorkerHello):
                name = worker_id(message.job, message.version, message.rank)
                self.workers[name].route = route
                self._greeted(name)
        for worker in self.workers.values():
            worker.hear()


def fork(folder: Path, assignment: Assignment, work: Callable[[Path], None]) -> ForkServerProcess:
    """A process that does `work` in `folder`, where its assignment is."""
    (folder / "assignment").write_bytes(encode(assignment))
    process = FORKS.Process(target=_logged, args=(folder, work))
    process.start()
    return process


def _logged(folder: Path, work: Callable[[Path], None]) -> None:
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    tempfile.tempdir = str(folder)  # a worker that is killed leaves its files to the test
    work(folder)
