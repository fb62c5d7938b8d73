"""What the network is shown: numbers of each job and of the cluster, all of the order of 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from controlplane.prediction.array_types import BoolArray, FloatArray, IntArray
from controlplane.prediction.ring_step_time import steps_at

INPUTS_VERSION: Final = 1  # raised whenever what an input means changes
JOB_INPUTS: Final = 15
CLUSTER_INPUTS: Final = 10
MANY_SLOTS: Final = 8.0  # counts of slots are told in these
LONG: Final = 8.0  # the logarithm of an hour's seconds, about
SHORTEST_S: Final = 1e-6  # of a step


@dataclass(frozen=True, slots=True)
class JobTable:
    """The N jobs that a round decides about, by row; seconds are on the controller's clock."""

    have: IntArray  # slots, shape (N,), as all others
    least: IntArray
    cap: IntArray  # the most that it may have and can use; not below `least`
    wanted: IntArray
    batch: IntArray  # global, samples per step
    coefficients: FloatArray  # of its step times, shape (N, 4)
    steps_left: FloatArray
    known: BoolArray  # whether its length is more than a guess
    age_s: FloatArray  # since it was submitted
    still_s: FloatArray  # since its group changed, or it began to wait
    room: int  # slots for all of them

    def step_s(self, slots: IntArray) -> FloatArray:
        """Seconds of a step of each job.

        Args:
            slots: of each, shape (N,), at least 1.
        """
        times = steps_at(self.coefficients, slots[:, None], self.batch[:, None])[:, 0]
        return np.maximum(times, SHORTEST_S)


def job_inputs(table: JobTable, sizes: IntArray) -> FloatArray:
    """What the network is told of each job.

    DL2's state is the type, the age, the remaining work, the dominant share and the workers of
    each job. Paper: a type is an index. Here: it is what was measured of jobs of that script and
    model, which says something of new ones too.

    Args:
        sizes: slots that each has so far in this round, shape (N,); 0: it waits.

    Returns:
        Shape (N, JOB_INPUTS).
    """
    runs = sizes > 0
    now = np.maximum(sizes, table.least)
    step_s = table.step_s(now)
    grown_s = table.step_s(now + 1)
    fewer = np.maximum(now - 1, 1)
    shrunk_s = table.step_s(fewer)
    saved_s = np.maximum(0.0, step_s - grown_s) * table.steps_left
    lost_s = np.maximum(0.0, shrunk_s - step_s) * table.steps_left
    columns = (
        runs,
        sizes / MANY_SLOTS,
        sizes / max(1, table.room),  # dominant share
        np.log1p(table.age_s) / LONG,
        np.log1p(step_s * table.steps_left) / LONG,  # remaining seconds at this size
        table.known,
        table.wanted / MANY_SLOTS,
        table.least / MANY_SLOTS,
        np.log10(step_s),
        np.clip(1.0 - grown_s / step_s, -1.0, 1.0),  # what another slot brings
        np.clip(shrunk_s / step_s - 1.0, -1.0, 1.0),  # and what one fewer costs
        np.log1p(saved_s) / LONG,
        np.log1p(lost_s) / LONG,
        np.log1p(table.still_s) / LONG,
        (sizes - table.have) / MANY_SLOTS,  # as this round has changed it so far
    )
    return np.column_stack([np.asarray(column, dtype=np.float64) for column in columns])


def cluster_inputs(table: JobTable, sizes: IntArray, jobs: FloatArray) -> FloatArray:
    """What the network is told of the cluster.

    Args:
        sizes: slots of each, shape (N,).
        jobs: as `job_inputs` gave them, shape (N, JOB_INPUTS).

    Returns:
        Shape (CLUSTER_INPUTS,).
    """
    waits = sizes == 0
    waiting, running = int(waits.sum()), int((~waits).sum())
    free = table.room - int(sizes.sum())
    fits = waits & (table.least <= free)
    grows = ~waits & (sizes < table.cap)
    shrinks = ~waits & (sizes > table.least)
    queued_s = float((table.least * table.step_s(table.least) * table.steps_left)[waits].sum())
    return np.array(
        [
            free / max(1, table.room),
            min(free, 2.0 * MANY_SLOTS) / MANY_SLOTS,
            np.log1p(waiting) / 4.0,
            np.log1p(running) / 4.0,
            table.room / max(1, running + waiting) / MANY_SLOTS,
            np.log1p(queued_s / max(1, table.room)) / LONG,  # to work off all that waits
            float(fits.any()),
            jobs[grows, 11].max(initial=0.0),  # the most that a slot could save
            jobs[shrinks, 12].min(initial=2.0),  # the least that a slot could cost
            float((sizes != table.have).any()),
        ]
    )
