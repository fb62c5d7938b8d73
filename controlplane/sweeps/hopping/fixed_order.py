"""Visits in an order that is known beforehand, so that a sweep can be repeated to the last bit."""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.sweeps.hopping.problem import HopProblem, Partitions, Visit
from controlplane.sweeps.hopping.progress import Progress


class FixedOrder(Progress):
    """A model visits partitions round and round; each begins elsewhere, so that few meet.

    Who is idle decides when a unit begins, and not which. Epoch e of model i begins with partition
    (i + e) modulo the number of partitions.
    """

    def __init__(self, problem: HopProblem, turns: Sequence[int]) -> None:
        """As the problem is now.

        Args:
            turns: i + e of each model's present epoch, shape (models,).
        """
        self._turns = list(turns)
        super().__init__(problem)

    def end(self, visit: Visit) -> None:
        """The unit has ended; its model goes on with its next epoch if it has one."""
        before = self._epochs_left[visit.model]
        super().end(visit)
        self._turns[visit.model] += before - self._epochs_left[visit.model]

    def _open(self, model: int) -> Partitions:
        """The first one of its round that it has not visited."""
        todo, many = self._todo[model], len(self.problem.sizes)
        turn = self._turns[model] % many
        later = todo >> turn
        return (later & -later) << turn if later else todo & -todo
