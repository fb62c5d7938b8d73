"""The micro-batches that one worker takes in the rest of an epoch, as the schedule deals it out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from elastic.samples.batch_schedule import Schedule, ScheduleRow
from elastic.samples.local_batches import passes
from elastic.samples.micro_batch import MicroBatch
from elastic.samples.sample_stream import SampleStream, share
from elastic.samples.stream_position import TrainingPosition

PLACEHOLDER_SAMPLES: Final = 2  # samples of a batch that only keeps the script's loop going


def rest_of_epoch(
    position: TrainingPosition, stream: SampleStream, schedule: Schedule, bound: int
) -> Iterator[MicroBatch]:
    """What comes, drawn lazily: rows that are announced meanwhile count.

    Args:
        position: behind which the plan begins.
        stream: the ids of every epoch.
        schedule: who takes how many samples of a step; read again for each step.
        bound: samples that fit the device at once; larger shares are taken in passes.

    Returns:
        Micro-batches to the end of the epoch, or of this worker's part in the job.
    """
    cursor, step = position.cursor, position.step
    order = stream.order(position.epoch)
    while True:
        step += 1
        row = schedule.at(step)
        taken = stream.taken(cursor, row.batch)
        if row.rank is None or not taken:
            return  # this worker has left by then, or the epoch is over
        ids = order[cursor : cursor + taken]
        here = TrainingPosition(position.epoch, cursor, step)
        yield from _micro_batches(ids, share(ids, row.local_batches, row.rank), row, here, bound)
        cursor += len(ids)


def _micro_batches(
    ids: list[int], mine: list[int], row: ScheduleRow, here: TrainingPosition, bound: int
) -> Iterator[MicroBatch]:
    """A worker's share of a step, in as many passes as it takes."""
    counts = passes(len(mine), bound) if mine else (0,)
    start = 0
    for place, count in enumerate(counts):
        yield MicroBatch(
            step=here.step,
            epoch=here.epoch,
            cursor_before=here.cursor,
            cursor_after=here.cursor + len(ids),
            ids=mine[start : start + count] or ids[:PLACEHOLDER_SAMPLES],
            count=count,
            total=len(ids),
            first=place == 0,
            last=place + 1 == len(counts),
            row=row,
        )
        start += count
