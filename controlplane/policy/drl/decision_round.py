"""One round: action by action, from the sizes of now to those of the next round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from controlplane.policy.drl.actor import ACTIONS
from controlplane.policy.drl.inputs import JobTable, cluster_inputs, job_inputs
from controlplane.prediction.array_types import BoolArray, FloatArray, IntArray

MORE: Final = 0
FEWER: Final = 1
SAME: Final = 2


@dataclass(frozen=True, slots=True)
class Moment:
    """What the network is asked: one action, of 3 for each of N jobs and the end of the round."""

    jobs: FloatArray  # shape (N, JOB_INPUTS)
    cluster: FloatArray  # shape (CLUSTER_INPUTS,)
    legal: BoolArray  # shape (3 N + 1,)
    table: JobTable
    sizes: IntArray  # so far, shape (N,)


Choose = Callable[[Moment], int]


class DecisionRound:
    """Applies actions to sizes, and says which are legal.

    More gives a running job one slot, and a waiting one its least; fewer takes one, and what is
    left of a job that has its least only where jobs may be stopped; same leaves a job as it is for
    this round. What was begun with a job goes on in that direction only, so that a round ends.
    Where a waiting job fits, nothing but a start is legal as a round's first action, and while
    nobody runs.
    """

    def __init__(self, table: JobTable, *, one_job: bool, preempt: bool) -> None:
        """Begin with the sizes of now.

        Args:
            one_job: whether only one of them may change.
            preempt: whether a running job may be stopped.
        """
        self._table = table
        self._one_job, self._preempt = one_job, preempt
        self.sizes: IntArray = table.have.copy()
        self._settled = np.zeros(len(table.have), dtype=np.bool_)
        self._ended = False

    def run(self, choose: Choose) -> IntArray:
        """Ask for actions until the round ends, or nothing but its end is legal.

        Args:
            choose: gives the index of a legal action.

        Returns:
            Slots of each job, shape (N,).
        """
        while not self._ended:
            legal = self._legal()
            if not legal[:-1].any():
                break
            jobs = job_inputs(self._table, self.sizes)
            cluster = cluster_inputs(self._table, self.sizes, jobs)
            self._apply(choose(Moment(jobs, cluster, legal, self._table, self.sizes.copy())))
        return self.sizes

    def _legal(self) -> BoolArray:
        table, sizes = self._table, self.sizes
        changed = sizes - table.have
        open_ = ~self._settled
        if self._one_job and changed.any():
            open_ &= changed != 0
        runs = sizes > 0
        free = table.room - int(sizes.sum())
        more = open_ & (changed >= 0)
        more &= np.where(runs, (sizes < table.cap) & (free >= 1), table.least <= free)
        fewer = open_ & (changed <= 0) & runs
        fewer &= (sizes > table.least) | self._preempt
        starts = more & ~runs
        begins = not changed.any() or not runs.any()
        if begins and starts.any():  # no model can keep slots idle beside those who wait
            no = np.zeros_like(starts)
            return np.append(np.column_stack((starts, no, no)).ravel(), False)
        legal = np.column_stack((more, fewer, open_ & (more | fewer))).ravel()
        return np.append(legal, True)

    def _apply(self, action: int) -> None:
        row, what = divmod(action, ACTIONS)
        if row == len(self.sizes):
            self._ended = True
        elif what == SAME:
            self._settled[row] = True
        else:
            self.sizes[row] = self._moved(row, what)

    def _moved(self, row: int, what: int) -> int:
        size, least = int(self.sizes[row]), int(self._table.least[row])
        if what == MORE:
            return size + 1 if size else least
        return size - 1 if size > least else 0
