"""What jobs on the same node cost each other, as far as it was learnt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from controlplane.prediction.array_types import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class InterferenceModel:
    """Slow-downs by class: a family, on one node (2 f) or over several (2 f + 1).

    log(step / step alone) = the greatest theta[own class, class of another job on a shared node].
    """

    log_slowdowns: FloatArray  # shape (C, C), at least 0
    family: IntArray  # shape (J,), numbers of the jobs' families
    fixed: FloatArray  # shape (N, C), jobs on each node that nobody may move

    def kept(self, rows: IntArray, nodes: IntArray, spans: IntArray) -> FloatArray:
        """The share of its speed that each job keeps.

        Args:
            rows: shape (P,), of each (job, node) pair of a schedule.
            nodes: shape (P,).
            spans: shape (J,), nodes that each job is on.
        """
        mine = 2 * self.family + (spans > 1)
        found = np.zeros(len(self.family))
        if not len(rows):
            return np.ones(len(found))
        here = self._there(rows, nodes, mine)[nodes]
        here[np.arange(len(rows)), mine[rows]] -= 1.0
        worst = np.where(here > 0.0, self.log_slowdowns[mine[rows]], 0.0).max(axis=1)
        np.maximum.at(found, rows, worst)
        return np.exp(-found)

    def node_costs(self, row: int, rows: IntArray, nodes: IntArray) -> FloatArray:
        """What `row`, on one node, and who is there would cost each other; shape (N,).

        Args:
            rows: shape (P,), of each (job, node) pair of a schedule.
            nodes: shape (P,).

        Returns:
            Logarithms of factors on step times, shape (N,), at least 0.
        """
        spans = np.bincount(rows, minlength=len(self.family))
        mine = 2 * self.family + (spans > 1)
        others = rows != row
        there = self._there(rows[others], nodes[others], mine) > 0.0
        own = int(2 * self.family[row])
        both = np.maximum(self.log_slowdowns[own], 0.0), self.log_slowdowns[:, own]
        return np.asarray(sum(np.where(there, cost, 0.0).max(axis=1) for cost in both))

    def _there(self, rows: IntArray, nodes: IntArray, mine: IntArray) -> FloatArray:
        """How many jobs of each class are on each node, shape (N, C)."""
        there = self.fixed.copy()
        np.add.at(there, (nodes, mine[rows]), 1.0)
        return there
