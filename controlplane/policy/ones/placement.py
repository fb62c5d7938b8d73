"""Layout of levels on slots: unchanged jobs stay, other jobs are packed closely with few moves.

Reorder (ONES section 3.2.2, figure 10) packs a flat list in job order, which shifts every later
job. Here only changed jobs are laid out, and they are aligned to nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from controlplane.policy.ones.problem import FREE, Problem
from controlplane.prediction import FloatArray, IntArray

COST_WEIGHT: Final = 1e6  # weight of a node's cost; dominates the fit
FIT_WEIGHT: Final = 1e3  # weight of the fit; dominates the job's own slots on the node


@dataclass(frozen=True, slots=True)
class PlacementHints:
    """Options for one layout."""

    movers: tuple[int, ...] = ()  # rows that take other slots at the same size
    jitter: FloatArray | None = None  # shape (N,), additional costs of nodes


NO_HINTS: Final = PlacementHints()


def lay_out(
    problem: Problem,
    owner: IntArray,
    before: IntArray,
    levels: IntArray,
    hints: PlacementHints = NO_HINTS,
) -> IntArray | None:
    """Return the row of the job on each slot at `levels`, shape (S,), or None if slots are too few.

    The layout starts from `owner`, at the levels `before`. Levels have shape (J,).
    """
    changed = np.flatnonzero(levels != before)
    if not len(changed) and not hints.movers:
        return owner
    layout = _Layout(problem, owner, hints)
    sizes = problem.sizes[problem.rows, levels]
    have = problem.sizes[problem.rows, before]
    for row in changed[sizes[changed] < have[changed]].tolist():
        layout.shrink(row, int(sizes[row]))
    takers = changed[sizes[changed] > have[changed]].tolist()
    takers += [row for row in hints.movers if levels[row] == before[row] and levels[row]]
    for row in _by_priority(problem, takers, sizes):
        if not layout.settle(row, int(sizes[row])):
            return None
    return layout.owner


def _by_priority(problem: Problem, takers: list[int], sizes: IntArray) -> list[int]:
    """Return the rows in the order in which they choose slots: first those with most whole nodes.

    Running jobs come last, because their new workers can be prepared while another job is leaving.
    """
    return sorted(
        takers,
        key=lambda row: (
            -(int(sizes[row]) // problem.widest),
            bool(problem.present[row]),
            -int(sizes[row]),
            row,
        ),
    )


class _Layout:
    """Assignment of slots that changes while one schedule is laid out."""

    def __init__(self, problem: Problem, owner: IntArray, hints: PlacementHints) -> None:
        self._problem = problem
        self._hints = hints
        self.owner = owner.copy()
        free = np.flatnonzero(owner == FREE)
        many = len(problem.slots_on)
        self._free_slots = np.bincount(problem.node_of[free], minlength=many)
        early = free[problem.early[free]]
        self._early = np.bincount(problem.node_of[early], minlength=many)

    # --- jobs

    def shrink(self, row: int, size: int) -> None:
        """Reduce a job to `size` slots: to its new ones if half-migrated, else on few nodes."""
        have = self._slots(row)
        moves_to = self._problem.job_rows[row].moves_to
        if size and size == len(moves_to) and np.isin(moves_to, have).all():
            self._release(have[~np.isin(have, moves_to)])
            return
        nodes = self._problem.node_of[have]
        if size:
            # Keep slots on the nodes where the job has most; this frees whole nodes for other jobs.
            many = np.bincount(nodes, minlength=len(self._free_slots))[nodes]
            have = have[np.lexsort((have, nodes, -many))]
        self._release(have[size:])

    def settle(self, row: int, size: int) -> bool:
        """Assign slots to a job that grows, starts or moves; return False if slots are too few."""
        mine = self._slots(row)
        free_slots = self._free_slots
        own = np.bincount(self._problem.node_of[mine], minlength=len(free_slots))
        if not len(mine):
            return self._start(row, size, own)
        if row in self._hints.movers:
            fresh = self._choose_nodes(row, free_slots + own, own, size)
            if fresh is not None:
                self._move_to(row, mine, fresh)
            return fresh is not None
        further = self._added_slots(row, own, size - len(mine))
        if further is None:
            return False
        spans = int(np.count_nonzero(own + further))
        if spans > -(-size // self._problem.widest) and self._may_move(row, size + len(mine)):
            fresh = self._choose_nodes(row, free_slots + own, own, size)
            if fresh is not None and len(fresh) < spans:
                self._move_to(row, mine, fresh)
                return True
        for node in np.flatnonzero(further).tolist():
            self._take(row, node, int(further[node]))
        return True

    def _start(self, row: int, size: int, own: IntArray) -> bool:
        """Assign slots to a starting job, free ones if no more nodes are needed; False: too few."""
        every = self._choose_nodes(row, self._free_slots, own, size)
        if every is None:
            return False
        early = self._choose_nodes(row, self._early, own, size)
        chosen = early if early is not None and len(early) <= len(every) else every
        for node, many in chosen:
            self._take(row, node, many)
        return True

    # --- choice of nodes

    def _choose_nodes(
        self, row: int, free_slots: IntArray, own: IntArray, size: int
    ) -> list[tuple[int, int]] | None:
        """Return (node, slots) pairs for as few nodes as possible, or None if slots are too few."""
        if int(free_slots.sum()) < size:
            return None
        left = free_slots.astype(np.float64)
        cost = self._node_costs(row)
        found: list[tuple[int, int]] = []
        while size > 0:
            fits = left >= size
            some = bool(fits.any())
            among = np.flatnonzero(fits if some else left > 0)
            room = left[among]
            key = cost[among] * COST_WEIGHT + (room if some else -room) * FIT_WEIGHT - own[among]
            node = int(among[key.argmin()])
            many = int(min(size, left[node]))
            found.append((node, many))
            left[node] = 0
            size -= many
        return found

    def _added_slots(self, row: int, own: IntArray, more: int) -> IntArray | None:
        """Return the slots to add by node, (N,), own nodes first, or None if slots are too few."""
        further = np.zeros_like(own)
        for node in np.argsort(-own, kind="stable")[: np.count_nonzero(own)].tolist():
            many = min(more, int(self._free_slots[node]))
            further[node] = many
            more -= many
        if more:
            rest = self._choose_nodes(row, np.where(own > 0, 0, self._free_slots), own, more)
            if rest is None:
                return None
            for node, many in rest:
                further[node] += many
        return further

    def _node_costs(self, row: int) -> FloatArray:
        cost = self._problem.node_costs(row, self.owner)
        if self._hints.jitter is not None:
            cost = cost + self._hints.jitter
        return cost

    def _may_move(self, row: int, both: int) -> bool:
        """True if the job may move and has a sample for each of its `both` old and new slots."""
        return both <= self._problem.job_rows[row].job.batch_limit and bool(
            self._problem.free_to_move[row]
        )

    # --- slots

    def _slots(self, row: int) -> IntArray:
        return np.flatnonzero(self.owner == row)

    def _move_to(self, row: int, mine: IntArray, fresh: list[tuple[int, int]]) -> None:
        """Move the job to these (node, slots) pairs; it keeps slots that it already has there."""
        node_of = self._problem.node_of
        for node, many in fresh:
            here = mine[node_of[mine] == node]
            if len(here) > many:
                self._release(here[many:])
            else:
                self._take(row, node, many - len(here))
        gone = ~np.isin(node_of[mine], [node for node, _ in fresh])
        self._release(mine[gone])

    def _take(self, row: int, node: int, many: int) -> None:
        """Assign free slots of a node to the job, first the slots that are free now."""
        if not many:
            return
        slots = self._problem.slots_on[node]
        slots = slots[self.owner[slots] == FREE]
        early = self._problem.early[slots]
        chosen = np.concatenate([slots[early], slots[~early]])[:many]
        self.owner[chosen] = row
        self._free_slots[node] -= many
        self._early[node] -= int(self._problem.early[chosen].sum())

    def _release(self, slots: IntArray | Iterable[int]) -> None:
        slots = np.asarray(slots, dtype=np.int64)
        self.owner[slots] = FREE
        np.add.at(self._free_slots, self._problem.node_of[slots], 1)
        early = slots[self._problem.early[slots]]
        np.add.at(self._early, self._problem.node_of[early], 1)
