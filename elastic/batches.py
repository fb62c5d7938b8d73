"""Division of batches over workers and passes: schedules, micro-batches, records of past steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import msgspec

from schemas.ids import WorkerId


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """Local batches of all ranks from one step on."""

    first: int  # first step, 1-based
    local_batches: tuple[int, ...]  # by rank; 0 for a newcomer without the full state
    rank: int | None  # of this worker; None when it has left

    @property
    def batch(self) -> int:
        """Global batch, samples per step."""
        return sum(self.local_batches)


class Schedule:
    """Schedule rows in force or announced, oldest first; the first applies from the first step."""

    def __init__(self, row: ScheduleRow) -> None:
        self._rows = [row]

    def at(self, step: int) -> ScheduleRow:
        """Return the row in force at `step` (1-based, of all epochs)."""
        found = self._rows[0]
        for row in self._rows:
            if row.first <= step:
                found = row
        return found

    def announce(self, rows: Sequence[ScheduleRow]) -> None:
        """Add rows; they replace rows that start at the same step or later."""
        first = min(row.first for row in rows)
        self._rows = [row for row in self._rows if row.first < first] + list(rows)

    def forget(self, step: int) -> None:
        """Drop rows that ended before `step`, since a long job changes often."""
        self._rows = [
            row
            for row, after in zip(self._rows, [*self._rows[1:], None], strict=True)
            if after is None or after.first > step
        ]


def split(batch: int, workers: int) -> tuple[int, ...]:
    """Split a global batch into local batches that differ by at most one, low ranks first."""
    each, rest = divmod(batch, workers)
    return tuple(each + (rank < rest) for rank in range(workers))


def passes(count: int, bound: int, min_samples: int = 1) -> tuple[int, ...]:
    """Split `count` samples into as few passes as `bound` allows, of nearly equal size.

    With several passes, gradients are accumulated before the reduction. A pass has at least
    `min_samples` (<= `bound`) samples if `count` has so many. If `bound` equals `min_samples` and
    `count` is no multiple of it, the first passes have one sample more.
    """
    if count <= bound:
        return (count,)
    return split(count, min(-(-count // bound), max(1, count // min_samples)))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Batch of the loader: a worker's share of a step, or a part that fits the device."""

    step: int  # 1-based, of all epochs
    epoch: int  # 1-based
    cursor_before: int  # samples of the epoch that are done before this step
    cursor_after: int  # samples of the epoch that are done after it
    ids: list[int]
    count: int  # samples; 0 for a batch that only keeps the script's loop running
    total: int  # samples of the step, over all workers
    first: bool  # first of the step's micro-batches
    last: bool
    row: ScheduleRow  # in force at this step

    @property
    def weight(self) -> float:
        """Weight of its gradients in the step: its samples over the global batch."""
        return self.count / self.total


class StepOutcome(Enum):
    """Outcome of a step, also if the group broke during the step."""

    COMMITTED = "committed"
    ADOPTED = "adopted"  # the peers finished the step: this worker received their state
    ROLLED_BACK = "rolled back"  # no worker finished it: its samples are drawn again


RECENT_STEPS: Final = 4  # steps that a lost member may not have recorded


class DealtStep(msgspec.Struct, frozen=True):
    """Division of a finished step over the workers."""

    epoch: int  # 1-based
    step: int  # 1-based, of all epochs
    cursor_before: int  # samples of the epoch that were done before it
    cursor_after: int  # samples of the epoch that are done with it
    local_batches: tuple[int, ...]  # by rank, samples per step
    workers: tuple[WorkerId, ...]  # by rank, of the group in which the step started
