"""The placer `harmony`: where jobs lose least by each other, as far as was learnt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from controlplane.policy.api import JobView, PolicyEvent
from controlplane.policy.planning.interference.best_layout import LayoutSearch
from controlplane.policy.planning.interference.neighbour_costs import NeighbourCosts
from controlplane.policy.planning.interference.occupancy import Layout, Occupancy
from controlplane.policy.planning.interference.reported_speeds import ReportedSpeeds
from controlplane.policy.planning.interference.speed_shares import SpeedShares
from controlplane.policy.planning.node_rooms import by_node
from controlplane.policy.planning.slot_partition import Partition
from controlplane.policy.planning.slot_placer import Moves, Placer
from schemas.ids import JobId, NodeId, Seconds, SlotId, node_of

PRIOR: Final = (
    0.3  # of its speed that a job is believed to lose by a neighbour, before anything is known
)
RIDGE: Final = 0.5  # measurements that this belief weighs
SPREAD: Final = 0.1  # the same, for being on several nodes


class HarmonyPlacer(Placer):
    """Moves as little as any placer; starts and growths go where the least speed is lost.

    Args:
        shares: who knows what neighbours cost; None: it is learnt from reported speeds.
        costs: that learn; None: new ones.
    """

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

    def rooms(
        self, partition: Partition, placed: Mapping[JobId, Sequence[SlotId]]
    ) -> InterferenceRooms:
        """What is free, and who is where."""
        self.reports.update(partition.view, partition.now)
        return InterferenceRooms(partition, placed, self.shares)


class InterferenceRooms:
    """Free slots by node, beside the workers of everybody who was placed by now."""

    def __init__(
        self,
        partition: Partition,
        placed: Mapping[JobId, Sequence[SlotId]],
        shares: SpeedShares,
    ) -> None:
        """Begin before the first start.

        Args:
            partition: with the slots that jobs gave up.
            placed: slots of those `running` jobs that keep some; others that run stay.
        """
        self._free = partition.free  # used up
        self._shares = shares
        self._where = Occupancy.of(partition.view)
        for job in partition.running:
            self._where.put(job.job, Counter(map(node_of, placed.get(job.job, ()))))

    def start(self, job: JobView, size: int) -> list[SlotId]:
        """Where the sum of normalised speeds is largest."""
        return self._take(job, [], self._best(job, size, {}))

    def grow(self, job: JobView, own: list[SlotId], size: int) -> list[SlotId]:
        """`own`, and where the sum of normalised speeds is largest."""
        return self._take(job, own, self._best(job, size, Counter(map(node_of, own))))

    def pack(self, job: JobView, own: list[SlotId], size: int) -> list[SlotId]:
        """Where the sum of normalised speeds is largest; its own slots there first."""
        mine = set(own)
        for slots in self._free.values():
            slots.sort(key=lambda slot: slot not in mine)
        return self._take(job, [], self._best(job, size, {}))

    def claim(self, job: JobView, slots: Sequence[SlotId]) -> bool:
        """Take exactly these, or nothing."""
        if any(slot not in self._free.get(node_of(slot), ()) for slot in slots):
            return False
        for slot in slots:
            self._free[node_of(slot)].remove(slot)
        layout = Counter(self._where.nodes.get(job.job, {}))
        self._where.put(job.job, layout + Counter(map(node_of, slots)))
        return True

    def _best(self, job: JobView, size: int, own: Layout) -> Layout:
        free: Mapping[NodeId, int] = {node: len(slots) for node, slots in self._free.items()}
        self._where.take(job.job)
        return LayoutSearch(free, self._where, self._shares).best(job.job, size, own)

    def _take(self, job: JobView, own: list[SlotId], layout: Layout) -> list[SlotId]:
        taken, have = list(own), Counter(map(node_of, own))
        for node, many in layout.items():
            more = many - have[node]
            taken += self._free[node][:more]
            del self._free[node][:more]
        self._where.put(job.job, layout)
        return by_node(taken)
