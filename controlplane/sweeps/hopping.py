"""What is left of a sweep: models, partitions, and the slots that hold them.

A sweep that goes on: what is left, who is idle, and the greedy choice of what comes next.

How quickly a sweep could end at best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Partitions = int  # a set of them: bit p stands for partition p


class Visit(NamedTuple):
    """A unit: a model trains once over a partition, on a slot that holds it."""

    model: int
    partition: int
    slot: int


@dataclass(frozen=True, slots=True)
class Model:
    """One configuration with the state that hops."""

    unit_s: float  # of a partition of size 1 on a slot of slowness 1, seconds, above 0
    todo: Partitions  # of its present epoch, with one that it visits now; empty: it waits
    epochs_left: int = 0  # that are granted after the present one
    at: int | None = None  # slot where its state is; None: nowhere yet


@dataclass(frozen=True, slots=True)
class Slot:
    """One worker, with the partitions that its node holds."""

    primary: Partitions  # its own; every partition has one slot that it is primary at
    replicas: Partitions = 0  # that it may also train from
    slowness: float = 1.0  # factor on the seconds of a unit, above 0


class Unit(NamedTuple):
    """A visit that goes on now."""

    visit: Visit
    ends_in_s: float  # as expected


@dataclass(frozen=True, slots=True)
class HopProblem:
    """Models that hop between partitions (Cerebro section 3: S, D and p; section 5.5: replicas).

    A model visits every partition once in an epoch, in any order; no two units of a model
    and no two units of a slot overlap; a unit is not interrupted.
    """

    models: Sequence[Model]
    slots: Sequence[Slot]
    sizes: Sequence[float]  # of the partitions, 1 on average
    running: Sequence[Unit] = ()

    @property
    def everything(self) -> Partitions:
        """The set of all partitions."""
        return (1 << len(self.sizes)) - 1

    def seconds(self, visit: Visit) -> float:
        """What the unit takes as far as known."""
        cost = self.models[visit.model].unit_s * self.sizes[visit.partition]
        return cost * self.slots[visit.slot].slowness


def members(some: Partitions) -> Iterator[int]:
    """The partitions of a set, ascending.

    Args:
        some: bit p stands for partition p.
    """
    while some:
        lowest = some & -some
        yield lowest.bit_length() - 1
        some ^= lowest


def partitions(some: Sequence[int]) -> Partitions:
    """The set of these partitions."""
    found = 0
    for partition in some:
        found |= 1 << partition
    return found


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


def makespan_bound(problem: HopProblem) -> float:
    """Seconds that no order of visits can beat.

    Where each partition is on one slot, this is the open-shop bound: the longest of what one
    model and of what one slot still has to do (Cerebro section 5.1). With replicas a unit may be on
    any slot that holds its partition: for a model the quickest of these counts, and all slots
    together share all work.

    Args:
        problem: what is left; units that run count with what is left of them.
    """
    slots, sizes = problem.slots, problem.sizes
    quickest = [
        min((s.slowness for s in slots if (s.primary | s.replicas) >> p & 1), default=0.0)
        for p in range(len(sizes))
    ]
    of_models = [0.0] * len(problem.models)
    work = 0.0  # seconds on a slot of slowness 1
    alone = [0.0] * len(slots)  # what can be done nowhere else, seconds
    only_at = _only_holders(problem)
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


def _only_holders(problem: HopProblem) -> dict[int, int]:
    """The slot of each partition that one slot alone holds."""
    holders: dict[int, list[int]] = {}
    for at, slot in enumerate(problem.slots):
        for p in members(slot.primary | slot.replicas):
            holders.setdefault(p, []).append(at)
    return {p: at[0] for p, at in holders.items() if len(at) == 1}
