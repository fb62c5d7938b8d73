"""On which nodes a job of fixed size loses least by its neighbours, and costs them least."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from controlplane.policy.planning.interference.occupancy import Layout, Occupancy
from controlplane.policy.planning.interference.speed_shares import SpeedShares, gain_of
from schemas.ids import JobId, NodeId

FIRST_NODES: Final = 6  # that a layout is begun on, the best for one worker alone
DIGITS: Final = 6  # of normalised speed, in which layouts are equally good


class LayoutSearch:
    """Where the sum of normalised speeds is largest; among equals on few and well-filled nodes.

    Greedy, worker by worker, from each of a few first nodes: once with one worker there, and once
    with as many as it has room for.

    Args:
        where: everybody is; the same afterwards.
    """

    def __init__(self, free: Mapping[NodeId, int], where: Occupancy, shares: SpeedShares) -> None:
        self._free = {node: room for node, room in free.items() if room}
        self._where, self._shares = where, shares

    def best(self, job: JobId, size: int, own: Layout | None = None) -> Layout:
        """The best layout that greedy finds.

        Args:
            size: workers; at most what is free and its own.
            own: workers that stay where they are.

        Returns:
            Workers on each node.
        """
        kept = Counter(own or {})
        need = size - kept.total()
        if need <= 0:
            return dict(kept)
        nodes = self._distinct(kept)
        worth = {node: self._worth(job, kept + Counter({node: 1})) for node in nodes}
        first = sorted(nodes, key=lambda node: (-worth[node], self._free[node]))[:FIRST_NODES]
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
        """`layout` with workers added one by one, each where it costs least."""
        while layout.total() < size:
            open_ = [n for n, room in self._free.items() if room > layout[n] - kept[n]]
            near = [node for node in open_ if node in first or layout[node]]
            grown = [layout + Counter({node: 1}) for node in near or open_[:FIRST_NODES]]
            layout = min(grown, key=lambda one: (-self._worth(job, one), *self._spare(one)))
        return layout

    def _spare(self, layout: Layout) -> tuple[int, int]:
        """Nodes, and free slots there: the fewer the better."""
        return len(layout), sum(self._free.get(node, 0) for node in layout)

    def _distinct(self, kept: Layout) -> list[NodeId]:
        """Of empty nodes with the same room, as many as could be needed: they are alike."""
        found: list[NodeId] = []
        empty: Counter[int] = Counter()
        for node, room in self._free.items():
            if not self._where.on(node) and node not in kept:
                empty[room] += 1
                if empty[room] > FIRST_NODES:
                    continue
            found.append(node)
        return found

    def _worth(self, job: JobId, layout: Layout) -> float:
        return round(gain_of({job: dict(layout)}, self._where, self._shares), DIGITS)
