"""Which samples committed steps took, written down if the job asked for it.

A step is recorded when the next reduction proves that all ranks committed it. Survivors write what
a lost member did not come to write.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Final

from elastic.reporting.append_file import AppendFile
from elastic.samples.micro_batch import MicroBatch
from elastic.samples.sample_stream import SampleStream, share
from schemas.ids import WorkerId

REMEMBERED: Final = 4  # steps that a lost member may not have written


class SampleRecords:
    """One worker's records, and those of lost members."""

    def __init__(self) -> None:
        self._stream = SampleStream(0, 0)
        self._file: AppendFile | None = None
        self._recent: deque[MicroBatch] = deque(maxlen=REMEMBERED)
        self._unwritten: deque[MicroBatch] = deque()

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

    def add(self, last: MicroBatch) -> None:
        """A step is over; `last` is the last of its micro-batches and stands for all.

        Args:
            last: has the cursors, and the split over the ranks, of the whole step.
        """
        self._recent.append(last)
        self._unwritten.append(last)

    def write(self) -> None:
        """Write what this worker took in the steps that are surely committed."""
        if self._file is None:
            self._unwritten.clear()
        while self._unwritten:
            micro_batch = self._unwritten.popleft()
            rank = micro_batch.row.rank or 0
            if micro_batch.count:
                whole = micro_batch.ids if micro_batch.first else self._share(micro_batch, rank)
                self._append(micro_batch, rank, whole)

    def write_for_lost(self, before: tuple[WorkerId, ...], now: frozenset[WorkerId]) -> None:
        """Write what lost members took in the last steps, in case they did not.

        Args:
            before: the former members, by rank.
            now: those who are left.
        """
        if self._file is None:
            return
        for micro_batch in self._recent:
            for rank, worker in enumerate(before[: len(micro_batch.row.local_batches)]):
                if worker not in now and (ids := self._share(micro_batch, rank)):
                    self._append(micro_batch, rank, ids)

    def _share(self, micro_batch: MicroBatch, rank: int) -> list[int]:
        order = self._stream.order(micro_batch.epoch)
        ids = order[micro_batch.cursor_before : micro_batch.cursor_after]
        return share(ids, micro_batch.row.local_batches, rank)

    def _append(self, micro_batch: MicroBatch, rank: int, ids: list[int]) -> None:
        if self._file is not None:
            entry = {
                "epoch": micro_batch.epoch,
                "step": micro_batch.step,
                "rank": rank,
                "ids": ids,
            }
            self._file.append(json.dumps(entry).encode() + b"\n")
