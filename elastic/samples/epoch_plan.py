"""The micro-batches that one worker takes in the rest of an epoch, as the schedule deals it out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from elastic.samples.batch_schedule import Schedule, ScheduleRow
from elastic.samples.local_batches import passes
from elastic.samples.micro_batch import MicroBatch
from elastic.samples.sample_stream import SampleStream, share
from elastic.samples.stream_position import TrainingPosition
from elastic.usage_checks import refuse_single_samples

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
