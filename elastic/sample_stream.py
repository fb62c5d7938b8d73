"""Stream of samples: every sample once per epoch, for any batch size and number of workers.

The order of an epoch is a pure function of (seed, epoch, size), or the order of the data. A step
takes the next B ids and deals them out by rank. So any cursor can be continued with any global
batch and any split.

Division of batches over workers and passes: schedules, micro-batches, records of past steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, NamedTuple

import msgspec
import torch

from elastic.usage_checks import refuse_single_samples
from schemas.ids import WorkerId
from schemas.jobs import StopRule


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


@dataclass(frozen=True, slots=True)
class SampleStream:
    """The sample ids of a job.

    Attributes:
        seed: of the job.
        size: ||D||, samples of one pass over the training set.
        min_samples: of a step and of a rank that takes part in it; a smaller remainder is added to
            the step before.
        drop_last: leaves out a remainder that is no whole step, unless it is the whole epoch.
        shuffled: by seed and epoch; else ids are positions in data that has its own order.
    """

    seed: int
    size: int
    min_samples: int = 1
    drop_last: bool = False
    shuffled: bool = True

    def order(self, epoch: int) -> Sequence[int]:
        """Return all ids of `epoch` (1-based), shape (size,), each exactly once."""
        if not self.shuffled:
            return range(self.size)
        generator = torch.Generator().manual_seed(self.epoch_seed(epoch))
        ids: list[int] = torch.randperm(self.size, generator=generator).tolist()
        return ids

    def epoch_seed(self, epoch: int) -> int:
        """Return the seed of the random numbers for an epoch's data (1-based), below 2^63."""
        digest = hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def taken(self, cursor: int, batch: int) -> int:
        """Return the samples of the step that starts at `cursor`; 0 if the epoch is over.

        `cursor` is the number of samples done in the epoch, `batch` the global batch.
        """
        left = max(0, self.size - cursor)
        if self.drop_last:
            return batch if batch <= left else 0 if cursor else left
        return left if left - batch < self.min_samples else batch

    def steps(self, cursor: int, batch: int) -> int:
        """Return the steps before `cursor` if all had this global batch, rounded up.

        A cursor of `size` or more gives the steps of the whole epoch.
        """
        if self.drop_last:
            total = max(1, self.size // batch)
        else:  # the last step takes a remainder below `min_samples`
            total = 1 + max(0, (self.size - self.min_samples) // batch)
        return total if cursor >= self.size else min(total, -(-cursor // batch))

    def steps_left(self, cursor: int, batch: int) -> int:
        """Return the steps from `cursor` to the end of the epoch if all have this global batch."""
        left = self.size - cursor
        if not self.taken(cursor, batch):
            return 0
        if self.drop_last:
            return max(1, left // batch)
        return 1 + max(0, (left - self.min_samples) // batch)


def share(
    step: Sequence[int], local_batches: Sequence[int], rank: int, min_samples: int = 1
) -> list[int]:
    """Return the ids of a step that `rank` takes; the parts of all ranks in order are the step.

    See `share_sizes` for the arguments.
    """
    sizes = share_sizes(len(step), local_batches, min_samples)
    start = sum(sizes[:rank])
    return list(step[start : start + sizes[rank]])


def share_sizes(
    samples: int, local_batches: Sequence[int], min_samples: int = 1
) -> tuple[int, ...]:
    """Return how many samples of a step each rank takes, shape (ranks,), summing to `samples`.

    In a whole step, a rank takes its local batch (0 for newcomers without the full state). A step
    of another size, the last one, is split with differences of at most one sample, low ranks first,
    over as many ranks as can have two samples: batch normalisation refuses a single one. A whole
    step is split in the same way if a rank would have fewer than `min_samples`, but not 0.
    Newcomers get 0, and so do high ranks if there is not enough for all.
    """
    whole = samples == sum(local_batches)
    if whole and not any(0 < batch < min_samples for batch in local_batches):
        return tuple(local_batches)
    able = [rank for rank, batch in enumerate(local_batches) if batch]
    takers = able[: max(1, samples // max(2, min_samples))]
    sizes = dict(zip(takers, split(samples, len(takers)), strict=True))
    return tuple(sizes.get(rank, 0) for rank in range(len(local_batches)))


@dataclass(frozen=True, slots=True)
class TrainingPosition:
    """Position of a job in its samples; equal on every worker after the same step."""

    epoch: int = 1  # running epoch, 1-based
    cursor: int = 0  # samples of the epoch that are done
    step: int = 0  # steps that are done, of all epochs
    samples_done: int = 0  # of all epochs
    epoch_step: int = 0  # steps of the running epoch that are done

    def after_step(self, step: int, cursor: int) -> TrainingPosition:
        """Return the position after one more step, with `cursor` samples of the epoch done."""
        done = self.samples_done + cursor - self.cursor
        within = self.epoch_step + 1
        return replace(self, step=step, cursor=cursor, samples_done=done, epoch_step=within)

    def next_epoch(self) -> TrainingPosition:
        """Return the start of the next epoch."""
        return replace(self, epoch=self.epoch + 1, cursor=0, epoch_step=0)

    def advanced(self, steps: int, batch: int, stream: SampleStream) -> TrainingPosition:
        """Return the position after `steps` more steps of `batch` samples (global)."""
        epoch, cursor, done, within = self.epoch, self.cursor, self.samples_done, self.epoch_step
        for _ in range(steps):
            if not stream.taken(cursor, batch):
                epoch, cursor, within = epoch + 1, 0, 0
            taken = stream.taken(cursor, batch)
            cursor, done, within = cursor + taken, done + taken, within + 1
        if not stream.taken(cursor, batch):
            epoch, cursor, within = epoch + 1, 0, 0
        return TrainingPosition(epoch, cursor, self.step + steps, done, within)


class Progress(NamedTuple):
    """Finished shares, from 0 to 1, by samples: independent of the batch size."""

    epoch: float
    job: float  # share of the stop rule's epochs or samples; 0 if only a metric ends the job


def progress_of(position: TrainingPosition, size: int, rule: StopRule | None) -> Progress:
    """Return the progress at `position`; a rule of None is not known yet."""
    epoch = min(1.0, position.cursor / size) if size else 0.0
    shares = [0.0]
    if rule is not None and rule.epochs:
        shares.append((position.epoch - 1 + epoch) / rule.epochs)
    if rule is not None and rule.samples:
        shares.append(position.samples_done / rule.samples)
    return Progress(epoch, min(1.0, max(shares)))


PLACEHOLDER_BATCH: Final = 2  # size of a batch that only keeps the script's loop running


def rest_of_epoch(
    position: TrainingPosition, stream: SampleStream, schedule: Schedule, bound: int
) -> Iterator[MicroBatch]:
    """Yield the micro-batches to the end of the epoch, or of this worker's part in the job.

    They are computed lazily: schedule rows that are announced meanwhile count. A share above
    `bound` samples, which fit the device at once, is taken in several passes.

    Raises:
        UsageError: if a step has fewer samples than the model can be trained on.
    """
    cursor, step = position.cursor, position.step
    order = stream.order(position.epoch)
    while True:
        step += 1
        row = schedule.at(step)
        taken = stream.taken(cursor, row.batch)
        if row.rank is None or not taken:
            return  # this worker will have left, or the epoch is over
        refuse_single_samples(taken, bound, stream.min_samples)
        ids = order[cursor : cursor + taken]
        own_ids = share(ids, row.local_batches, row.rank, stream.min_samples)
        counts = passes(len(own_ids), bound, stream.min_samples) if own_ids else (0,)
        step_start = TrainingPosition(position.epoch, cursor, step)
        yield from _micro_batches(ids, own_ids, counts, row, step_start)
        cursor += len(ids)


def _micro_batches(
    ids: Sequence[int],
    own_ids: list[int],
    counts: tuple[int, ...],
    row: ScheduleRow,
    step_start: TrainingPosition,
) -> Iterator[MicroBatch]:
    """Yield a worker's share of a step, in as many passes as `counts` says."""
    start = 0
    for place, count in enumerate(counts):
        yield MicroBatch(
            step=step_start.step,
            epoch=step_start.epoch,
            cursor_before=step_start.cursor,
            cursor_after=step_start.cursor + len(ids),
            ids=own_ids[start : start + count] or list(ids[:PLACEHOLDER_BATCH]),
            count=count,
            total=len(ids),
            first=place == 0,
            last=place + 1 == len(counts),
            row=row,
        )
        start += count
