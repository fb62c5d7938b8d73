"""The paper's order: chance (Cerebro, Algorithm 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.sweeps.hopping.problem import HopProblem, Visit, members
from controlplane.sweeps.hopping.progress import Progress

if TYPE_CHECKING:
    from random import Random


class RandomOrder(Progress):
    """Each idle slot in turn takes any unit, by chance, whose model is idle (section 5.4)."""

    def __init__(self, problem: HopProblem, rng: Random) -> None:
        """As the problem is now."""
        super().__init__(problem)
        self._rng = rng

    def begin_units(self) -> list[Visit]:
        """Begin what can begin."""
        begun: list[Visit] = []
        for slot in sorted(self.idle_slots):
            place = self.problem.slots[slot]
            units = [
                Visit(model, partition, slot)
                for model in sorted(self.idle_models)
                for partition in members(self._todo[model] & (place.primary | place.replicas))
            ]
            if units:
                visit = units[self._rng.randrange(len(units))]
                self._begin(visit)
                begun.append(visit)
        return begun
