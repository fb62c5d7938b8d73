"""What a worker says: reports to the controller, and lines to whoever reads the job's output.

Conversation with the node agent, off the training thread.

Reports go to a file first. The socket only carries hints that the file grew, telemetry, and the
orders of the group.

Records at the end of a file, on a disk that may be full: what finds no room waits.

A worker's reports, in a file: still there when the agent or the worker has exited.

How the rest of the library reports to the controller, without knowing how reports travel.

Which samples committed steps took, written down if the job asked for it.

A step is recorded when the next reduction proves that all ranks committed it. Survivors write what
a lost member did not come to write.
"""

from __future__ import annotations

import atexit
import json
import os
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from elastic.batches import DealtStep, MicroBatch
from elastic.sample_stream import SampleStream, share
from schemas.codec import TO_WORKER, encode
from schemas.errors import OnesError
from schemas.ids import WorkerId
from schemas.transport import ThreadDealer
from schemas.wire.agent import JOIN, ScriptReport, StepsReported
from schemas.wire.worker import Assignment, Reported, ToWorker, WorkerHello

LIMIT: Final = 64 << 20  # bytes that wait for room


class AppendFile:
    """Whole records at the end of a file, in order; those that find no room wait in memory.

    Args:
        path: of the file; made if it is not there, for its owner only.

    Raises:
        OSError: if it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._waiting = bytearray()
        self._lock = threading.Lock()

    def append(self, record: bytes) -> None:
        """Write `record`, now or when there is room.

        Args:
            record: bytes with whatever tells them from the next; never written in part only,
                unless the process ends while it waits.

        Raises:
            OSError: when more than `LIMIT` bytes wait.
        """
        with self._lock:
            self._waiting += record
            try:
                self._write()
            except OSError:
                if len(self._waiting) > LIMIT:
                    raise

    def flush(self) -> bool:
        """Try again; whether nothing waits any more."""
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


class ReportFile:
    """The worker's own append-only file of reports.

    Args:
        path: of the file; reports that are there already are counted.
    """

    def __init__(self, path: Path) -> None:
        self._file = AppendFile(path)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.count = _frames(path.read_bytes())

    def append(self, make: Callable[[int], ScriptReport]) -> None:
        """Append the report that `make` builds for the next index; not in a forked child.

        Args:
            make: builds the report from its index, 1-based; what an earlier process wrote counts.

        Raises:
            OSError: if the disk takes nothing, and more waits than `append_file.LIMIT` bytes.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            data = encode(make(self.count + 1))
            self._file.append(FRAME.pack(len(data)) + data)
            self.count += 1

    def flush(self) -> bool:
        """Write what found no room before; whether all is written."""
        return self._file.flush()


_files: dict[Path, ReportFile] = {}


def report_file(path: Path) -> ReportFile:
    """The one `ReportFile` of this process for `path`: two would count apart.

    Args:
        path: compared as it is written, not as the file it names.
    """
    return _files.setdefault(path, ReportFile(path)) if path not in _files else _files[path]


def _frames(data: bytes) -> int:
    count = start = 0
    while start + FRAME.size <= len(data):
        start += FRAME.size + FRAME.unpack_from(data, start)[0]
        count += 1
    return count


TELEMETRY_S: Final = 1.0
Telemetry = Callable[[], StepsReported | None]


class Channel:
    """One worker's line to its agent; works on, in silence, while there is none."""

    def __init__(
        self, assignment: Assignment, folder: Path, hear: Callable[[ToWorker], None]
    ) -> None:
        """Begin to talk.

        Args:
            hear: takes what the agent says, in the channel's thread; must not wait.
        """
        self._assignment = assignment
        self._hear = hear
        self._reports = report_file(folder / "reports")
        self._telemetry: Telemetry = lambda: None
        self._stop = threading.Event()
        self._started = threading.Event()
        self._wake: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)
        self._thread.start()
        self._started.wait()

    def report(self, make: Callable[[int], ScriptReport]) -> None:
        """Write a report that nothing can lose, and hint at it.

        Args:
            make: builds the report from its index, 1-based, in the calling thread.

        Raises:
            OSError: if the disk takes nothing, and more waits than `append_file.LIMIT` bytes.
        """
        self._reports.append(make)
        self._wake()

    def tell_steps(self, telemetry: Telemetry) -> None:
        """Ask `telemetry` about once a second, from the channel's thread.

        Args:
            telemetry: gives what is to be sent; None: nothing now.
        """
        self._telemetry = telemetry

    def close(self) -> None:
        """End the conversation."""
        self._stop.set()
        self._wake()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        dealer = ThreadDealer(self._assignment.socket)
        self._wake = dealer.wake
        self._started.set()
        hinted, greeted = 0, False
        while not self._stop.is_set():
            messages, connected = dealer.poll(TELEMETRY_S)
            if connected or not greeted:
                hinted = 0
                hello = WorkerHello(pid=os.getpid(), token=self._assignment.token, **self._who())
                greeted = dealer.send(encode(hello))
            for data in messages:
                self._heard(data)
            count = self._reports.count if self._reports.flush() else hinted
            if count > hinted and dealer.send(encode(Reported(count=count, **self._who()))):
                hinted = count
            if (steps := self._telemetry()) is not None:
                dealer.send(encode(steps))
        dealer.close()

    def _heard(self, data: bytes) -> None:
        try:
            message = TO_WORKER.decode(data)
        except OnesError:
            return
        self._hear(message)

    def _who(self) -> dict[str, Any]:
        a = self._assignment
        return {"job": a.job, "version": a.version, "rank": a.rank}


class WorkerVoice:
    """One worker's; a report of a worker that is alone goes nowhere.

    Args:
        assignment: of the worker; None: it is alone.
        leads: whether it is the one of its group that prints.
    """

    def __init__(self, assignment: Assignment | None, leads: Callable[[], bool]) -> None:
        self._assignment = assignment
        self._leads = leads
        self.channel: Channel | None = None

    def open(self, folder: Path | None, hear: Callable[[ToWorker], None]) -> None:
        """Talk with the node's agent until the process ends.

        Args:
            folder: of the worker; None: there is no agent.
            hear: takes what the agent says, in a thread of its own; must not wait.
        """
        if self._assignment is not None and folder is not None:
            self.channel = Channel(self._assignment, folder, hear)
            atexit.register(self.channel.close)

    def report(self, kind: type[ScriptReport], **fields: Any) -> None:
        """Report something that nothing may lose.

        Args:
            fields: its own; job, version, rank and index are added.
        """
        assignment, channel = self._assignment, self.channel
        if assignment is None or channel is None:
            return
        job, version, rank = assignment.job, assignment.version, assignment.rank
        channel.report(
            lambda index: kind(job=job, version=version, rank=rank, index=index, **fields)
        )

    def say(self, text: str) -> None:
        """A line in the job's output, once for the group."""
        if self._leads():
            sys.stderr.write(f"[ones] {text}\n")
            sys.stderr.flush()

    def say_wins(self, name: str, script: Any, job: Any) -> None:
        """Say that the job file has the last word, where the script says something else.

        Args:
            script: what the script says; None: nothing.
        """
        joins = self._assignment is not None and self._assignment.kind == JOIN
        if script is not None and script != job and not joins:
            self.say(f"{name} {job} of the job file wins over the script's {script}")


class Report(Protocol):
    """Reports something that nothing may lose."""

    def __call__(self, kind: type[ScriptReport], **fields: Any) -> None:
        """Report.

        Args:
            fields: its own; job, version, rank and index are added.
        """
        ...


class SampleRecords:
    """One worker's records, and those of lost members."""

    def __init__(self, recent: deque[DealtStep]) -> None:
        """Begin with nothing to write.

        Args:
            recent: the last steps, which newcomers are told of; new ones are added here.
        """
        self._stream = SampleStream(0, 0)
        self._file: AppendFile | None = None
        self._recent = recent
        self._unwritten: deque[tuple[DealtStep, int, list[int] | None]] = deque()

    def use(self, stream: SampleStream) -> None:
        """The samples are those of `stream`.

        Args:
            stream: of the job; tells which samples a lost member took.
        """
        self._stream = stream

    def open(self, path: Path) -> None:
        """From now on, write records to `path`.

        Args:
            path: of the file, one JSON object a line; made if it is not there.
        """
        self._file = AppendFile(path)

    def add(self, last: MicroBatch, workers: tuple[WorkerId, ...]) -> None:
        """A step is over; `last` is the last of its micro-batches and stands for all.

        Args:
            last: has the cursors, and the split over the ranks, of the whole step.
            workers: by rank, of the group in which the step began.
        """
        dealt = DealtStep(
            epoch=last.epoch,
            step=last.step,
            cursor_before=last.cursor_before,
            cursor_after=last.cursor_after,
            local_batches=last.row.local_batches,
            workers=workers,
        )
        if not self._recent or self._recent[-1].step < last.step:  # else another one told of it
            self._recent.append(dealt)
        if last.count:
            ids = last.ids if last.first else None  # else all passes' together
            self._unwritten.append((dealt, last.row.rank or 0, ids))

    def write(self) -> None:
        """Write what this worker took in the steps that are surely committed."""
        if self._file is None:
            self._unwritten.clear()
        while self._unwritten:
            dealt, rank, ids = self._unwritten.popleft()
            self._append(dealt, rank, self._share(dealt, rank) if ids is None else ids)

    def write_for_lost(self, now: frozenset[WorkerId]) -> None:
        """Write what lost members took in the last steps, in case they did not.

        Members may have been lost in several groups since the last step.
        """
        for dealt in self._recent:
            self._write_for_others(dealt, now)

    def write_last_step(self, me: WorkerId) -> None:
        """Write what others took in the last step, which all ranks are known to have done.

        Args:
            me: this worker, which writes for itself.
        """
        if self._recent:
            self._write_for_others(self._recent[-1], frozenset({me}))

    def _write_for_others(self, dealt: DealtStep, now: frozenset[WorkerId]) -> None:
        if self._file is None:
            return
        for rank, worker in enumerate(dealt.workers[: len(dealt.local_batches)]):
            if worker not in now and (ids := self._share(dealt, rank)):
                self._append(dealt, rank, ids)

    def _share(self, dealt: DealtStep, rank: int) -> list[int]:
        order = self._stream.order(dealt.epoch)
        ids = order[dealt.cursor_before : dealt.cursor_after]
        return share(ids, dealt.local_batches, rank, self._stream.least)

    def _append(self, dealt: DealtStep, rank: int, ids: list[int]) -> None:
        if self._file is not None:
            entry = {"epoch": dealt.epoch, "step": dealt.step, "rank": rank, "ids": ids}
            self._file.append(json.dumps(entry).encode() + b"\n")
