"""Which jobs of a schedule would trade places, and who of them has to step aside for that.

Jobs that take each other's slots in a circle cannot begin: one of them goes to free slots first, to
fewer slots, or pauses. The controller's rule (the cheapest way, then the fewest slot seconds of a
start) is foreseen here, so that what it costs is part of what a schedule is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import numpy as np

from controlplane.prediction.array_types import IntArray


class Way(IntEnum):
    """How a job steps aside; the cheaper ones come first."""

    DETOUR = 0  # to free slots, or with those that it keeps: one more change
    PAUSE = 1  # it is started again


@dataclass(frozen=True, slots=True)
class Trades:
    """Rows of jobs that take each other's slots."""

    groups: tuple[tuple[int, ...], ...] = ()  # those who wait for each other
    aside: Mapping[int, Way] = field(default_factory=dict)  # who of them steps aside, and how

    def partners(self, row: int) -> tuple[int, ...]:
        """With whom a job trades places; nobody if it does not."""
        group = next((group for group in self.groups if row in group), ())
        return tuple(other for other in group if other != row)


NO_TRADES: Final = Trades()
StepAside = Callable[[int, int, int], tuple[Way, float]]


def trades_between(before: IntArray, after: IntArray, spare: int, step_aside: StepAside) -> Trades:
    """Who trades places when `before` becomes `after`.

    Args:
        before: the row of the job on each slot, shape (S,); negative: of none.
        after: the same of a schedule, shape (S,).
        spare: slots that are free before and after.
        step_aside: of a row, the slots that it keeps and the spare ones: how, and what that costs.
    """
    differ = np.flatnonzero(before != after)
    old, new = before[differ], after[differ]
    both = (old >= 0) & (new >= 0)
    if not both.any():
        return NO_TRADES
    takes = set(new.tolist()) & set(before.tolist())  # that run, and get other slots
    needs: dict[int, set[int]] = {}
    for taker, owner in set(zip(new[both].tolist(), old[both].tolist(), strict=True)):
        if taker in takes and owner in takes:
            needs.setdefault(taker, set()).add(owner)
    waiting = _left_over(needs, needs.keys())
    if not waiting:
        return NO_TRADES
    groups = _together(waiting, needs)
    kept = np.bincount(before[(before == after) & (before >= 0)], minlength=int(before.max()) + 1)
    aside: dict[int, Way] = {}
    while waiting:
        blocking = sorted({owner for row in waiting for owner in needs[row]} & waiting)
        ways = {row: step_aside(row, int(kept[row]), spare) for row in blocking}
        row = min(ways, key=lambda row: (*ways[row], row))
        aside[row] = ways[row][0]
        waiting = _left_over(needs, waiting - {row})
    return Trades(groups, aside)


def _left_over(needs: Mapping[int, set[int]], rows: Iterable[int]) -> set[int]:
    """Those who wait for each other when all have gone on who can."""
    waiting = set(rows)
    while True:
        ready = {row for row in waiting if not needs[row] & waiting}
        if not ready:
            return waiting
        waiting -= ready


def _together(rows: set[int], needs: Mapping[int, set[int]]) -> tuple[tuple[int, ...], ...]:
    """Those who wait for each other, directly or not; each group and all of them in order."""
    groups: list[set[int]] = []
    for row in sorted(rows):
        mine = {row} | (needs[row] & rows)
        touched = [group for group in groups if group & mine]
        groups = [group for group in groups if not group & mine]
        groups.append(mine.union(*touched))
    return tuple(sorted(tuple(sorted(group)) for group in groups))
