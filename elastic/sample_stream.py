"""Stream of samples: every sample once per epoch, for any batch size and number of workers.

The order of an epoch is a pure function of (seed, epoch, size), or the order of the data. A step
uses the next B ids and divides them by rank. So training can continue at any cursor with any global
batch and any division.

A schedule divides each step over the workers. Micro-batches divide the share of a worker over
passes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Final, NamedTuple, overload

import msgspec
import torch

from elastic.usage_checks import refuse_single_samples
from schemas.ids import WorkerId
from schemas.jobs import StopRule


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """Local batches of all ranks, in force from step `first` on."""

    first: int  # first step, 1-based
    local_batches: tuple[int, ...]  # by rank; 0 for a newcomer without the full state
    rank: int | None  # rank of this worker; None when it has left

    @property
    def batch(self) -> int:
        """Global batch, which is the number of samples per step."""
        return sum(self.local_batches)


class Schedule:
    """Rows of a schedule, in the order of their first steps.

    The first row also applies to all earlier steps. The last row may start after the current step.
    """

    def __init__(self, row: ScheduleRow) -> None:
        self._rows = [row]

    def at(self, step: int) -> ScheduleRow:
        """Return the row in force at `step` (1-based, counted over all epochs)."""
        return next((row for row in reversed(self._rows) if row.first <= step), self._rows[0])

    def announce(self, rows: Sequence[ScheduleRow]) -> None:
        """Add rows. They replace existing rows that start at the same step or later."""
        first = min(row.first for row in rows)
        self._rows = [row for row in self._rows if row.first < first] + list(rows)

    def forget(self, step: int) -> None:
        """Drop rows that ended before `step`, because a long job announces many rows."""
        self._rows = [
            row
            for row, after in zip(self._rows, [*self._rows[1:], None], strict=True)
            if after is None or after.first > step
        ]


def split(batch: int, workers: int) -> tuple[int, ...]:
    """Split a global batch into local batches that differ by at most 1 sample, largest first."""
    each, rest = divmod(batch, workers)
    return tuple(each + (rank < rest) for rank in range(workers))


def passes(count: int, bound: int, min_samples: int = 1) -> tuple[int, ...]:
    """Split `count` samples into the fewest passes within `bound`, of nearly equal size.

    With several passes, gradients are accumulated before the reduction. Every pass has at least
    `min_samples` (<= `bound`) samples, unless `count` is smaller. If `bound` equals `min_samples`
    and `count` is no multiple of it, the first passes have one sample more than `bound`.
    """
    if count <= bound:
        return (count,)
    return split(count, min(-(-count // bound), max(1, count // min_samples)))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Batch of the loader. It is a worker's share of a step, or a part of the share for a pass."""

    step: int  # 1-based, of all epochs
    epoch: int  # 1-based
    cursor_before: int  # samples of the epoch that are done before this step
    cursor_after: int  # samples of the epoch that are done after this step
    ids: list[int]
    count: int  # samples; 0 if the batch only keeps the script's loop running
    total: int  # samples of the step, over all workers
    first: bool  # first of the step's micro-batches
    last: bool
    row: ScheduleRow  # schedule row in force at this step

    @property
    def weight(self) -> float:
        """Weight of this pass's gradients in the step: its samples divided by the global batch."""
        return self.count / self.total


class StepOutcome(Enum):
    """Outcome of a step, including steps during which the group broke."""

    COMMITTED = "committed"
    ADOPTED = "adopted"  # the peers finished the step: this worker received their state
    ROLLED_BACK = "rolled back"  # no worker finished the step: its samples are drawn again


RECENT_STEPS: Final = 4  # maximum number of steps that a lost member might not have recorded


class DealtStep(msgspec.Struct, frozen=True):
    """Division of a finished step over the workers."""

    epoch: int  # 1-based
    step: int  # 1-based, of all epochs
    cursor_before: int  # samples of the epoch that were done before the step
    cursor_after: int  # samples of the epoch that are done after the step
    local_batches: tuple[int, ...]  # by rank, samples per step
    workers: tuple[WorkerId, ...]  # by rank, in the group in which the step started


MAX_LISTED: Final = 1 << 18  # ids; the order of a larger set is computed for the steps only
_CHUNK: Final = 4096  # ids that are computed at once, in about a millisecond
_ROUNDS: Final = 8
_LOW_32: Final = (1 << 32) - 1
_FACTORS: Final = (0x9E3779B1, 0x85EBCA6B)  # odd numbers whose products mix all bits


class LargeOrder(Sequence[int]):
    """Pseudo-random permutation of range(size). The cost of a slice depends on its length only.

    It is a Feistel network over the next larger power of 4. Numbers beyond `size` are permuted
    again until they are below it ("cycle walking": Black and Rogaway, Ciphers with Arbitrary Finite
    Domains, 2002).
    """

    def __init__(self, seed: int, size: int) -> None:
        self._size = size
        self._half = ((size - 1).bit_length() + 1) // 2  # bits of each half
        digest = hashlib.blake2b(f"{seed}".encode(), digest_size=4 * _ROUNDS).digest()
        self._keys = struct.unpack(f">{_ROUNDS}I", digest)
        self._chunk: tuple[int, list[int]] = (0, [])  # position of the first id, and ids

    def __len__(self) -> int:
        """Return the number of ids."""
        return self._size

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        """Return the id at a position, or the ids of a slice with step 1."""
        if isinstance(at, int):
            return self[at : at + 1][0]
        start, stop, _ = at.indices(self._size)
        first, ids = self._chunk
        if not first <= start <= stop <= first + len(ids):
            first = start
            ids = self._ids(start, max(stop, min(start + _CHUNK, self._size)))
            self._chunk = first, ids
        return ids[start - first : stop - first]

    def _ids(self, start: int, stop: int) -> list[int]:
        found = self._permuted(torch.arange(start, stop))
        while len(beyond := (found >= self._size).nonzero()):
            found[beyond] = self._permuted(found[beyond])
        return found.tolist()

    def _permuted(self, numbers: torch.Tensor) -> torch.Tensor:
        mask = (1 << self._half) - 1
        left, right = numbers >> self._half, numbers & mask
        for key in self._keys:
            mixed = right ^ key
            for factor in _FACTORS:
                mixed = (mixed & _LOW_32) * factor & _LOW_32
                mixed = mixed ^ (mixed >> 15)
            left, right = right, left ^ (mixed & mask)
        return left << self._half | right


@lru_cache(maxsize=2)  # records of lost members need the order of a step again
def _listed_order(seed: int, size: int) -> Sequence[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(size, generator=generator).tolist()


@dataclass(frozen=True, slots=True)
class SampleStream:
    """Stream of the sample ids of a job.

    Attributes:
        seed: seed of the job.
        size: ||D||, number of samples in one pass over the training set.
        min_samples: minimum number of samples of a step, and of a rank's share in a step. A smaller
            remainder of an epoch is added to the previous step.
        drop_last: if True, a remainder that does not fill a step is left out, unless the remainder
            is the whole epoch.
        shuffled: True if seed and epoch decide the order. If False, ids are positions in the data.
        pass_size: samples of the data set if an epoch is not one pass over it; 0 if it is. The
            epochs then follow each other through the passes, and a pass has each sample once.
    """

    seed: int
    size: int
    min_samples: int = 1
    drop_last: bool = False
    shuffled: bool = True
    pass_size: int = 0

    def order(self, epoch: int) -> Sequence[int]:
        """Return all ids of `epoch` (1-based), shape (size,)."""
        if self.pass_size:
            return _PartOfPasses(self, (epoch - 1) * self.size)
        return self.pass_order(epoch)

    @property
    def data_size(self) -> int:
        """Number of samples in the data set."""
        return self.pass_size or self.size

    def pass_order(self, number: int) -> Sequence[int]:
        """Return all ids of a pass (1-based), shape (data_size,), each exactly once."""
        size = self.data_size
        if not self.shuffled:
            return range(size)
        if size > MAX_LISTED:
            return LargeOrder(self.epoch_seed(number), size)
        return _listed_order(self.epoch_seed(number), size)

    def epoch_seed(self, epoch: int) -> int:
        """Return the seed of the random numbers for an epoch or pass (1-based), below 2^63."""
        digest = hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def taken(self, cursor: int, batch: int) -> int:
        """Return the number of samples of the step that starts at `cursor`; 0 if none is left."""
        left = max(0, self.size - cursor)
        if self.drop_last:
            return batch if batch <= left else 0 if cursor else left
        return left if left - batch < self.min_samples else batch

    def steps(self, cursor: int, batch: int) -> int:
        """Return how many steps of `batch` samples are needed to reach `cursor`, rounded up.

        For a cursor of `size` or more, this is the number of steps of the whole epoch.
        """
        total = self.steps_left(0, batch)
        return total if cursor >= self.size else min(total, -(-cursor // batch))

    def steps_left(self, cursor: int, batch: int) -> int:
        """Return the number of steps from `cursor` to the epoch's end with this global batch."""
        left = self.size - cursor
        if not self.taken(cursor, batch):
            return 0
        if self.drop_last:
            return max(1, left // batch)
        # the last step takes a remainder below `min_samples`
        return 1 + max(0, (left - self.min_samples) // batch)


class _PartOfPasses(Sequence[int]):
    """Ids of an epoch that starts after `start` samples of the passes over a data set."""

    def __init__(self, stream: SampleStream, start: int) -> None:
        self._stream = stream
        self._start = start

    def __len__(self) -> int:
        """Return the number of ids."""
        return self._stream.size

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        """Return the id at a position, or the ids of a slice with step 1."""
        if isinstance(at, int):
            return self[at : at + 1][0]
        begin, end, _ = at.indices(len(self))
        found: list[int] = []
        while begin < end:
            done, place = divmod(self._start + begin, self._stream.data_size)
            ids = self._stream.pass_order(done + 1)[place : place + end - begin]
            found += ids
            begin += len(ids)
        return found


def share(
    step: Sequence[int], local_batches: Sequence[int], rank: int, min_samples: int = 1
) -> list[int]:
    """Return the share of `rank` in the ids of a step; see `share_sizes` for the arguments."""
    sizes = share_sizes(len(step), local_batches, min_samples)
    start = sum(sizes[:rank])
    return list(step[start : start + sizes[rank]])


def share_sizes(
    samples: int, local_batches: Sequence[int], min_samples: int = 1
) -> tuple[int, ...]:
    """Return the number of samples of each rank in a step, shape (ranks,); the sum is `samples`.

    In a whole step, a rank gets its local batch (0 for newcomers without the full state). The last
    step of an epoch can have another size. It is split over the ranks with differences of at most
    one sample; low ranks get more. Only as many ranks take part as can have two samples, because
    batch normalisation refuses a single one. A whole step is split in the same way if a rank would
    have fewer than `min_samples`, but not 0. Newcomers get 0, and so do high ranks if there are not
    enough samples for all.
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
    """Position of a job in its samples. After the same step every worker has the same position."""

    epoch: int = 1  # running epoch, 1-based
    cursor: int = 0  # samples of the epoch that are done
    step: int = 0  # steps that are done, of all epochs
    samples_done: int = 0  # samples that were trained, of all epochs
    epoch_step: int = 0  # steps of the running epoch that are done
    skipped: int = 0  # samples of the running epoch in batches that no rank trained

    def after_step(self, step: int, cursor: int, *, trained: bool = True) -> TrainingPosition:
        """Return the position after one more step, when `cursor` samples of the epoch are done.

        If `trained` is False, no rank trained the step's samples.
        """
        samples = cursor - self.cursor
        return replace(
            self,
            step=step,
            cursor=cursor,
            samples_done=self.samples_done + samples * trained,
            epoch_step=self.epoch_step + 1,
            skipped=self.skipped + samples * (not trained),
        )

    def next_epoch(self) -> TrainingPosition:
        """Return the position at the start of the next epoch."""
        return replace(self, epoch=self.epoch + 1, cursor=0, epoch_step=0, skipped=0)

    def advanced(self, steps: int, batch: int, stream: SampleStream) -> TrainingPosition:
        """Return the position after `steps` more trained steps with the global batch `batch`."""
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
    """Finished shares of the samples, from 0 to 1. The shares do not depend on the batch size."""

    epoch: float
    job: float  # share of the stop rule's epochs or samples; 0 if only a metric ends the job


def progress_of(position: TrainingPosition, size: int, rule: StopRule | None) -> Progress:
    """Return the progress at `position`; `rule` is None if the stop rule is not known yet."""
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
    """Yield this worker's micro-batches until the epoch ends or the worker leaves.

    Schedule rows that are announced meanwhile apply to the steps that are not yielded yet. A share
    of more than `bound` samples is divided into several passes.
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
        start = 0
        for place, count in enumerate(counts):
            yield MicroBatch(
                step=step,
                epoch=position.epoch,
                cursor_before=cursor,
                cursor_after=cursor + taken,
                ids=own_ids[start : start + count] or list(ids[:PLACEHOLDER_BATCH]),
                count=count,
                total=taken,
                first=place == 0,
                last=place + 1 == len(counts),
                row=row,
            )
            start += count
        cursor += taken
