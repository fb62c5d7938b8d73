"""Levels to slots: unchanged jobs stay, others are packed close together with few moves.

Reorder (ONES section 3.2.2, figure 10) packs a flat list in job order, which shifts every later
job. Here only jobs that change are placed, aligned to nodes.
"""

from __future__ import annotations

from collections import Counter, defaultdict

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
            stay = _tightest(case.now, problem.node_of, size)
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
    nodes = len({int(problem.node_of[slot]) for slot in slots})
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
    """Slots that a candidate may give out, by node."""

    def __init__(self, problem: Problem) -> None:
        self._node_of = problem.node_of
        self._by_node: defaultdict[int, list[int]] = defaultdict(list)
        self._early = set(problem.free_now)  # nobody has to leave them first
        self.give(problem.free_now)
        self.give(problem.free_soon)

    def give(self, slots: tuple[int, ...] | list[int]) -> None:
        """Somebody leaves these."""
        for slot in slots:
            self._by_node[int(self._node_of[slot])].append(slot)

    def start(self, many: int) -> list[int] | None:
        """Slots for a job that has none: a start has to wait for slots that are still left."""
        if len(self._early) < many:
            return self.take(many, ())
        late = {n: [s for s in slots if s not in self._early] for n, slots in self._by_node.items()}
        for node, slots in self._by_node.items():
            self._by_node[node] = [slot for slot in slots if slot in self._early]
        taken = self.take(many, ())
        for slots in late.values():
            self.give(slots)
        return taken

    def pack(self, many: int, own: tuple[int, ...]) -> list[int] | None:
        """Slots close together for a job that has `own`, of which it keeps what it can."""
        here = Counter(int(self._node_of[slot]) for slot in own)
        for node in here:  # its own are taken first
            mine = [slot for slot in own if int(self._node_of[slot]) == node]
            self._by_node[node] = [*mine, *self._by_node[node]]
        rooms = {node: len(slots) for node, slots in self._by_node.items() if slots}
        fitting = [node for node in here if rooms[node] >= many]
        if fitting:
            return self._from(max(fitting, key=lambda node: (here[node], -node)), many)
        return self.take(many, ())

    def take(self, many: int, have: tuple[int, ...]) -> list[int] | None:
        """`many` slots close to `have`; None if there are not so many."""
        taken: list[int] = []
        here = Counter(int(self._node_of[slot]) for slot in have)
        for node, _ in here.most_common():
            taken += self._from(node, many - len(taken))
        while len(taken) < many:
            need = many - len(taken)
            open_ = {node: len(slots) for node, slots in self._by_node.items() if slots}
            if not open_:
                return None
            fitting = [node for node, room in open_.items() if room >= need]
            if fitting:
                node = min(fitting, key=lambda n: (open_[n], n))
            else:
                node = max(open_, key=lambda n: (open_[n], -n))
            taken += self._from(node, need)
        return taken

    def _from(self, node: int, many: int) -> list[int]:
        slots = self._by_node[node]
        taken, self._by_node[node] = slots[:many], slots[many:]
        self._early.difference_update(taken)
        return taken


def _tightest(slots: tuple[int, ...], node_of: IntArray, size: int) -> tuple[int, ...]:
    """`size` of the slots, on as few nodes as possible; in the order that they had."""
    many = Counter(int(node_of[slot]) for slot in slots)
    ranked = sorted(slots, key=lambda slot: -many[int(node_of[slot])])
    stay = set(ranked[:size])
    return tuple(slot for slot in slots if slot in stay)
