"""What a worker trains on in one pass: its share of a step, or a part of that share."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.samples.schedule import ScheduleRow


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A batch of the loader: a step's share of this worker, or a pass of it."""

    step: int
    epoch: int
    before: int  # samples of the epoch that are done before this step
    cursor: int  # and after it
    ids: list[int]
    count: int  # samples that are trained on; 0 for a batch that only keeps the script's loop going
    total: int  # of the step, over all workers
    first: bool  # pass of the step
    last: bool
    row: ScheduleRow
