"""`harmony`: gangs of fixed size, placed where jobs slow each other down least."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from controlplane.policy.api import Budget, ClusterView, JobView, Oracle, Plan, PolicyEvent
from controlplane.policy.harmony.explain import Explainer
from controlplane.policy.harmony.migrations import Migration, Migrations
from controlplane.policy.harmony.options import HarmonyOptions
from controlplane.policy.harmony.oracle_shares import OracleShares
from controlplane.policy.immediate_policy import ImmediatePolicy
from controlplane.policy.planning.arrival_line import line_of
from controlplane.policy.planning.interference.best_layout import LayoutSearch
from controlplane.policy.planning.interference.harmony_placer import HarmonyPlacer
from controlplane.policy.planning.interference.neighbour_costs import NeighbourCosts
from controlplane.policy.planning.interference.occupancy import Layout, Occupancy
from controlplane.policy.planning.slot_partition import (
    Partition,
    compose_plan,
    partition_of,
    useful_slots,
)
from controlplane.policy.planning.slot_placer import with_user_batches
from schemas.ids import JobId, NodeId, Seconds, SlotId, node_of

if TYPE_CHECKING:
    from numpy.random import Generator


class Harmony(ImmediatePolicy):
    """Places each gang where the predicted sum of normalised speeds is largest (Harmony's reward).

    Jobs keep their size. What neighbours cost is learnt from the speeds that jobs report; each plan
    moves at most one job, or trades two, if that pays. See the README of this room.
    """

    def __init__(self, options: HarmonyOptions | None = None, oracle: Oracle | None = None) -> None:
        """Begin with nothing learnt.

        Args:
            options: of its settings; None for the defaults.
            oracle: knows what neighbours cost, for `slowdowns = "oracle"`.
        """
        self.options = options or HarmonyOptions()
        self.costs = NeighbourCosts(self.options.prior, self.options.ridge, self.options.spread)
        knows = oracle is not None and self.options.slowdowns == "oracle"
        self._placer = HarmonyPlacer(OracleShares(oracle) if knows and oracle else None, self.costs)

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn what neighbours cost."""
        self._placer.observe(event, now)

    def improve(self, view: ClusterView, budget: Budget, rng: Generator, now: Seconds) -> bool:
        """Take note of who is where: telemetry is of that."""
        self._placer.reports.update(view, now)
        return False

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Start who is next, and move whoever gains most by it."""
        partition = partition_of(view, now)
        line = line_of(partition, self._remaining_s, backfill=self.options.backfill)
        slots = self._placer.place(partition, line.sizes)
        where = _planned(view, slots)
        slots |= self._arrived(partition, where)
        migration = self._migration(partition, slots, where, waits=bool(line.ahead))
        if migration is not None:
            slots |= _slots_of(migration.layouts, slots, partition.free)
        for name in migration.layouts if migration is not None else ():
            where.put(name, Counter(map(node_of, slots[name])))
        explain = Explainer(
            partition, line, where, Occupancy.of(view), self._placer.shares, migration,
            self.costs.dropped,
        )  # fmt: skip
        return compose_plan(
            partition,
            with_user_batches(partition, slots),
            explain.why,
            wake_at=self._settled_at(partition),
        )

    def _arrived(self, partition: Partition, where: Occupancy) -> dict[JobId, list[SlotId]]:
        """Jobs that have their old place and a new one give up the worse of both.

        A job that moves grows to both first, and trains on meanwhile; this is the second half.
        """
        found: dict[JobId, list[SlotId]] = {}
        for job in partition.running:
            size = due_size(job, partition)
            if size < len(job.running_on):
                own = Counter(map(node_of, job.running_on))
                where.take(job.job)
                layout = LayoutSearch(own, where, self._placer.shares).best(job.job, size)
                where.put(job.job, layout)
                found[job.job] = _first_slots(job.running_on, layout)
        return found

    def _migration(
        self,
        partition: Partition,
        slots: Mapping[JobId, Sequence[SlotId]],
        where: Occupancy,
        *,
        waits: bool,
    ) -> Migration | None:
        jobs = {
            job.job: job
            for job in partition.running
            if len(job.running_on) == len(slots[job.job]) <= job.batch_limit // 2  # in two places
        }
        free = {node: len(left) for node, left in partition.free.items()}
        if waits:  # a job that moves has both places for a while
            free = {}
        looked = Migrations(
            jobs, where, free, shares=self._placer.shares, options=self.options, now=partition.now
        )
        return looked.best()

    def _remaining_s(self, job: JobView, slots: int) -> float:
        """As stated; what waits is taken to be as fast as its relatives, if any were measured."""
        if job.stop_samples is None:
            return math.inf
        speed = job.samples_per_s if job.running_on else 0.0
        if speed <= 0.0:
            step_s = self.costs.step_s(job.family, slots, max(1, round(job.batch_size / slots)))
            speed = job.batch_size / step_s if step_s else 0.0
        return max(0.0, job.stop_samples - job.samples_done) / speed if speed else math.inf

    def _settled_at(self, partition: Partition) -> Seconds | None:
        """When the next job may be moved."""
        if self.options.migrations == "none":
            return None
        times = [job.moved_at + self.options.settle_s for job in partition.running]
        return min((Seconds(at) for at in times if at > partition.now), default=None)


def _planned(view: ClusterView, slots: Mapping[JobId, Sequence[SlotId]]) -> Occupancy:
    """Everybody where this plan puts them; who may not be moved, where the view shows them."""
    where = Occupancy.of(view)
    for name, placed in slots.items():
        where.put(name, Counter(map(node_of, placed)))
    return where


def due_size(job: JobView, partition: Partition) -> int:
    """Slots of a gang; while it moves, it has more."""
    return min(len(job.running_on), max(job.least, min(job.wanted, useful_slots(job, partition))))


def _first_slots(slots: Iterable[SlotId], layout: Layout) -> list[SlotId]:
    """As many of the slots of each node as it says."""
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
    """Slots for layouts: its own first, then what is free or given up by the others of these."""
    kept: dict[JobId, list[SlotId]] = {}
    rooms = {node: list(left) for node, left in free.items()}
    for name, layout in layouts.items():
        left = Counter(layout)
        kept[name] = []
        for slot in slots[name]:
            node = node_of(slot)
            if left[node]:
                left[node] -= 1
                kept[name].append(slot)
            else:
                rooms[node].append(slot)
    for name, layout in layouts.items():
        have = Counter(map(node_of, kept[name]))
        for node, many in layout.items():
            for _ in range(many - have[node]):
                kept[name].append(rooms[node].pop(0))
    return kept
