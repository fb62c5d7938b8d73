"""What a worker trains on in one pass: its share of a step, or a part of that share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from elastic.samples.batch_schedule import ScheduleRow


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
