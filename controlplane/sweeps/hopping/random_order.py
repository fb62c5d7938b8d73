"""The paper's order: chance (Cerebro, Algorithm 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.sweeps.hopping.problem import HopProblem, Visit, members

if TYPE_CHECKING:
    from random import Random


class RandomOrder:
    """Each idle slot in turn takes any unit, by chance, whose model is idle (section 5.4)."""

    def __init__(self, problem: HopProblem, rng: Random) -> None:
        """As the problem is now.

        Args:
            problem: what is left to do.
            rng: the only source of chance.
        """
        self.problem = problem
        self._rng = rng
        self._todo = [model.todo for model in problem.models]
        self._epochs_left = [model.epochs_left for model in problem.models]
        self._idle_models = {at for at, model in enumerate(problem.models) if model.todo}
        self._idle_slots = set(range(len(problem.slots)))
        for unit in problem.running:
            self._begin(unit.visit)

    def begin_units(self) -> list[Visit]:
        """Begin what can begin."""
        begun: list[Visit] = []
        for slot in sorted(self._idle_slots):
            place = self.problem.slots[slot]
            units = [
                Visit(model, partition, slot)
                for model in sorted(self._idle_models)
                for partition in members(self._todo[model] & (place.primary | place.replicas))
            ]
            if units:
                visit = units[self._rng.randrange(len(units))]
                self._begin(visit)
                begun.append(visit)
        return begun

    def end(self, visit: Visit) -> None:
        """The unit has ended; its model goes on with its next epoch if it has one.

        Args:
            visit: that had begun.
        """
        model = visit.model
        self._idle_slots.add(visit.slot)
        if not self._todo[model] and self._epochs_left[model]:
            self._epochs_left[model] -= 1
            self._todo[model] = self.problem.everything
        if self._todo[model]:
            self._idle_models.add(model)

    def _begin(self, visit: Visit) -> None:
        self._todo[visit.model] &= ~(1 << visit.partition)
        self._idle_models.discard(visit.model)
        self._idle_slots.discard(visit.slot)
