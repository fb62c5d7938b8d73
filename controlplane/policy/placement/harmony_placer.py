"""The placer `harmony`, which puts a gang where interference costs the least speed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol, cast

from controlplane.policy.api import ClusterView, EpochSeen, JobView, PolicyEvent, StepsSeen
from controlplane.policy.placement.free_slots import Moves, Placer, by_node
from controlplane.policy.placement.slot_partition import Partition
from controlplane.prediction.slowdowns import Observation, Parts, separate
from controlplane.prediction.step_times import StepTimes
from schemas.ids import JobId, NodeId, Seconds, SlotId, node_of
from schemas.wire.client import NodeCrowd

Layout = Mapping[NodeId, int]  # workers of a job on each of its nodes, at least 1


class Occupancy:
    """Workers of jobs on nodes, in the present or in a possible placement."""

    def __init__(self, families: Mapping[JobId, str]) -> None:
        self.families = families
        self.nodes: dict[JobId, Layout] = {}  # layout of each job with workers
        self.jobs: dict[NodeId, dict[JobId, int]] = {}  # node -> job -> workers

    @classmethod
    def of(cls, view: ClusterView) -> Occupancy:
        """Return the occupancy of a view; a changing job is at its target."""
        found = cls({name: job.family for name, job in view.jobs.items()})
        for name, job in view.jobs.items():
            if job.running_on:
                found.put(name, Counter(map(node_of, job.running_on)))
        return found

    def put(self, job: JobId, layout: Layout) -> None:
        """Set the workers of a job; an empty layout removes the job."""
        self.take(job)
        if layout:
            self.nodes[job] = layout
        for node, workers in layout.items():
            self.jobs.setdefault(node, {})[job] = workers

    def take(self, job: JobId) -> None:
        """Remove the workers of a job, if any."""
        for node in self.nodes.pop(job, {}):
            del self.jobs[node][job]

    def on(self, node: NodeId) -> Mapping[JobId, int]:
        """Return the jobs on a node with their number of workers there."""
        return self.jobs.get(node, {})

    def neighbours(self, job: JobId) -> list[JobId]:
        """Return the other jobs that share a node with this job, each once."""
        names = dict.fromkeys(name for node in self.nodes.get(job, ()) for name in self.on(node))
        return [name for name in names if name != job]


ITERATIONS: Final = 2  # iterations of choosing the worst node by the current costs
MAX_PLACEMENTS: Final = 300  # kept placements of a family; bounds the time of a fit
DRIFT: Final = 0.03  # relative change of a mean that triggers a new fit
MIN_STEP_S, MAX_STEP_S = 1e-6, 1e7  # plausible range of a step
NOISE_LOG: Final = 0.03  # logarithm; smaller costs are noise
ODD_LOG: Final = 3.0  # logarithm; no neighbour explains a larger distance from the mean
AGREE_LOG: Final = 0.7  # logarithm; two odd values this close together are accepted
NO_PARTS: Final = Parts({}, {}, {})


class OwnWorkers(Enum):
    """Ways in which a job's own workers cost it speed."""

    BESIDE = "beside"  # another worker of the job on the same node
    SPREAD = "spread"  # being on several nodes


NeighbourClass = str | OwnWorkers  # family of a neighbour, or the job's own workers
Place = tuple[int, int, str, tuple[NodeCrowd, ...]]  # slots, local batch, GPU type; nodes, sorted


@dataclass(slots=True)
class _Family:
    """The step times of jobs with one script and model."""

    steps: StepTimes[Place] = field(default_factory=lambda: StepTimes(MAX_PLACEMENTS))
    odd: dict[Place, float] = field(default_factory=dict)  # last rejected log step
    parts: Parts = NO_PARTS


class NeighbourCosts:
    """Theta in log(step / step alone) = max over nodes of sum theta[family, neighbour] + spread.

    The sum is over the other jobs on a node, and over the job's own further workers there. Theta,
    which is not negative, comes from a ridge regression for each family (`prediction/slowdowns`).
    The regression also yields the step times alone, which are not reported. Harmony (Bao et al.,
    INFOCOM '19, "Reward model training") learns a network for the same purpose. An unmeasured pair
    uses the mean of other pairs with the same neighbour or the same family. Without such pairs,
    `prior` is used.

    Args:
        prior: share of its speed that a job loses by a neighbour, in [0, 1), before measurements.
        ridge: weight of the prior, as a number of measurements; above 0.
        spread: prior share of its speed that a job loses by being on several nodes.
    """

    def __init__(self, prior: float, ridge: float, spread: float) -> None:
        self._prior = -math.log1p(-prior)
        self._ridge = ridge
        self._spread = -math.log1p(-spread)
        self._families: dict[str, _Family] = {}
        self._stale: dict[str, None] = {}  # families with new measurements
        self._hurts: dict[
            NeighbourClass, list[float]
        ] = {}  # measured costs of each neighbour to others
        self._costs: dict[tuple[str, NeighbourClass], float] = {}  # cache since the last fit
        self.dropped: dict[str, float] = {}  # first implausible speed of each family

    # --- learning

    def add(self, family: str, place: Place, batch: int, samples_per_s: float) -> None:
        """Add a measured speed with a global batch; drop an implausible speed."""
        known = self._families.setdefault(family, _Family())
        step_s = batch / samples_per_s if samples_per_s else math.inf
        if not MIN_STEP_S <= step_s <= MAX_STEP_S or self._is_odd(known, place, step_s):
            self.dropped.setdefault(family, samples_per_s)
            return
        mean = known.steps.means.get(place)
        known.steps.add(place, step_s)
        if mean is None or abs(mean.step_s / mean.fitted - 1.0) > DRIFT:
            self._stale[family] = None

    def _is_odd(self, known: _Family, place: Place, step_s: float) -> bool:
        """True if the step time is far from the mean at this place and from the last odd value."""
        mean = known.steps.means.get(place)
        if mean is None or abs(math.log(step_s / mean.step_s)) <= ODD_LOG:
            return False
        before = known.odd.get(place)
        if before is not None and abs(math.log(step_s) - before) <= AGREE_LOG:
            del known.steps.means[place], known.odd[place]
            return False
        known.odd[place] = math.log(step_s)
        return True

    # --- predictions

    def cost(self, family: str, other: NeighbourClass) -> float:
        """Return theta, the logarithm of the factor on a step time; at least 0."""
        if self._stale:
            self._fit_stale()
        found = self._costs.get((family, other))
        if found is None:
            found = self._parts(family).colocations.get(other)
            found = self._prior_cost(family, other) if found is None else found
            found = 0.0 if found < NOISE_LOG else found
            self._costs[family, other] = found
        return found

    def share(self, job: JobId, occupancy: Occupancy) -> float:
        """Return the normalised speed of a job; see `SpeedShares`."""
        families, nodes, worst = occupancy.families, occupancy.nodes[job], 0.0
        mine = families[job]
        for node, workers in nodes.items():
            total = (workers - 1) * self.cost(mine, OwnWorkers.BESIDE) if workers > 1 else 0.0
            for other in occupancy.jobs[node]:
                if other != job:
                    total += self.cost(mine, families[other])
            worst = max(worst, total)
        return math.exp(-worst - (self.cost(mine, OwnWorkers.SPREAD) if len(nodes) > 1 else 0.0))

    def step_s(self, family: str, slots: int, local_batch: int) -> float | None:
        """Return the seconds of a step without neighbours, on one node, or None if not measured."""
        self._fit_stale()
        base = self._parts(family).base.get((slots, local_batch))
        return None if base is None else math.exp(base)

    # --- the model

    def _parts(self, family: str) -> Parts:
        known = self._families.get(family)
        return NO_PARTS if known is None else known.parts

    def _prior_cost(self, family: str, other: NeighbourClass) -> float:
        if isinstance(other, OwnWorkers):
            return self._mean(
                self._hurts.get(other, ()), self._spread * (other is OwnWorkers.SPREAD)
            )
        mine = self._parts(family).colocations
        suffers = [cost for one, cost in mine.items() if not isinstance(one, OwnWorkers)]
        hurts = self._hurts.get(other, ())
        return (self._mean(suffers, self._prior) + self._mean(hurts, self._prior)) / 2.0

    @staticmethod
    def _mean(seen: Iterable[float], prior: float) -> float:
        found = [prior, *seen]
        return sum(found) / len(found)

    def _fit_stale(self) -> None:
        for family in self._stale:
            known = self._families[family]
            for _ in range(ITERATIONS):
                known.parts = self._fit(family, known)
            known.steps.mark_fitted()
        self._stale, self._costs, self._hurts = {}, {}, {}
        for known in self._families.values():
            for one, cost in known.parts.colocations.items():
                self._hurts.setdefault(one, []).append(cost)

    def _fit(self, family: str, known: _Family) -> Parts:
        seen = [
            Observation(
                place[:2], place[2], self._worst_node_classes(family, place[3]),
                math.log(mean.step_s), mean.weight,
            )
            for place, mean in known.steps.means.items()
        ]  # fmt: skip
        classes = dict.fromkeys(one for each in seen for one in each.beside)
        believed = {one: self._prior_cost(family, cast("NeighbourClass", one)) for one in classes}
        return separate(seen, {}, believed, self._ridge)

    def _worst_node_classes(
        self, family: str, nodes: tuple[NodeCrowd, ...]
    ) -> tuple[NeighbourClass, ...]:
        """Return the classes on the node that costs the job most by the current estimates."""
        known = self._families[family].parts.colocations

        def cost(crowd: NodeCrowd) -> float:
            return sum(known.get(one, self._prior) for one in _classes(crowd))

        worst = max(nodes, key=cost, default=(1, ()))
        return (*_classes(worst), *([OwnWorkers.SPREAD] if len(nodes) > 1 else []))


def crowds_of(job: JobId, occupancy: Occupancy) -> tuple[NodeCrowd, ...]:
    """Return, for each node of a job, its workers and the families of other jobs there; sorted."""
    families = occupancy.families
    return tuple(sorted(
        (workers, tuple(sorted(families[other] for other in occupancy.on(node) if other != job)))
        for node, workers in occupancy.nodes[job].items()
    ))  # fmt: skip


def _classes(crowd: NodeCrowd) -> tuple[NeighbourClass, ...]:
    own, others = crowd
    return (*others, *([OwnWorkers.BESIDE] * (own - 1)))


class SpeedShares(Protocol):
    """Source of normalised speeds: a job's speed as a share of its speed alone on few nodes."""

    def share(self, job: JobId, occupancy: Occupancy) -> float:
        """Return the normalised speed of a job, in (0, 1]."""
        ...


def all_shares(occupancy: Occupancy, shares: SpeedShares) -> dict[JobId, float]:
    """Return the normalised speeds of all jobs; their sum rates a placement (Harmony's reward)."""
    return {job: shares.share(job, occupancy) for job in occupancy.nodes}


def gain_of(
    changes: Mapping[JobId, Layout],
    occupancy: Occupancy,
    shares: SpeedShares,
    now: Mapping[JobId, float] | None = None,
) -> float:
    """Return the change in the sum of normalised speeds if some jobs get other layouts.

    `occupancy` is unchanged afterwards. `now` are the present normalised speeds, if known.
    """
    before = {job: occupancy.nodes.get(job, {}) for job in changes}
    concerned = _with_neighbours(changes, occupancy)
    for job, layout in changes.items():
        occupancy.put(job, layout)
    concerned |= _with_neighbours(changes, occupancy)
    then = sum(shares.share(job, occupancy) for job in concerned if job in occupancy.nodes)
    for job, layout in before.items():
        occupancy.put(job, layout)
    placed = [job for job in concerned if job in occupancy.nodes]
    return then - sum(shares.share(job, occupancy) if now is None else now[job] for job in placed)


def _with_neighbours(jobs: Iterable[JobId], occupancy: Occupancy) -> dict[JobId, None]:
    found = dict.fromkeys(jobs)
    for job in list(found):
        found |= dict.fromkeys(occupancy.neighbours(job))
    return found


MAX_FIRST_NODES: Final = 6  # starting nodes of the search, the best ones for a single worker
DIGITS: Final = 6  # digits of normalised speeds, so that equal layouts tie


class LayoutSearch:
    """Greedy search for the layout with the largest sum of normalised speeds.

    Ties are won by few and well-filled nodes. Workers are added one by one, starting from each of a
    few first nodes: once with one worker there, and once with as many as fit. `occupancy` is
    unchanged afterwards.
    """

    def __init__(
        self, free: Mapping[NodeId, int], occupancy: Occupancy, shares: SpeedShares
    ) -> None:
        self._free = {node: room for node, room in free.items() if room}
        self._occupancy, self._shares = occupancy, shares

    def best(self, job: JobId, size: int, own: Layout | None = None) -> Layout:
        """Return the best layout found for `size` workers, of which `own` stay in place."""
        kept = Counter(own or {})
        need = size - kept.total()
        if need <= 0:
            return dict(kept)
        nodes = self._distinct(kept)
        worth = {node: self._worth(job, kept + Counter({node: 1})) for node in nodes}
        first = sorted(nodes, key=lambda node: (-worth[node], self._free[node]))[:MAX_FIRST_NODES]
        layouts = [
            self._filled(job, size, kept + Counter({node: many}), kept, first)
            for node in first
            for many in sorted({1, min(self._free[node], need)})
        ]
        best = min(layouts, key=lambda one: (-self._worth(job, one), *self._spare(one)))
        return dict(best)

    def _filled(
        self, job: JobId, size: int, layout: Counter[NodeId], kept: Counter[NodeId],
        first: list[NodeId],
    ) -> Counter[NodeId]:  # fmt: skip
        """Return `layout` with workers added one by one, each on the node where it costs least."""
        while layout.total() < size:
            open_ = [n for n, room in self._free.items() if room > layout[n] - kept[n]]
            near = [node for node in open_ if node in first or layout[node]]
            grown = [layout + Counter({node: 1}) for node in near or open_[:MAX_FIRST_NODES]]
            layout = min(grown, key=lambda one: (-self._worth(job, one), *self._spare(one)))
        return layout

    def _spare(self, layout: Layout) -> tuple[int, int]:
        return len(layout), sum(self._free.get(node, 0) for node in layout)

    def _distinct(self, kept: Layout) -> list[NodeId]:
        """Return the nodes to try, with no more equal empty nodes than could be needed."""
        found: list[NodeId] = []
        empty: Counter[int] = Counter()
        for node, room in self._free.items():
            if not self._occupancy.on(node) and node not in kept:
                empty[room] += 1
                if empty[room] > MAX_FIRST_NODES:
                    continue
            found.append(node)
        return found

    def _worth(self, job: JobId, layout: Layout) -> float:
        return round(gain_of({job: dict(layout)}, self._occupancy, self._shares), DIGITS)


SETTLED_S: Final = 4.0  # wait after a change of neighbours: two windows of a worker's speed


class ReportedSpeeds:
    """Learner of neighbour costs from telemetry, and from epochs with constant neighbours."""

    def __init__(self, costs: NeighbourCosts) -> None:
        self._costs = costs
        self._types: dict[SlotId, str] = {}
        self._view: ClusterView | None = None
        self._places: dict[JobId, tuple[Place, Seconds]] = {}  # of training jobs: place, since when
        self._groups: dict[JobId, int] = {}  # group version of the last telemetry

    def update(self, view: ClusterView, now: Seconds) -> None:
        """Read the current placement of each job from the view."""
        if view is self._view:
            return
        if self._view is None or view.slots is not self._view.slots:
            self._types = {slot.slot: slot.model for slot in view.slots}
        self._view = view
        occupancy, before = Occupancy.of(view), self._places
        self._places = {}
        for name, job in view.jobs.items():
            near = (view.jobs[one] for one in occupancy.neighbours(name))
            if job.running_on and all(one.movable for one in (job, *near)):
                place = self._place(job, occupancy)
                same = before.get(name, (None, now))
                self._places[name] = (place, same[1] if same[0] == place else now)
        self._groups = {name: at for name, at in self._groups.items() if name in view.jobs}

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn from a reported speed if the job is still where the speed was measured."""
        match event:
            case StepsSeen():
                again = self._groups.get(event.job) == event.group
                self._groups[event.job] = event.group
                place, since = self._places.get(event.job, (None, now))
                steady = place is not None and place[0] == event.slots and now - since >= SETTLED_S
                # A first report may be of a forming group.
                if again and event.samples_per_s and steady and place is not None:
                    self._costs.add(event.family, place, event.global_batch, event.samples_per_s)
            case EpochSeen(beside=beside) if beside is not None and event.whole and event.slots:
                local = max(1, round(event.global_batch / event.slots))
                place = (event.slots, local, "", beside)
                self._costs.add(event.family, place, event.global_batch, event.samples_per_s)

    def _place(self, job: JobView, occupancy: Occupancy) -> Place:
        slots = len(job.running_on)
        local = max(1, round(sum(job.running_on.values()) / slots))
        models = sorted({self._types.get(slot, "") for slot in job.running_on})
        return slots, local, "+".join(models), crowds_of(job.job, occupancy)


PRIOR: Final = 0.3  # prior share of its speed that a job loses by a neighbour
RIDGE: Final = 0.5  # weight of the prior, in measurements
SPREAD: Final = 0.1  # prior share that a job loses by being on several nodes


class HarmonyPlacer(Placer):
    """Placer that puts new workers where the least speed is lost, by `shares` or learnt costs."""

    def __init__(
        self,
        shares: SpeedShares | None = None,
        costs: NeighbourCosts | None = None,
        moves: Moves = "elastic",
    ) -> None:
        super().__init__(moves=moves)
        self.costs = costs or NeighbourCosts(PRIOR, RIDGE, SPREAD)
        self.shares: SpeedShares = self.costs if shares is None else shares
        self.reports = ReportedSpeeds(self.costs)

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn from reported speeds."""
        self.reports.observe(event, now)

    def free_slots(
        self, partition: Partition, placed: Mapping[JobId, Sequence[SlotId]]
    ) -> InterferenceFreeSlots:
        """Return the free slots, which are assigned by interference with the placed jobs."""
        self.reports.update(partition.view, partition.now)
        return InterferenceFreeSlots(partition, placed, self.shares)


class InterferenceFreeSlots:
    """The free slots by node, and the workers of all jobs placed so far."""

    def __init__(
        self, partition: Partition, placed: Mapping[JobId, Sequence[SlotId]], shares: SpeedShares
    ) -> None:
        self._free = partition.free  # reduced as slots are assigned
        self._shares = shares
        self._occupancy = Occupancy.of(partition.view)
        for job in partition.running:
            self._occupancy.put(job.job, Counter(map(node_of, placed.get(job.job, ()))))

    def grow(self, job: JobView, own: list[SlotId], size: int) -> list[SlotId]:
        """Return `own` and the slots that make the sum of normalised speeds largest."""
        return self._take(job, own, self._best(job, size, Counter(map(node_of, own))))

    def pack(self, job: JobView, own: list[SlotId], size: int) -> list[SlotId]:
        """Return the slots that make the sum of normalised speeds largest, the job's own first."""
        mine = set(own)
        for slots in self._free.values():
            slots.sort(key=lambda slot: slot not in mine)
        return self._take(job, [], self._best(job, size, {}))

    def claim(self, job: JobView, slots: Sequence[SlotId]) -> None:
        """Remove exactly these free slots."""
        for slot in slots:
            self._free[node_of(slot)].remove(slot)
        layout = Counter(self._occupancy.nodes.get(job.job, {}))
        self._occupancy.put(job.job, layout + Counter(map(node_of, slots)))

    def _best(self, job: JobView, size: int, own: Layout) -> Layout:
        free: Mapping[NodeId, int] = {node: len(slots) for node, slots in self._free.items()}
        self._occupancy.take(job.job)
        return LayoutSearch(free, self._occupancy, self._shares).best(job.job, size, own)

    def _take(self, job: JobView, own: list[SlotId], layout: Layout) -> list[SlotId]:
        taken, have = list(own), Counter(map(node_of, own))
        for node, many in layout.items():
            more = many - have[node]
            taken += self._free[node][:more]
            del self._free[node][:more]
        self._occupancy.put(job.job, layout)
        return by_node(taken)
