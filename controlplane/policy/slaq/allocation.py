"""Slot by slot to the job that gains most by it (SLAQ section 2), from the sizes of now."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol


class Gains(Protocol):
    """What each job gains by its slots."""

    def step(self, row: int, size: int) -> float:
        """What one more slot gains.

        Args:
            size: slots that it has without, at least 1.
        """
        ...


def allocate(
    gains: Gains,
    bounds: Sequence[tuple[int, int]],
    have: Sequence[int],
    room: int,
    margin: float,
) -> list[int]:
    """Slots of each job, beginning with those that it has.

    Slots that are too many are taken where they are missed least, those that are left go where
    they gain most, and then one after the other moves to who gains more by it. Without a margin
    this is the greedy choice of the paper, in which each job begins with its least, if no slot of a
    job gains more than the one before it; with one, jobs keep the sizes that are nearly as good.

    Args:
        gains: of each slot; none is given for nothing.
        bounds: least and most slots of each job; all the leasts fit.
        have: slots of each now; 0: it starts.
        margin: share by which the gain of a move exceeds what is lost by it.
    """
    exchange = _Exchange(gains, bounds, have)
    left = room - sum(exchange.sizes)
    while left < 0:
        _, giver = exchange.giver()
        exchange.change(giver, -1)
        left += 1
    while left > 0:
        gained, taker = exchange.taker()
        if gained <= 0.0:
            break
        exchange.change(taker, 1)
        left -= 1
    while True:
        (gained, taker), (lost, giver) = exchange.taker(), exchange.giver()
        if gained <= 0.0 or gained <= (1.0 + margin) * lost or taker == giver:
            return exchange.sizes
        exchange.change(giver, -1)
        exchange.change(taker, 1)


class _Exchange:
    """Who gains most by another slot, and who loses least by giving one up."""

    def __init__(
        self, gains: Gains, bounds: Sequence[tuple[int, int]], have: Sequence[int]
    ) -> None:
        self._gains, self._bounds = gains, bounds
        self.sizes = [
            min(max(now, low), high) for now, (low, high) in zip(have, bounds, strict=True)
        ]
        self._takers: list[tuple[float, int, int]] = []  # minus the gain, row, size then
        self._givers: list[tuple[float, int, int]] = []  # the loss, row, size then
        for row, size in enumerate(self.sizes):
            self._takers += self._as_taker(row, size)
            self._givers += self._as_giver(row, size)
        heapify(self._takers)
        heapify(self._givers)

    def taker(self) -> tuple[float, int]:
        """The gain of another slot where it is largest, and the row; 0 and -1: nobody takes one."""
        loss, row = self._first(self._takers)
        return (-loss, row) if row >= 0 else (0.0, -1)

    def giver(self) -> tuple[float, int]:
        """The loss of a slot where it is least, and the row; infinite and -1: nobody can."""
        return self._first(self._givers)

    def change(self, row: int, by: int) -> None:
        """A job gets a slot or gives one up."""
        size = self.sizes[row] = self.sizes[row] + by
        for entry in self._as_taker(row, size):
            heappush(self._takers, entry)
        for entry in self._as_giver(row, size):
            heappush(self._givers, entry)

    def _as_taker(self, row: int, size: int) -> list[tuple[float, int, int]]:
        if size >= self._bounds[row][1]:
            return []
        return [(-self._gains.step(row, size), row, size)]

    def _as_giver(self, row: int, size: int) -> list[tuple[float, int, int]]:
        if size <= self._bounds[row][0]:
            return []
        return [(self._gains.step(row, size - 1), row, size)]

    def _first(self, heap: list[tuple[float, int, int]]) -> tuple[float, int]:
        """The first entry that is true now."""
        while heap and self.sizes[heap[0][1]] != heap[0][2]:
            heappop(heap)
        return heap[0][:2] if heap else (float("inf"), -1)
