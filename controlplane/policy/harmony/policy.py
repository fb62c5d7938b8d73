"""Policy `harmony`: gangs of fixed size, placed where jobs slow each other down least."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from controlplane.policy.api import (
    Budget,
    ClusterView,
    ImmediatePolicy,
    JobView,
    Oracle,
    Plan,
    PolicyEvent,
)
from controlplane.policy.options import HarmonyOptions
from controlplane.policy.placement.free_slots import with_user_batches
from controlplane.policy.placement.harmony_placer import (
    HarmonyPlacer,
    Layout,
    LayoutSearch,
    NeighbourCosts,
    Occupancy,
    SpeedShares,
    all_shares,
    gain_of,
)
from controlplane.policy.placement.sizes import BackfillQueue, backfill_queue
from controlplane.policy.placement.slot_partition import (
    Partition,
    compose_plan,
    gang_size,
    partition_of,
    slots_in_words,
    useful_slots,
)
from schemas.ids import JobId, NodeId, Seconds, SlotId, node_of

if TYPE_CHECKING:
    from numpy.random import Generator


MAX_CANDIDATES: Final = 6  # jobs that may migrate: those with the greatest loss, own and caused
MAX_PARTNERS: Final = 30  # jobs with which each candidate may exchange places
DEFAULT_START_S: Final = 20.0  # assumed duration of a start that was not measured
TOLERANCE: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Migration:
    """New layouts of one or two jobs, with the benefit of the change."""

    layouts: Mapping[JobId, Layout]
    gain: float  # gain in the sum of normalised speeds
    worth_s: float  # saved training seconds at full speed, minus the cost


class Migrations:
    """The search for the best migration of `jobs`, given a plan's occupancy and free slots."""

    def __init__(
        self,
        jobs: Mapping[JobId, JobView],
        occupancy: Occupancy,
        free: Mapping[NodeId, int],
        *,
        shares: SpeedShares,
        options: HarmonyOptions,
        now: Seconds,
    ) -> None:
        self._jobs, self._occupancy, self._free = jobs, occupancy, free
        self._shares, self._options, self._now = shares, options, now
        self._speeds = all_shares(occupancy, shares)

    def best(self) -> Migration | None:
        """Return the migration with the greatest benefit, or None if no migration pays."""
        if self._options.migrations == "none":
            return None
        settled = [
            name for name, job in self._jobs.items()
            if self._now - job.moved_at >= self._options.settle_s - TOLERANCE
        ]  # fmt: skip
        worst = sorted(settled, key=self._lost, reverse=True)[:MAX_CANDIDATES]
        found = [one for name in worst if self._lost(name) > self._options.margin
                 for one in self._of(name, settled)]  # fmt: skip
        return max(found, key=lambda one: one.worth_s, default=None)

    def _lost(self, name: JobId) -> float:
        """Return the gain in the sum of speeds if the job ran elsewhere, alone, at full speed."""
        return 1.0 + gain_of({name: {}}, self._occupancy, self._shares, self._speeds)

    def _of(self, name: JobId, partners: list[JobId]) -> Iterator[Migration]:
        if any(self._free.values()):
            yield from self._if_it_pays({name: self._elsewhere(name)})
        if self._options.migrations == "swap":
            mine = self._occupancy.nodes[name]
            apart = [one for one in partners if self._occupancy.nodes[one] != mine and one != name]
            for other in apart[:MAX_PARTNERS]:
                for trade in _trades(name, other, self._occupancy):
                    yield from self._if_it_pays(trade)

    def _elsewhere(self, name: JobId) -> Layout:
        before = self._occupancy.nodes[name]
        free = Counter(self._free) + Counter(before)
        self._occupancy.take(name)
        size = sum(before.values())
        layout = LayoutSearch(free, self._occupancy, self._shares).best(name, size)
        self._occupancy.put(name, before)
        return layout

    def _if_it_pays(self, layouts: dict[JobId, Layout]) -> Iterator[Migration]:
        if all(self._occupancy.nodes[name] == layout for name, layout in layouts.items()):
            return
        gain = gain_of(layouts, self._occupancy, self._shares, self._speeds)
        if gain <= self._options.margin:
            return
        lasts_s = min(self._remaining_s(self._jobs[name]) for name in layouts)
        worth_s = gain * lasts_s - self._cost_s(layouts)
        if worth_s > 0.0:
            yield Migration(layouts, gain, worth_s)

    def _cost_s(self, layouts: Mapping[JobId, Layout]) -> float:
        """Return the training seconds that moving costs; an exchange also pauses one job."""
        costs = [self._options.rescale_stall_s for _ in layouts]
        if len(layouts) > 1:
            starts = [self._jobs[name].start_s for name in layouts]
            costs.append(min(DEFAULT_START_S if one is None else one for one in starts))
        return sum(costs)

    def _remaining_s(self, job: JobView) -> float:
        """Return the remaining training seconds: as stated, else as long as the job has run."""
        if job.stop_samples is not None and job.samples_per_s > 0.0:
            return max(0.0, job.stop_samples - job.samples_done) / job.samples_per_s
        return job.ran_s + max(0.0, self._now - job.moved_at)


def _trades(one: JobId, other: JobId, occupancy: Occupancy) -> Iterator[dict[JobId, Layout]]:
    """Yield the new layouts for each way in which two jobs can exchange equally many workers."""
    own, theirs = occupancy.nodes[one], occupancy.nodes[other]
    for own_node, many in own.items():
        for their_node, as_many in theirs.items():
            if own_node != their_node:
                both = min(many, as_many)
                yield {
                    one: _moved(own, own_node, their_node, both),
                    other: _moved(theirs, their_node, own_node, both),
                }


def _moved(layout: Layout, start: NodeId, end: NodeId, many: int) -> dict[NodeId, int]:
    then = Counter(layout)
    then[start] -= many
    then[end] += many
    return {node: workers for node, workers in then.items() if workers > 0}


MAX_NAMED: Final = 3  # most neighbours in a sentence
MIN_NAMED_COST: Final = 0.005  # least cost that is named, as a share of the job's speed


@dataclass(frozen=True, slots=True)
class Explainer:
    """The reasons for the decisions of one plan."""

    partition: Partition
    queue: BackfillQueue
    occupancy: Occupancy  # occupancy in this plan
    present: Occupancy
    shares: SpeedShares
    migration: Migration | None
    dropped: Mapping[str, float]  # one implausible speed of each family that reported any

    def why(self, job: JobView, slots: int) -> tuple[str, dict[str, float]]:
        """Return the reason for a job's place, or for its wait, in words and numbers."""
        words, numbers = self._placed(job, slots) if slots else self._waits(job)
        if job.family in self.dropped:
            speed = self.dropped[job.family]
            words += f"; its family reported {speed:g} samples/s, which is implausible and ignored"
        return words, numbers

    def _placed(self, job: JobView, slots: int) -> tuple[str, dict[str, float]]:
        words, numbers = self._beside(job.job, self.occupancy)
        if job.job in self.queue.before:
            words += f"; it does not delay {self.queue.before[job.job]}"
        if len(job.running_on) > slots:
            words = f"it has moved, and {words}"
        moved = self.migration
        if moved is None or job.job not in moved.layouts:
            return words, numbers
        before, old = self._beside(job.job, self.present)
        others = [name for name in moved.layouts if name != job.job]
        trades = f"exchanges slots with {others[0]}: " if others else ""
        gained = f"expected: together, the jobs gain {moved.gain:.2f} of a job's speed"
        words = f"{trades}{words} (until now it {before}); {gained}"
        numbers["speed_share_before"] = old["speed_share"]
        numbers |= {"gain": moved.gain, "worth_s": moved.worth_s}
        return words, numbers

    def _waits(self, job: JobView) -> tuple[str, dict[str, float]]:
        needs, ahead = gang_size(job, self.partition), self.queue.ahead.get(job.job, 0)
        numbers = {"needs": float(needs), "left": float(self.queue.left), "ahead": float(ahead)}
        behind = f", behind {ahead} job{'s' * (ahead != 1)}" if ahead else ""
        return (
            f"needs {slots_in_words(needs)}, {slots_in_words(self.queue.left)} free{behind}",
            numbers,
        )

    def _beside(self, job: JobId, occupancy: Occupancy) -> tuple[str, dict[str, float]]:
        """Return words and numbers: the speed that a job keeps, and the cost of each neighbour."""
        share = self.shares.share(job, occupancy)
        costs = self._costs(job, occupancy, share)
        numbers = {
            "speed_share": share,
            **{f"cost_of_{name}": cost for name, cost in costs.items()},
        }
        if len(occupancy.nodes[job]) == 1 and not occupancy.neighbours(job):
            return "has its node to itself", numbers
        keeps = f"keeps {share:.0%} of its speed"
        named = [f"{name} costs it {cost:.0%}" for name, cost in costs.items()][:MAX_NAMED]
        return ": ".join([keeps, ", ".join(named)]) if named else keeps, numbers

    def _costs(self, job: JobId, occupancy: Occupancy, share: float) -> Mapping[JobId, float]:
        """Return the speed share that the job would gain without each neighbour, largest first."""
        costs: dict[JobId, float] = {}
        for other in occupancy.neighbours(job):
            layout = occupancy.nodes[other]
            occupancy.take(other)
            cost = self.shares.share(job, occupancy) - share
            occupancy.put(other, layout)
            if cost >= MIN_NAMED_COST:
                costs[other] = cost
        return dict(sorted(costs.items(), key=lambda entry: -entry[1]))


Place = tuple[JobId, frozenset[tuple[NodeId, int]]]
MAX_CACHED: Final = 50_000  # cached replies


class OracleShares:
    """`SpeedShares` from an oracle, for comparisons in a simulation; replies are cached."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._answers: dict[tuple[JobId, frozenset[Place]], float] = {}

    def share(self, job: JobId, occupancy: Occupancy) -> float:
        """Return the normalised speed of a job; see `SpeedShares`."""
        asked = (job, *occupancy.neighbours(job))
        key = (job, frozenset((one, frozenset(occupancy.nodes[one].items())) for one in asked))
        known = self._answers.get(key)
        if known is None:
            if len(self._answers) >= MAX_CACHED:
                self._answers.clear()
            on = {node: occupancy.on(node) for node in occupancy.nodes[job]}
            known = self._answers[key] = self._oracle.speed_share(job, occupancy.nodes, on)
        return known


class Harmony(ImmediatePolicy):
    """Policy that places gangs where the predicted sum of normalised speeds is largest.

    This sum is Harmony's reward. Jobs keep their size. The costs of neighbours are learnt from the
    speeds that jobs report; with `slowdowns = "oracle"` they come from `oracle`. Each plan moves at
    most one job, or exchanges two, if that pays. See the README of this folder.
    """

    def __init__(self, options: HarmonyOptions | None = None, oracle: Oracle | None = None) -> None:
        self.options = options or HarmonyOptions()
        self.costs = NeighbourCosts(self.options.prior, self.options.ridge, self.options.spread)
        told = oracle if self.options.slowdowns == "oracle" else None
        self._placer = HarmonyPlacer(None if told is None else OracleShares(told), self.costs)

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn the costs of neighbours from reported speeds."""
        self._placer.observe(event, now)

    def improve(self, view: ClusterView, budget: Budget, rng: Generator, now: Seconds) -> bool:
        """Record the places of jobs, to which telemetry refers; return False."""
        self._placer.reports.update(view, now)
        return False

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Return a plan that starts the next jobs and makes the move with the greatest gain."""
        partition = partition_of(view, now)
        queue = backfill_queue(partition, self._remaining_s, backfill=self.options.backfill)
        slots = self._placer.place(partition, queue.sizes)
        occupancy = _planned(view, slots)
        slots |= self._completed_moves(partition, occupancy)
        migration = self._migration(partition, slots, occupancy, waits=bool(queue.ahead))
        if migration is not None:
            slots |= _slots_of(migration.layouts, slots, partition.free)
            for name, layout in migration.layouts.items():
                occupancy.put(name, layout)
        explain = Explainer(
            partition, queue, occupancy, Occupancy.of(view), self._placer.shares, migration,
            self.costs.dropped,
        )  # fmt: skip
        return compose_plan(
            partition,
            with_user_batches(partition, slots),
            explain.why,
            wake_at=self._settled_at(partition),
        )

    def _completed_moves(
        self, partition: Partition, occupancy: Occupancy
    ) -> dict[JobId, list[SlotId]]:
        """Return the slots that half-moved jobs keep: the better one of their two places.

        To move, a job first grows to its old and new places and continues to train.
        """
        found: dict[JobId, list[SlotId]] = {}
        for job in partition.running:
            size = due_size(job, partition)
            if size < len(job.running_on):
                own = Counter(map(node_of, job.running_on))
                occupancy.take(job.job)
                layout = LayoutSearch(own, occupancy, self._placer.shares).best(job.job, size)
                occupancy.put(job.job, layout)
                found[job.job] = _first_slots(job.running_on, layout)
        return found

    def _migration(
        self,
        partition: Partition,
        slots: Mapping[JobId, Sequence[SlotId]],
        occupancy: Occupancy,
        *,
        waits: bool,
    ) -> Migration | None:
        jobs = {
            job.job: job
            for job in partition.running
            if len(job.running_on) == len(slots[job.job]) <= job.batch_limit // 2  # both places fit
        }
        # A moving job has both places for a while.
        free = {} if waits else {node: len(left) for node, left in partition.free.items()}
        shares, now = self._placer.shares, partition.now
        return Migrations(
            jobs, occupancy, free, shares=shares, options=self.options, now=now
        ).best()

    def _remaining_s(self, job: JobView, slots: int) -> float:
        """Return the seconds for the stated remaining work, or infinity if unknown."""
        if job.stop_samples is None:
            return math.inf
        speed = job.samples_per_s if job.running_on else 0.0
        if speed <= 0.0:
            step_s = self.costs.step_s(job.family, slots, max(1, round(job.batch_size / slots)))
            speed = job.batch_size / step_s if step_s else 0.0
        return max(0.0, job.stop_samples - job.samples_done) / speed if speed else math.inf

    def _settled_at(self, partition: Partition) -> Seconds | None:
        if self.options.migrations == "none":
            return None
        times = [job.moved_at + self.options.settle_s for job in partition.running]
        return min((Seconds(at) for at in times if at > partition.now), default=None)


def _planned(view: ClusterView, slots: Mapping[JobId, Sequence[SlotId]]) -> Occupancy:
    """Return the occupancy after this plan; jobs that cannot move stay as they are in the view."""
    occupancy = Occupancy.of(view)
    for name, placed in slots.items():
        occupancy.put(name, Counter(map(node_of, placed)))
    return occupancy


def due_size(job: JobView, partition: Partition) -> int:
    """Return the size of a gang, not including a second place that it has while moving."""
    return min(len(job.running_on), max(job.least, min(job.wanted, useful_slots(job, partition))))


def _first_slots(slots: Iterable[SlotId], layout: Layout) -> list[SlotId]:
    left = Counter(layout)
    found: list[SlotId] = []
    for slot in slots:
        if left[node_of(slot)]:
            left[node_of(slot)] -= 1
            found.append(slot)
    return found


def _slots_of(
    layouts: Mapping[JobId, Layout],
    slots: Mapping[JobId, Sequence[SlotId]],
    free: Mapping[NodeId, Sequence[SlotId]],
) -> dict[JobId, list[SlotId]]:
    """Return slots for these layouts: own slots first, then slots that are free or given up."""
    kept = {name: _first_slots(slots[name], layout) for name, layout in layouts.items()}
    spare = {node: list(left) for node, left in free.items()}
    for name, own in kept.items():
        for slot in slots[name]:
            if slot not in own:
                spare[node_of(slot)].append(slot)
    for name, layout in layouts.items():
        have = Counter(map(node_of, kept[name]))
        for node, many in layout.items():
            for _ in range(many - have[node]):
                kept[name].append(spare[node].pop(0))
    return kept
