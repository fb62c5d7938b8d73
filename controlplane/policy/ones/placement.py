"""Levels to slots: unchanged jobs stay, others are packed close together with few moves.

Reorder (ONES section 3.2.2, figure 10) packs a flat list in job order, which shifts every later
job. Here only jobs that change are placed, aligned to nodes.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from controlplane.policy.ones.fitness import IntArray
from controlplane.policy.ones.problem import Problem

BoolArray = npt.NDArray[np.bool_]


def place(
    problem: Problem, levels: IntArray, packed: BoolArray
) -> tuple[tuple[int, ...], ...] | None:
    """Slots of every job; None if there are not enough.

    Args:
        problem: who has what now.
        levels: shape (J,).
        packed: shape (J,), jobs of unchanged size that are to be brought close together.
    """
    placed = [case.now for case in problem.cases]
    changed = np.flatnonzero((levels != problem.present) | packed)
    if not len(changed):
        return tuple(placed)
    free = _Free(problem)
    growing: list[tuple[int, int]] = []
    for row in map(int, changed):
        case = problem.cases[row]
        size = int(problem.sizes[row, levels[row]])
        have = len(case.now)
        if size < have:
            stay = _tightest(case.now, problem.nodes, size)
            free.give([slot for slot in case.now if slot not in stay])
            placed[row] = stay
        elif size > have or packed[row]:
            growing.append((row, size))
    starts_first = sorted(growing, key=lambda entry: (bool(problem.cases[entry[0]].now), -entry[1]))
    for row, size in starts_first:  # others can be prepared beside one who leaves
        had = placed[row]
        if packed[row]:
            new = free.pack(size, had)
            kept = tuple(slot for slot in had if new and slot in new)
            free.give([slot for slot in had if slot not in kept])
        else:
            new = free.take(size - len(had), had) if had else free.start(size)
            kept = had
        if new is None:
            return None
        placed[row] = (*kept, *(slot for slot in new if slot not in kept))
    return tuple(placed)


def span_factor(problem: Problem, row: int, slots: tuple[int, ...], packed: bool) -> float:  # noqa: FBT001
    """What a job's worth is multiplied with for the nodes that it spans, and for being moved."""
    nodes = len({problem.nodes[slot] for slot in slots})
    known = problem.spans.get((row, len(slots), nodes, packed))
    if known is None:
        case = problem.cases[row]
        at = int(np.searchsorted(case.offers.sizes, len(slots)))
        local = float(case.offers.batches[at]) / len(slots)
        supposed, real = case.model.step_s(
            np.array([case.offers.nodes[at], nodes]),
            np.array([len(slots), len(slots)]),
            np.array([local, local]),
        )
        keeps = case.moved if packed else 1.0
        known = float(keeps * supposed / real) ** problem.speedup_exponent
        problem.spans[row, len(slots), nodes, packed] = known
    return known


class _Free:
    """Slots that a candidate may give out, by node; those that nobody has to leave first apart."""

    def __init__(self, problem: Problem) -> None:
        self._node_of = problem.nodes
        self._early: dict[int, list[int]] = {}
        self._late: dict[int, list[int]] = {}
        self._early_left = len(problem.free_now)
        for slot in problem.free_now:
            self._early.setdefault(self._node_of[slot], []).append(slot)
        self.give(problem.free_soon)

    def give(self, slots: tuple[int, ...] | list[int]) -> None:
        """Somebody leaves these."""
        for slot in slots:
            self._late.setdefault(self._node_of[slot], []).append(slot)

    def start(self, many: int) -> list[int] | None:
        """Slots for a job that has none: a start has to wait for slots that are still left."""
        if self._early_left < many:
            return self.take(many, ())
        taken: list[int] = []
        while len(taken) < many:
            node = _best_fit({n: len(slots) for n, slots in self._early.items()}, many - len(taken))
            taken += self._from(node, many - len(taken))
        return taken

    def pack(self, many: int, own: tuple[int, ...]) -> list[int] | None:
        """Slots close together for a job that has `own`, of which it keeps what it can."""
        here = Counter(self._node_of[slot] for slot in own)
        for node in here:  # its own are taken first
            mine = [slot for slot in own if self._node_of[slot] == node]
            self._early[node] = [*mine, *self._early.get(node, [])]
        self._early_left += len(own)
        rooms = {node: len(self._early[node]) + len(self._late.get(node, ())) for node in here}
        fitting = [node for node in here if rooms[node] >= many]
        if fitting:
            return self._from(max(fitting, key=lambda node: (here[node], -node)), many)
        return self.take(many, ())

    def take(self, many: int, have: tuple[int, ...]) -> list[int] | None:
        """`many` slots close to `have`; None if there are not so many."""
        taken: list[int] = []
        here = Counter(self._node_of[slot] for slot in have)
        for node, _ in here.most_common():
            taken += self._from(node, many - len(taken))
        while len(taken) < many:
            rooms = {node: len(slots) for node, slots in self._early.items()}
            for node, slots in self._late.items():
                rooms[node] = rooms.get(node, 0) + len(slots)
            if not rooms:
                return None
            need = many - len(taken)
            taken += self._from(_best_fit(rooms, need), need)
        return taken

    def _from(self, node: int, many: int) -> list[int]:
        """Up to `many` slots of a node, those that are free now first."""
        taken: list[int] = []
        for pool in (self._early, self._late):
            slots = pool.get(node)
            if slots and len(taken) < many:
                part = slots[: many - len(taken)]
                taken += part
                if pool is self._early:
                    self._early_left -= len(part)
                if len(part) == len(slots):
                    del pool[node]
                else:
                    pool[node] = slots[len(part) :]
        return taken


def _best_fit(rooms: dict[int, int], need: int) -> int:
    """The node with the least room that is enough, else the one with most room."""
    fitting = [(room, node) for node, room in rooms.items() if room >= need]
    if fitting:
        return min(fitting)[1]
    return max((room, -node) for node, room in rooms.items())[1] * -1


def _tightest(slots: tuple[int, ...], node_of: list[int], size: int) -> tuple[int, ...]:
    """`size` of the slots, on as few nodes as possible; in the order that they had."""
    many = Counter(node_of[slot] for slot in slots)
    ranked = sorted(slots, key=lambda slot: (-many[node_of[slot]], node_of[slot]))
    stay = set(ranked[:size])
    return tuple(slot for slot in slots if slot in stay)
