"""What so many slots cost in each interval, at best: on one node, or on any."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from controlplane.policy.oasis.prices import price
from controlplane.prediction.array_types import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class SlotPrices:
    """The prices of every node in every interval, before one more job is planned.

    Paper: a job pays for all its slots the price of the moment before it came. Here: each further
    slot on a node costs what the ones before it make of the price, at the middle of the step, since
    one job may take a whole node and not a small part of it.

    Args:
        used: slots that are promised, shape (intervals, nodes).
        capacity: slots of each node, shape (nodes,).
        low: L, value per slot second.
    """

    used: IntArray
    capacity: IntArray
    low: float
    high: float

    def on_one_node(self, slots: int) -> FloatArray:
        """The cheapest node that has so many free, in each interval.

        Args:
            slots: 1 or more.

        Returns:
            Shape (intervals,), value per second; infinite where no node has room.
        """
        return np.asarray(self._of_each_node(self.used, slots).min(axis=1))

    def on_any(self, slots: int) -> FloatArray:
        """The cheapest slots wherever they are, in each interval.

        Args:
            slots: 1 or more.

        Returns:
            Shape (intervals,), value per second; infinite where so many are not free.
        """
        costs, free = self._by_level()
        before = np.cumsum(free, axis=1) - free
        taken = np.clip(slots - before, 0, free)
        total = (taken * costs).sum(axis=1)
        return np.where(free.sum(axis=1) >= slots, total, np.inf)

    def place(self, interval: int, slots: int, *, together: bool) -> list[tuple[int, int]]:
        """Where these cheapest slots are.

        Args:
            interval: from 0 on.
            slots: that are free, as the costs say.

        Returns:
            Numbers of nodes, and slots on them; the first node among equals.
        """
        used = self.used[interval]
        if together:
            return [(int(np.argmin(self._of_each_node(used[None, :], slots)[0])), slots)]
        found: dict[int, int] = {}
        for _ in range(slots):
            taken = np.array([found.get(node, 0) for node in range(len(used))]) + used
            share = (taken + 0.5) / np.maximum(self.capacity, 1)
            node = int(np.argmin(np.where(taken < self.capacity, share, np.inf)))
            found[node] = found.get(node, 0) + 1
        return sorted(found.items())

    def _of_each_node(self, used: IntArray, slots: int) -> FloatArray:
        """Value per second of so many slots of each node, of the shape of `used`."""
        steps = np.arange(slots) + 0.5
        share = (used[:, :, None] + steps) / np.maximum(self.capacity, 1)[None, :, None]
        cost = price(np.minimum(share, 1.0), self.low, self.high).sum(axis=2)
        return np.where(used + slots <= self.capacity, cost, np.inf)

    def _by_level(self) -> tuple[FloatArray, IntArray]:
        """Prices in rising order, shape (levels,), and free slots at each, (intervals, levels)."""
        shares: list[float] = []
        free: list[IntArray] = []
        for capacity in sorted({int(each) for each in self.capacity if each}):
            nodes = self.used[:, self.capacity == capacity]
            for step in range(capacity):
                shares.append((step + 0.5) / capacity)
                free.append((nodes <= step).sum(axis=1))
        order = np.argsort(shares, kind="stable")
        costs = price(np.array(shares)[order], self.low, self.high)
        return costs, np.stack(free, axis=1)[:, order]
