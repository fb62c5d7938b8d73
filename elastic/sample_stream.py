"""Every sample once per epoch, whatever the batch size and the number of workers.

The order of an epoch is a pure function of (seed, epoch, size), or that of the data; a step takes
the next B ids of it and deals them out by rank. So any cursor can be continued with any global
batch and any split.

Where training stands in its stream of samples.

How much of a job is done.

The micro-batches that one worker takes in the rest of an epoch, as the schedule deals it out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch

from elastic.batches import MicroBatch, Schedule, ScheduleRow, passes, split
from elastic.usage_checks import refuse_single_samples
from schemas.jobs import StopRule


@dataclass(frozen=True, slots=True)
class SampleStream:
    """The sample ids of a job.

    Attributes:
        seed: of the job.
        size: ||D||, samples of one pass over the training set.
        least: samples that a step, and a rank that takes any of it, must have: a smaller remainder
            goes to the step before it.
        drop_last: a remainder that is no whole step is left out, unless it is the whole epoch.
        shuffled: by seed and epoch; else ids are places in data that have an order of their own.
    """

    seed: int
    size: int
    least: int = 1
    drop_last: bool = False
    shuffled: bool = True

    def order(self, epoch: int) -> Sequence[int]:
        """All ids of `epoch` (1-based), shape (size,), each exactly once.

        Args:
            epoch: 1-based; with seed and size it decides alone.
        """
        if not self.shuffled:
            return range(self.size)
        generator = torch.Generator().manual_seed(self.epoch_seed(epoch))
        ids: list[int] = torch.randperm(self.size, generator=generator).tolist()
        return ids

    def epoch_seed(self, epoch: int) -> int:
        """What the random numbers of an epoch's data begin with; below 2^63.

        Args:
            epoch: 1-based.
        """
        digest = hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def taken(self, cursor: int, batch: int) -> int:
        """Samples of the step that begins at `cursor`; 0 where the epoch is over.

        Args:
            cursor: samples of the epoch that are done.
            batch: global, samples per step.
        """
        left = max(0, self.size - cursor)
        if self.drop_last:
            return batch if batch <= left else 0 if cursor else left
        return left if left - batch < self.least else batch

    def steps(self, cursor: int, batch: int) -> int:
        """Steps from the beginning of an epoch to `cursor`, if all had the same batch; rounded up.

        Args:
            cursor: samples of the epoch that are done; `size` or more: the whole epoch's steps.
            batch: global, samples per step.
        """
        if self.drop_last:
            total = max(1, self.size // batch)
        else:  # the last one begins where less than `least` would be left behind it
            total = 1 + max(0, (self.size - self.least) // batch)
        return total if cursor >= self.size else min(total, -(-cursor // batch))

    def steps_left(self, cursor: int, batch: int) -> int:
        """Steps from `cursor` to the end of the epoch, if all have the same batch.

        Args:
            cursor: samples of the epoch that are done.
            batch: global, samples per step.
        """
        left = self.size - cursor
        if not self.taken(cursor, batch):
            return 0
        if self.drop_last:
            return max(1, left // batch)
        return 1 + max(0, (left - self.least) // batch)

    def batches(
        self, epoch: int, cursor: int, local_batches: Sequence[int], rank: int
    ) -> Iterator[tuple[int, list[int]]]:
        """What `rank` trains on from `cursor` to the end of `epoch`.

        Args:
            epoch: 1-based.
            cursor: samples of the epoch that are done, over all ranks.
            local_batches: b_j^i by rank, samples per step.

        Yields:
            The cursor behind each step, and the rank's ids; the last step is never padded, and may
            leave a rank with none.
        """
        order = self.order(epoch)
        while taken := self.taken(cursor, sum(local_batches)):
            step = order[cursor : cursor + taken]
            cursor += len(step)
            yield cursor, share(step, local_batches, rank, self.least)


def share(
    step: Sequence[int], local_batches: Sequence[int], rank: int, least: int = 1
) -> list[int]:
    """The part of a step's ids that `rank` takes, as `share_sizes` deals it out.

    Args:
        step: ids of the step, in the order of the epoch.
        local_batches: by rank, samples per step; 0 for a newcomer without the whole state.
        least: samples that a rank must have if it has any.

    Returns:
        Ids of this rank; the parts of all ranks, one behind the other, are the step.
    """
    sizes = share_sizes(len(step), local_batches, least)
    start = sum(sizes[:rank])
    return list(step[start : start + sizes[rank]])


def share_sizes(samples: int, local_batches: Sequence[int], least: int = 1) -> tuple[int, ...]:
    """How many samples of a step each rank takes.

    In a whole step, its local batch. A step of another size, the last one, is dealt out with
    differences of at most one sample, low ranks first, to as many ranks as can have two: layers
    that look at a batch as a whole refuse a single one. So is a whole step in which a rank would
    have some samples but less than `least`: no rank then has more than it must.

    Args:
        local_batches: by rank, samples per step; 0 for a newcomer without the whole state.
        least: samples that a rank must have if it has any.

    Returns:
        By rank, shape (ranks,), summing up to `samples`; 0 for newcomers, and for high ranks where
        there is not enough for all.
    """
    whole = samples == sum(local_batches)
    if whole and not any(0 < batch < least for batch in local_batches):
        return tuple(local_batches)
    able = [rank for rank, batch in enumerate(local_batches) if batch]
    takers = able[: max(1, samples // max(2, least))]
    sizes = dict(zip(takers, split(samples, len(takers)), strict=True))
    return tuple(sizes.get(rank, 0) for rank in range(len(local_batches)))


@dataclass(frozen=True, slots=True)
class TrainingPosition:
    """What is done of a job: a value, the same on every worker behind the same step."""

    epoch: int = 1  # the running one, 1-based
    cursor: int = 0  # samples of it that are done
    step: int = 0  # steps that are done, of all epochs
    samples_done: int = 0  # of all epochs
    epoch_step: int = 0  # steps of the running epoch that are done

    def after_step(self, step: int, cursor: int) -> TrainingPosition:
        """The same epoch, behind one more step.

        Args:
            cursor: samples of the epoch that are done with it.
        """
        done = self.samples_done + cursor - self.cursor
        within = self.epoch_step + 1
        return replace(self, step=step, cursor=cursor, samples_done=done, epoch_step=within)

    def next_epoch(self) -> TrainingPosition:
        """The beginning of the next epoch."""
        return replace(self, epoch=self.epoch + 1, cursor=0, epoch_step=0)

    def advanced(self, steps: int, batch: int, stream: SampleStream) -> TrainingPosition:
        """Where training stands `steps` steps of `batch` samples further on.

        Args:
            batch: global, samples per step.
            stream: says how the last step of an epoch is.
        """
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
    """Shares, from 0 to 1; they follow the samples that are done, whatever the batch is."""

    epoch: float
    job: float  # of the stop rule's epochs or samples; 0 where only a metric ends the job


def progress_of(position: TrainingPosition, size: int, rule: StopRule | None) -> Progress:
    """Where `position` is in its epoch and in its job.

    Args:
        position: behind the last step that is done.
        rule: that ends the job; None: not known yet.
    """
    epoch = min(1.0, position.cursor / size) if size else 0.0
    shares = [0.0]
    if rule is not None and rule.epochs:
        shares.append((position.epoch - 1 + epoch) / rule.epochs)
    if rule is not None and rule.samples:
        shares.append(position.samples_done / rule.samples)
    return Progress(epoch, min(1.0, max(shares)))


PLACEHOLDER_SAMPLES: Final = 2  # samples of a batch that only keeps the script's loop going


def rest_of_epoch(
    position: TrainingPosition, stream: SampleStream, schedule: Schedule, bound: int
) -> Iterator[MicroBatch]:
    """What comes, drawn lazily: rows that are announced meanwhile count.

    Args:
        position: behind which the plan begins.
        schedule: who takes how many samples of a step; read again for each step.
        bound: samples that fit the device at once; larger shares are taken in passes.

    Returns:
        Micro-batches to the end of the epoch, or of this worker's part in the job.

    Raises:
        UsageError: where a step has fewer samples than the model can be trained on.
    """
    cursor, step = position.cursor, position.step
    order = stream.order(position.epoch)
    while True:
        step += 1
        row = schedule.at(step)
        taken = stream.taken(cursor, row.batch)
        if row.rank is None or not taken:
            return  # this worker has left by then, or the epoch is over
        refuse_single_samples(taken, bound, stream.least)
        ids = order[cursor : cursor + taken]
        mine = share(ids, row.local_batches, row.rank, stream.least)
        counts = passes(len(mine), bound, stream.least) if mine else (0,)
        here = TrainingPosition(position.epoch, cursor, step)
        yield from _micro_batches(ids, mine, counts, row, here)
        cursor += len(ids)


def _micro_batches(
    ids: Sequence[int],
    mine: list[int],
    counts: tuple[int, ...],
    row: ScheduleRow,
    here: TrainingPosition,
) -> Iterator[MicroBatch]:
    """A worker's share of a step, in as many passes as it takes."""
    start = 0
    for place, count in enumerate(counts):
        yield MicroBatch(
            step=here.step,
            epoch=here.epoch,
            cursor_before=here.cursor,
            cursor_after=here.cursor + len(ids),
            ids=mine[start : start + count] or list(ids[:PLACEHOLDER_SAMPLES]),
            count=count,
            total=len(ids),
            first=place == 0,
            last=place + 1 == len(counts),
            row=row,
        )
        start += count
