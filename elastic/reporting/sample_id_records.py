"""Which samples committed steps took, written down if the job asked for it.

A step is recorded when the next reduction proves that all ranks committed it. Survivors write what
a lost member did not come to write.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

from elastic.reporting.append_file import AppendFile
from elastic.samples.dealt_step import DealtStep
from elastic.samples.micro_batch import MicroBatch
from elastic.samples.sample_stream import SampleStream, share
from schemas.ids import WorkerId


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
