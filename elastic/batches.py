"""Which worker takes how many samples of which step, over the changes of the group.

How a batch is dealt out: over workers, and over the passes of one worker.

What a worker trains on in one pass: its share of a step, or a part of that share.

How a step was dealt out, and to whom: what it takes to say afterwards which samples it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import msgspec

from schemas.ids import WorkerId


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """Who takes how much from one step on."""

    first: int  # step, 1-based
    local_batches: tuple[int, ...]  # by rank; 0 for a newcomer that has not the whole state yet
    rank: int | None  # this worker's; None when it has left

    @property
    def batch(self) -> int:
        """Global, samples per step."""
        return sum(self.local_batches)


class Schedule:
    """The rows that are in force or announced, oldest first.

    Args:
        row: in force from the first step on, whatever its own `first` says.
    """

    def __init__(self, row: ScheduleRow) -> None:
        self._rows = [row]

    def at(self, step: int) -> ScheduleRow:
        """The row in force at `step`.

        Args:
            step: 1-based, of all epochs.
        """
        found = self._rows[0]
        for row in self._rows:
            if row.first <= step:
                found = row
        return found

    def announce(self, rows: Sequence[ScheduleRow]) -> None:
        """These follow; they replace rows that begin as late."""
        first = min(row.first for row in rows)
        self._rows = [row for row in self._rows if row.first < first] + list(rows)

    def forget(self, step: int) -> None:
        """Drop what was over before `step`: a long job changes often.

        Args:
            step: 1-based, of all epochs; rows in force at it or later stay.
        """
        self._rows = [
            row
            for row, after in zip(self._rows, [*self._rows[1:], None], strict=True)
            if after is None or after.first > step
        ]


def split(batch: int, workers: int) -> tuple[int, ...]:
    """`batch` samples over `workers`, with differences of at most one, low ranks first.

    Args:
        batch: global, samples per step.
        workers: how many share it, 1 or more.

    Returns:
        Local batches by rank, shape (workers,), samples.
    """
    each, rest = divmod(batch, workers)
    return tuple(each + (rank < rest) for rank in range(workers))


def passes(count: int, bound: int, least: int = 1) -> tuple[int, ...]:
    """`count` samples in as few passes as `bound` per pass allows, of nearly equal size.

    More than one pass means that gradients are accumulated before they are reduced.

    Args:
        count: samples of a worker's share of a step.
        bound: samples that fit the device at once. Where it is just `least` and `count` no
            multiple of it, the first passes have a sample more.
        least: samples that a pass must have if `count` has so many; `bound` or less.

    Returns:
        Samples of each micro-batch.
    """
    if count <= bound:
        return (count,)
    return split(count, min(-(-count // bound), max(1, count // least)))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One batch of the loader; a share that is too large for the device is taken in several."""

    step: int  # 1-based, of all epochs
    epoch: int  # 1-based
    cursor_before: int  # samples of the epoch that are done before this step
    cursor_after: int  # and after it
    ids: list[int]
    count: int  # samples that are trained on; 0 for a batch that only keeps the script's loop going
    total: int  # samples of the step, over all workers
    first: bool  # of the step's micro-batches
    last: bool
    row: ScheduleRow  # in force at this step

    @property
    def weight(self) -> float:
        """Of its gradients in the step's: its samples over the global batch."""
        return self.count / self.total


class StepOutcome(Enum):
    """What became of a step, also if the group broke while it was under way."""

    COMMITTED = "committed"
    ADOPTED = "adopted"  # the others finished it: their state is this worker's now
    ROLLED_BACK = "rolled back"  # nobody did: its samples are drawn again


REMEMBERED: Final = 4  # steps that a lost member may not have recorded


class DealtStep(msgspec.Struct, frozen=True):
    """A step that is done."""

    epoch: int  # 1-based
    step: int  # 1-based, of all epochs
    cursor_before: int  # samples of the epoch that were done before it
    cursor_after: int  # and with it
    local_batches: tuple[int, ...]  # by rank, samples per step
    workers: tuple[WorkerId, ...]  # by rank, of the group in which it began
