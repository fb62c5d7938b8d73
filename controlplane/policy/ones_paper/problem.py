"""One view as the search sees it: columns of slots, rows of jobs, and what each size does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from controlplane.policy.api import JobView
from controlplane.prediction.array_types import BoolArray, FloatArray, IntArray
from schemas.ids import JobId, Seconds, SlotId

Genes = npt.NDArray[np.int16]  # row of the job on each slot; IDLE: nobody's
IDLE: Final = -1


@dataclass(frozen=True)
class Problem:
    """Everything that stays the same while one view is searched; J jobs, G slots, sizes to C."""

    version: int
    jobs: tuple[JobView, ...]  # that may be changed or started, in order of arrival
    slots: tuple[SlotId, ...]  # that may be given out, node by node
    nodes: IntArray  # shape (G,), number of each slot's node
    present: Genes  # shape (G,), who has them now
    size: IntArray  # shape (J,), slots now
    least: IntArray  # shape (J,), slots
    most: IntArray  # shape (J,), slots within R: floor(R c / B); below `least` if none will do
    batches: IntArray  # shape (J, C + 1), global batch on so many slots
    rates: FloatArray  # X, shape (J, C + 1, 2), samples/s on as few nodes as possible, on more
    done: FloatArray  # Y_processed, shape (J,), samples; at least an epoch where Y is a forecast
    exact: FloatArray  # Y where it is known otherwise, shape (J,), samples; nan: eq. 7
    alpha: FloatArray  # of the progress, shape (J,)
    beta: FloatArray
    served_s: FloatArray  # T_processed, shape (J,)
    start_s: FloatArray  # what starting it (again) takes, shape (J,)
    new: BoolArray  # shape (J,), never had a slot
    limits: IntArray  # R, shape (J,)
    gated: tuple[JobId, ...]  # run, and have not finished an epoch since they were changed
    opens_at: tuple[Seconds, ...]  # when gated jobs may be changed, if no epoch ends before
    held: bool  # nothing changes before everybody has finished an epoch

    @property
    def rows(self) -> IntArray:
        """0 to J - 1."""
        return np.arange(len(self.jobs))
