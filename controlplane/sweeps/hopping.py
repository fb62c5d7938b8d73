"""Model hopping as a scheduling problem, with a greedy order and a lower bound of any order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from typing import NamedTuple

Partitions = int  # set of partitions: bit p stands for partition p


class Visit(NamedTuple):
    """Unit of work: a model trains once over a partition, on a slot that holds the partition."""

    model: int
    partition: int
    slot: int


@dataclass(frozen=True, slots=True)
class Model:
    """A model that hops between partitions, with its remaining work."""

    unit_s: float  # seconds for a partition of size 1 at slowness 1, above 0
    todo: Partitions  # left in this epoch, including a running visit; empty: the model waits
    epochs_left: int = 0  # granted epochs after the current one
    at: int | None = None  # slot that has the state; None: no state yet


@dataclass(frozen=True, slots=True)
class Slot:
    """Slot of a worker, with the partitions that the worker's node holds."""

    primary: Partitions  # each partition is primary on one slot
    replicas: Partitions = 0  # other partitions on the node of the slot
    slowness: float = 1.0  # factor on the seconds of a unit, above 0


class Unit(NamedTuple):
    """Running visit."""

    visit: Visit
    ends_in_s: float  # expected seconds until the end


@dataclass(frozen=True, slots=True)
class HopProblem:
    """Models that hop between partitions (Cerebro section 3: S, D and p; section 5.5: replicas).

    A model visits every partition once per epoch, in any order. Two units of a model never overlap,
    and two units of a slot never overlap. A unit is not interrupted.
    """

    models: Sequence[Model]
    slots: Sequence[Slot]
    sizes: Sequence[float]  # sizes of the partitions, 1 on average
    running: Sequence[Unit] = ()

    @property
    def everything(self) -> Partitions:
        """Set of all partitions."""
        return (1 << len(self.sizes)) - 1

    def seconds(self, visit: Visit) -> float:
        """Return the expected seconds of a unit."""
        cost = self.models[visit.model].unit_s * self.sizes[visit.partition]
        return cost * self.slots[visit.slot].slowness


def members(some: Partitions) -> Iterator[int]:
    """Yield the partitions of a set in ascending order; bit p stands for partition p."""
    while some:
        lowest = some & -some
        yield lowest.bit_length() - 1
        some ^= lowest


def partitions(some: Sequence[int]) -> Partitions:
    """Return the set of the partitions in `some`."""
    return reduce(or_, (1 << partition for partition in some), 0)


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of models and slots. The remaining work of each is multiplied by its weight."""

    models: Sequence[float]  # shape (models,), above 0
    slots: Sequence[float]  # shape (slots,), above 0
    visit_exponent: float = 0.0  # a further factor is the number of remaining visits to this power


class GreedyOrder:
    """Greedy order of visits; the remaining work is updated when units begin and end."""

    def __init__(self, problem: HopProblem, weights: Weights | None = None) -> None:
        """Start from the state of `problem`, in which the units of `problem.running` have begun."""
        self.problem = problem
        models, slots = problem.models, problem.slots
        self._weights = weights or Weights([1.0] * len(models), [1.0] * len(slots))
        self._home = {p: at for at, slot in enumerate(slots) for p in members(slot.primary)}
        self._todo = [model.todo for model in models]
        self._epochs_left = [model.epochs_left for model in models]
        self._at = [model.at for model in models]

        @cache  # many models have the same set of remaining partitions
        def size(some: Partitions) -> float:
            return sum(problem.sizes[p] for p in members(some))

        whole = size(problem.everything)
        self._remaining = [  # by model, seconds on a slot of slowness 1
            m.unit_s * (m.epochs_left * whole + size(m.todo)) for m in models
        ]
        self._load = [0.0] * len(slots)  # seconds of work on the primary partitions
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
        """True if no unit is left to begin."""
        return not any(self._todo)

    def begin_units(self) -> list[Visit]:
        """Begin units: the most loaded idle slot takes the idle model with most work left.

        A slot serves replicas only if no idle model has to visit one of its primary partitions.
        Among equal models, a model with its state on the slot is preferred.
        """
        begun: list[Visit] = []
        if not self.idle_models:
            return begun
        by_work = sorted(self.idle_models, key=lambda m: (-self._rank(m), m))
        slots = self._weights.slots
        by_load = sorted(self.idle_slots, key=lambda s: (-self._load[s] * slots[s], s))
        for own in (True, False):
            for slot in by_load:
                if slot in self.idle_slots:
                    visit = self._first_visit(by_work, slot, own=own)
                    if visit is not None:
                        self._begin(visit)
                        begun.append(visit)
        return begun

    def end(self, visit: Visit) -> None:
        """End a unit; after the last unit of an epoch, start the model's next granted epoch."""
        model = visit.model
        self._at[model] = visit.slot
        self.idle_slots.add(visit.slot)
        if not self._todo[model] and self._epochs_left[model]:
            self._epochs_left[model] -= 1
            self._todo[model] = self.problem.everything
        if self._todo[model]:
            self.idle_models.add(model)

    def _open(self, model: int) -> Partitions:
        return self._todo[model]

    def _rank(self, model: int) -> float:
        work = max(0.0, self._remaining[model])  # rounding errors can make it negative
        visits: float = (work / self.problem.models[model].unit_s) ** self._weights.visit_exponent
        return work * self._weights.models[model] * visits

    def _first_visit(self, by_work: Sequence[int], slot: int, *, own: bool) -> Visit | None:
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
            elif self._remaining[model] < self._remaining[found]:
                break
            elif self._at[model] == slot:
                found = model
                break
        if found is None:
            return None
        return Visit(found, self._busiest(self._open(found) & held), slot)

    def _busiest(self, some: Partitions) -> int:
        """Return the partition in `some` with the most work left on its primary slot."""
        homes = self._home
        return max(members(some), key=lambda p: (self._load[homes[p]] if p in homes else 0.0, -p))

    def _begin(self, visit: Visit) -> None:
        model, partition, slot = visit
        cost = self.problem.models[model].unit_s * self.problem.sizes[partition]
        self._todo[model] &= ~(1 << partition)
        self._remaining[model] -= cost
        home = self._home.get(partition)
        if home is not None:
            self._load[home] -= cost * self.problem.slots[home].slowness
        self.idle_models.discard(model)
        self.idle_slots.discard(slot)


def _unit_seconds(problem: HopProblem) -> list[float]:
    """Return, for each partition, the total seconds of its remaining visits if its size were 1."""
    later = sum(model.unit_s * model.epochs_left for model in problem.models)
    now: defaultdict[Partitions, float] = defaultdict(float)
    for model in problem.models:
        now[model.todo] += model.unit_s
    found = [later] * len(problem.sizes)
    for some, unit_s in now.items():
        for p in members(some):
            found[p] += unit_s
    return found


def makespan_bound(problem: HopProblem) -> float:
    """Return a lower bound in seconds on the makespan of any order of visits.

    If each partition is on one slot, the result is the open-shop bound: the longest remaining work
    of a model or a slot (Cerebro section 5.1). With replicas, the work of a model counts on the
    fastest slots that hold its partitions, and all slots share the total work.
    """
    slots, sizes = problem.slots, problem.sizes
    holders = [
        [at for at, slot in enumerate(slots) if (slot.primary | slot.replicas) >> p & 1]
        for p in range(len(sizes))
    ]
    quickest = [min((slots[at].slowness for at in some), default=0.0) for some in holders]
    of_models = [0.0] * len(problem.models)
    work = 0.0  # seconds on a slot of slowness 1
    alone = [0.0] * len(slots)  # work that only this slot can do, seconds
    only_at = {p: some[0] for p, some in enumerate(holders) if len(some) == 1}
    running = {(unit.visit.model, unit.visit.partition) for unit in problem.running}
    for at, model in enumerate(problem.models):
        for p, size in enumerate(sizes):
            visits = model.epochs_left + (model.todo >> p & 1) - ((at, p) in running)
            seconds = visits * model.unit_s * size
            of_models[at] += seconds * quickest[p]
            work += seconds
            if p in only_at:
                alone[only_at[p]] += seconds * slots[only_at[p]].slowness
    shared = 0.0
    for unit in problem.running:
        of_models[unit.visit.model] += unit.ends_in_s
        alone[unit.visit.slot] += unit.ends_in_s
        shared += unit.ends_in_s / slots[unit.visit.slot].slowness
    together = (work + shared) / sum(1.0 / slot.slowness for slot in slots) if slots else 0.0
    return max([together, *of_models, *alone])
