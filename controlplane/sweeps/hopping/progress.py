"""A sweep that goes on: what is left, who is idle, and the greedy choice of what comes next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.sweeps.hopping.problem import HopProblem, Partitions, Visit, members


@dataclass(frozen=True, slots=True)
class Weights:
    """How much more, or less, than its remaining work a model or a slot is taken to have."""

    models: Sequence[float]  # shape (models,), above 0
    slots: Sequence[float]  # shape (slots,), above 0
    visits: float = 0.0  # power of the visits that a model has left, a factor beside its work


class Progress:
    """What is left of a problem; changes as units begin and end."""

    def __init__(self, problem: HopProblem, weights: Weights | None = None) -> None:
        """As the problem is now: its running units have begun and not ended.

        Args:
            weights: on the work that is left; None: all alike.
        """
        self.problem = problem
        models, slots = problem.models, problem.slots
        self._model_weights = weights.models if weights else [1.0] * len(models)
        self._slot_weights = weights.slots if weights else [1.0] * len(slots)
        self._visits_count = weights.visits if weights else 0.0
        self._home = {p: at for at, slot in enumerate(slots) for p in members(slot.primary)}
        self._todo = [model.todo for model in models]
        self._epochs_left = [model.epochs_left for model in models]
        self._at = [model.at for model in models]
        sizes = _SizesOfSets(problem)
        whole = sizes.of(problem.everything)
        self._work = [  # of each model, seconds on a slot of slowness 1
            m.unit_s * (m.epochs_left * whole + sizes.of(m.todo)) for m in models
        ]
        self._load = [0.0] * len(slots)  # of what is primary there, seconds
        for p, unit_s in enumerate(_unit_seconds(problem)):
            if p in self._home:
                home = self._home[p]
                self._load[home] += unit_s * problem.sizes[p] * slots[home].slowness
        self.idle_models = {at for at, model in enumerate(models) if model.todo}
        self.idle_slots = set(range(len(slots)))
        for unit in problem.running:
            self._begin(unit.visit)

    @property
    def over(self) -> bool:
        """Whether no unit is left to begin."""
        return not any(self._todo)

    def begin_units(self) -> list[Visit]:
        """Begin what can begin: the most loaded idle slot takes the model with most work left.

        A slot serves what is primary there first, and replicas of others only when none of its
        own is left to be visited by an idle model. Among models alike, one whose state is there
        already is taken.
        """
        begun: list[Visit] = []
        if not self.idle_models:
            return begun
        by_work = sorted(self.idle_models, key=lambda m: (-self._rank(m), m))
        by_load = sorted(self.idle_slots, key=lambda s: (-self._load[s] * self._slot_weights[s], s))
        for own in (True, False):
            for slot in by_load:
                if slot in self.idle_slots:
                    visit = self._first(by_work, slot, own=own)
                    if visit is not None:
                        self._begin(visit)
                        begun.append(visit)
        return begun

    def end(self, visit: Visit) -> None:
        """The unit has ended; its model goes on with its next epoch if it has one."""
        model = visit.model
        self._at[model] = visit.slot
        self.idle_slots.add(visit.slot)
        if not self._todo[model] and self._epochs_left[model]:
            self._epochs_left[model] -= 1
            self._todo[model] = self.problem.everything
        if self._todo[model]:
            self.idle_models.add(model)

    def _open(self, model: int) -> Partitions:
        """What a model may visit next."""
        return self._todo[model]

    def _rank(self, model: int) -> float:
        work = max(0.0, self._work[model])  # sums of what was taken away may end below
        visits: float = (work / self.problem.models[model].unit_s) ** self._visits_count
        return work * self._model_weights[model] * visits

    def _first(self, by_work: Sequence[int], slot: int, *, own: bool) -> Visit | None:
        place = self.problem.slots[slot]
        held = place.primary if own else place.replicas
        if not held:
            return None
        found: int | None = None
        for model in by_work:
            if model not in self.idle_models or not self._open(model) & held:
                continue
            if found is None:
                found = model
                if self._at[model] == slot:
                    break
            elif self._work[model] < self._work[found]:
                break
            elif self._at[model] == slot:
                found = model
                break
        if found is None:
            return None
        return Visit(found, self._busiest(self._open(found) & held), slot)

    def _busiest(self, some: Partitions) -> int:
        """Of several partitions the one whose primary slot has most to do."""
        homes = self._home
        return max(members(some), key=lambda p: (self._load[homes[p]] if p in homes else 0.0, -p))

    def _begin(self, visit: Visit) -> None:
        model, partition, slot = visit
        cost = self.problem.models[model].unit_s * self.problem.sizes[partition]
        self._todo[model] &= ~(1 << partition)
        self._work[model] -= cost
        home = self._home.get(partition)
        if home is not None:
            self._load[home] -= cost * self.problem.slots[home].slowness
        self.idle_models.discard(model)
        self.idle_slots.discard(slot)


class _SizesOfSets:
    """Sums of sizes of sets of partitions; most models have one of a few sets left."""

    def __init__(self, problem: HopProblem) -> None:
        self._sizes = problem.sizes
        self._known: dict[Partitions, float] = {}

    def of(self, some: Partitions) -> float:
        """Size of all of them together."""
        found = self._known.get(some)
        if found is None:
            found = self._known[some] = sum(self._sizes[p] for p in members(some))
        return found


def _unit_seconds(problem: HopProblem) -> list[float]:
    """Seconds of a unit of size 1, summed over all visits that a partition has left."""
    later = sum(model.unit_s * model.epochs_left for model in problem.models)
    now: dict[Partitions, float] = {}
    for model in problem.models:
        now[model.todo] = now.get(model.todo, 0.0) + model.unit_s
    found = [later] * len(problem.sizes)
    for some, unit_s in now.items():
        for p in members(some):
            found[p] += unit_s
    return found
