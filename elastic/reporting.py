"""Reports of a worker to the controller, lines in the job's output, and records of samples.

Reports are first appended to a file, which survives the exits of agent and worker. The connection
to the node agent runs in a separate thread and carries only hints that the file has grown,
telemetry, and the orders for the group. Records that a full disk does not accept wait in memory.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from elastic.sample_stream import DealtStep, MicroBatch, SampleStream, share
from schemas.codec import TO_WORKER, encode
from schemas.errors import OnesError
from schemas.ids import WorkerId
from schemas.transport.sockets import ThreadDealer
from schemas.wire.agent import JOIN, ScriptReport, StepsReported, WorkerStalled
from schemas.wire.worker import Assignment, Reported, ToWorker, WorkerHello

MAX_WAITING_BYTES: Final = 64 << 20  # limit of waiting records


class AppendFile:
    """Append-only file of records, which wait in memory while the disk has no room for them.

    A missing file is created, readable for its owner only.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._waiting = bytearray()
        self._lock = threading.Lock()

    def append(self, record: bytes) -> None:
        """Write `record` now, or later if the disk is full.

        If the process exits before everything is written, the file can end with a part of a record.
        If more than `MAX_WAITING_BYTES` bytes are waiting, the disk's OSError is raised.
        """
        with self._lock:
            self._waiting += record
            try:
                self._write()
            except OSError:
                if len(self._waiting) > MAX_WAITING_BYTES:
                    raise

    def flush(self) -> bool:
        """Try to write the waiting records; return True if none is left."""
        with self._lock:
            try:
                self._write()
            except OSError:
                return False
            return True

    def _write(self) -> None:
        while self._waiting:
            written = os.write(self._descriptor, self._waiting)
            del self._waiting[:written]


FRAME: Final = struct.Struct(">I")


class ReportFile(AppendFile):
    """Append-only file of one worker's reports; `count` includes reports of earlier processes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._numbering = threading.Lock()
        self._pid = os.getpid()
        self.count = _frames(path.read_bytes())

    def report(self, kind: type[ScriptReport], sender: Assignment, **fields: Any) -> None:
        """Append a report of `sender` with the next index (1-based), except in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._numbering:
            data = encode(kind(**identity(sender), index=self.count + 1, **fields))
            self.append(FRAME.pack(len(data)) + data)
            self.count += 1


@functools.cache
def report_file(path: Path) -> ReportFile:
    """Return the only `ReportFile` for `path`; two objects would number reports separately."""
    return ReportFile(path)


def identity(assignment: Assignment) -> dict[str, Any]:
    """Return the fields by which a message names its worker."""
    return {"job": assignment.job, "version": assignment.version, "rank": assignment.rank}


def _frames(data: bytes) -> int:
    count = start = 0
    while start + FRAME.size <= len(data):
        start += FRAME.size + FRAME.unpack_from(data, start)[0]
        count += 1
    return count


TELEMETRY_INTERVAL_S: Final = 1.0
Telemetry = Callable[[], Iterable[StepsReported | WorkerStalled]]


class AgentConnection:
    """Connection of a worker to its agent; an unreachable agent causes no error."""

    def __init__(
        self, assignment: Assignment, folder: Path, on_message: Callable[[ToWorker], None]
    ) -> None:
        """Start the connection; `on_message` runs in the connection's thread and must not wait."""
        self._assignment = assignment
        self._on_message = on_message
        self._reports = report_file(folder / "reports")
        self._telemetry: Telemetry = tuple
        self._stop = threading.Event()
        self._started = threading.Event()
        self._wake: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)
        self._thread.start()
        self._started.wait()

    def report(self, kind: type[ScriptReport], **fields: Any) -> None:
        """Append a report to the file and send a hint; job, version, rank and index are added."""
        self._reports.report(kind, self._assignment, **fields)
        self._wake()

    def set_telemetry(self, telemetry: Telemetry) -> None:
        """Call `telemetry` about once a second in the connection's thread, and send its reports."""
        self._telemetry = telemetry

    def close(self) -> None:
        """Close the connection."""
        self._stop.set()
        self._wake()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        dealer = ThreadDealer(self._assignment.socket)
        self._wake = dealer.wake
        self._started.set()
        hinted, greeted, sender = 0, False, identity(self._assignment)
        while not self._stop.is_set():
            messages, connected = dealer.poll(TELEMETRY_INTERVAL_S)
            if connected or not greeted:
                hinted = 0
                token = self._assignment.token
                greeted = dealer.send(encode(WorkerHello(pid=os.getpid(), token=token, **sender)))
            for data in messages:
                try:
                    message = TO_WORKER.decode(data)
                except OnesError:
                    continue
                self._on_message(message)
            count = self._reports.count if self._reports.flush() else hinted
            if count > hinted and dealer.send(encode(Reported(count=count, **sender))):
                hinted = count
            for report in self._telemetry():
                dealer.send(encode(report))
        dealer.close()


class WorkerReporter:
    """Reports and output lines of one worker; without an assignment, reports are discarded."""

    def __init__(self, assignment: Assignment | None, is_leader: Callable[[], bool]) -> None:
        self._assignment = assignment
        self._is_leader = is_leader
        self.connection: AgentConnection | None = None

    def open(self, folder: Path | None, on_message: Callable[[ToWorker], None]) -> None:
        """Connect to the node's agent until the process exits; do nothing without a folder."""
        if self._assignment is not None and folder is not None:
            self.connection = AgentConnection(self._assignment, folder, on_message)
            atexit.register(self.connection.close)

    def report(self, kind: type[ScriptReport], **fields: Any) -> None:
        """Append a report that survives the worker's exit, with job, version, rank and index."""
        if self.connection is not None:
            self.connection.report(kind, **fields)

    def log(self, text: str) -> None:
        """Write a line to the job's output, once for the group."""
        if self._is_leader():
            sys.stderr.write(f"[ones] {text}\n")
            sys.stderr.flush()

    def log_override(self, name: str, script: Any, job: Any) -> None:
        """Log that the job file overrides the script's value, if the script sets another value."""
        joins = self._assignment is not None and self._assignment.kind == JOIN
        if script is not None and script != job and not joins:
            self.log(f"{name} {job} of the job file overrides the script's {script}")


Report = Callable[..., None]  # `WorkerReporter.report`


class SampleRecords:
    """Records of the samples in committed steps, if the job asked for records.

    A step is recorded when the next reduction proves that all ranks committed it. Survivors write
    what a lost member might not have written. `recent` has the latest steps, which newcomers
    receive.
    """

    def __init__(self, recent: deque[DealtStep], stream: Callable[[], SampleStream]) -> None:
        self._stream = stream  # returns the job's stream
        self._file: AppendFile | None = None
        self._recent = recent
        self._unwritten: deque[tuple[DealtStep, int, list[int] | None]] = deque()

    def open(self, path: Path) -> None:
        """Start to write records to `path`, one JSON object per line."""
        self._file = AppendFile(path)

    def add(self, last: MicroBatch, workers: tuple[WorkerId, ...]) -> None:
        """Add a finished step: its last micro-batch, and the members, by rank, when it started."""
        dealt = DealtStep(
            epoch=last.epoch,
            step=last.step,
            cursor_before=last.cursor_before,
            cursor_after=last.cursor_after,
            local_batches=last.row.local_batches,
            workers=workers,
        )
        if not self._recent or self._recent[-1].step < last.step:  # else a peer has sent this step
            self._recent.append(dealt)
        if last.count:
            ids = last.ids if last.first else None  # None: the step had several passes
            self._unwritten.append((dealt, last.row.rank or 0, ids))

    def write(self) -> None:
        """Write this worker's samples of the added steps, which all ranks have committed by now."""
        if self._file is None:
            self._unwritten.clear()
        while self._unwritten:
            dealt, rank, ids = self._unwritten.popleft()
            self._append(dealt, rank, self._share(dealt, rank) if ids is None else ids)

    def write_for_lost(self, now: frozenset[WorkerId]) -> None:
        """Write the samples of lost members in recent steps; `now` has the current members."""
        for dealt in self._recent:
            self._write_for_others(dealt, now)

    def write_last_step(self, own_id: WorkerId) -> None:
        """Write the other workers' samples of the last step, which all ranks have committed."""
        if self._recent:
            self._write_for_others(self._recent[-1], frozenset({own_id}))

    def _write_for_others(self, dealt: DealtStep, now: frozenset[WorkerId]) -> None:
        if self._file is None:
            return
        for rank, worker in enumerate(dealt.workers[: len(dealt.local_batches)]):
            if worker not in now and (ids := self._share(dealt, rank)):
                self._append(dealt, rank, ids)

    def _share(self, dealt: DealtStep, rank: int) -> list[int]:
        stream = self._stream()
        ids = stream.order(dealt.epoch)[dealt.cursor_before : dealt.cursor_after]
        return share(ids, dealt.local_batches, rank, stream.min_samples)

    def _append(self, dealt: DealtStep, rank: int, ids: list[int]) -> None:
        if self._file is not None:
            entry = {"epoch": dealt.epoch, "step": dealt.step, "rank": rank, "ids": ids}
            self._file.append(json.dumps(entry).encode() + b"\n")
