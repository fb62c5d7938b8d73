"""The search problem of one view: the sizes that jobs may have, their value, effects of places.

Jobs that take each other's slots in a circle cannot start to move. One of them must first go to
free slots, continue on fewer slots, or pause. The controller chooses the job with the cheapest way
to yield; among equal jobs, it chooses the one with the lowest cost of a start, in slot seconds. The
same rule is applied here, so that the value of a schedule includes the cost of its trades.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from controlplane.policy.ones.job_rows import JobRow
from controlplane.policy.search.cluster_index import ClusterIndex
from controlplane.prediction import BoolArray, FloatArray, IntArray
from schemas.ids import JobId, Seconds, SlotId


def exchanges_slots(before: IntArray, after: IntArray) -> bool:
    """True if running jobs would need each other's slots, so that none of them can move first.

    `before` and `after` have the row on each slot, or a negative number; shape (S,).
    """
    differ = np.flatnonzero(before != after)
    old, new = before[differ], after[differ]
    both = (old >= 0) & (new >= 0)
    if not both.any():
        return False
    takes = set(new.tolist()) & set(before.tolist())  # running jobs that get other slots
    needs: dict[int, set[int]] = {}
    for taker, owner in set(zip(new[both].tolist(), old[both].tolist(), strict=True)):
        if taker in takes and owner in takes:
            needs.setdefault(taker, set()).add(owner)
    return bool(_blocked(needs, needs.keys()))


def _blocked(needs: Mapping[int, set[int]], rows: Iterable[int]) -> set[int]:
    """Return the rows that still block each other after all other rows have moved."""
    waiting = set(rows)
    while True:
        ready = {row for row in waiting if not needs[row] & waiting}
        if not ready:
            return waiting
        waiting -= ready


@dataclass(frozen=True, slots=True)
class FairnessFloors:
    """Each job's stretch, the limit `max_stretch`, and the size that is due to each job."""

    limit: float  # max_stretch
    expected: FloatArray  # shape (J,), stretch if the job gets just its fair share from now on
    at_best: FloatArray  # shape (J,), stretch if the job gets the largest size allowed now
    level: IntArray  # shape (J,), lowest level that is due; 0: none
    penalty: FloatArray  # shape (J, 1 + L), penalty of levels below the due one


FREE, CLOSED = -1, -2  # no job; a job that may not be moved, or an unusable slot


@dataclass(frozen=True)
class Problem:
    """Constants of the search for one view.

    The *level* of a job is 0 if it waits, else 1 + the index of a size in its table.
    """

    job_rows: tuple[JobRow, ...]
    kept: dict[JobId, dict[SlotId, int]]  # local batches of jobs that may not be moved now
    cluster: ClusterIndex
    owner: IntArray  # shape (S,), the row of the job on each slot now, `FREE` or `CLOSED`
    early: BoolArray  # shape (S,), True for slots that are free now
    sizes: IntArray  # shape (J, 1 + L), slots at each level; 0 beyond what a job may have
    spans: IntArray  # shape (J, 1 + L), nodes that the value at each level assumes
    value: FloatArray  # shape (J, 1 + L), V; -inf where a level is not allowed
    present: IntArray  # shape (J,), present levels
    move_factor: FloatArray  # shape (J,), share of a job's speed-up left after a move
    free_to_move: BoolArray  # shape (J,), True for running jobs that may be moved
    backing_off: dict[JobId, Seconds]  # when waiting jobs may be retried
    gates: tuple[Seconds, ...]  # when gated jobs may be moved if no epoch ends earlier
    too_large: dict[JobId, int]  # least slots of jobs that do not fit into the cluster
    capacity: int  # slots in play
    speedup_exponent: float
    slow: FloatArray | None = None  # shape (J, types), factors of step times
    floors: FairnessFloors | None = None  # set by `max_stretch`; None: no limit
    stretch: dict[tuple[int, int, int], float] = field(default_factory=dict)  # cache

    @property
    def slots(self) -> tuple[SlotId, ...]:
        """Slots of the cluster."""
        return self.cluster.slots

    @property
    def node_of(self) -> IntArray:
        """Node number of each slot, shape (S,)."""
        return self.cluster.node_of

    @property
    def slots_on(self) -> tuple[IntArray, ...]:
        """The places of the slots of each node."""
        return self.cluster.slots_on

    @property
    def widest(self) -> int:
        """Number of slots of the largest node."""
        return self.cluster.widest

    @cached_property
    def rows(self) -> IntArray:
        """Row numbers, 0 to J - 1."""
        return np.arange(len(self.job_rows))

    @cached_property
    def allowed(self) -> BoolArray:
        """True for each level that a job may have, shape (J, 1 + L)."""
        return np.isfinite(self.value)

    @cached_property
    def worth(self) -> FloatArray:
        """The values minus the penalties of `floors`, which decide sizes; shape (J, 1 + L)."""
        return self.value if self.floors is None else self.value - self.floors.penalty

    @cached_property
    def lowest(self) -> IntArray:
        """Lowest allowed level of each job, shape (J,): 0 unless the job must keep slots."""
        return np.asarray(self.allowed.argmax(axis=1), dtype=np.int64)

    @cached_property
    def places_matter(self) -> bool:
        """True if places differ in more than the number of nodes that they span."""
        return self.slow is not None or (self.cluster.shares_cores and len(self.slots_on) > 1)

    def placed_value(self, levels: IntArray, owner: IntArray) -> tuple[FloatArray, BoolArray]:
        """Return the value of each job in a layout, and whether the job changes; shape (J,) each.

        The value is multiplied by share^`speedup_exponent`, where the share is the part of the
        speed that nodes, GPU types, other workers and a move leave.
        """
        value = self.value[self.rows, levels]
        runs = levels > 0
        moved = levels != self.present
        differ = np.flatnonzero(owner != self.owner)
        for rows in (owner[differ], self.owner[differ]):
            moved[rows[rows >= 0]] = True
        pair_rows, pair_nodes, nodes = self.spread(owner)
        factor = np.ones(len(levels))
        for row in np.flatnonzero(runs & (nodes != self.spans[self.rows, levels])).tolist():
            factor[row] = self._stretched(row, int(levels[row]), int(nodes[row]))
        same = moved & runs & (levels == self.present)
        factor[same] *= self.move_factor[same]
        if self.slow is not None:
            slowest, at = np.zeros(len(levels)), np.flatnonzero(owner >= 0)
            np.maximum.at(slowest, owner[at], self.slow[owner[at], self.cluster.type_of[at]])
            factor[runs] /= slowest[runs]
        if self.cluster.shares_cores:
            factor *= self._share_of_cores(levels, owner, pair_rows, pair_nodes)
        changed = runs & (factor != 1.0)
        value[changed] *= np.power(factor[changed], self.speedup_exponent)
        return value, moved

    def _share_of_cores(
        self, levels: IntArray, owner: IntArray, rows: IntArray, nodes: IntArray
    ) -> FloatArray:
        """Return the share of its speed that each job keeps beside other workers, shape (J,).

        The minimum slots of all jobs count as if they had cores of their own. Otherwise jobs would
        wait although slots are free.
        """
        on = np.bincount(self.node_of[owner != FREE], minlength=len(self.slots_on))
        worst = np.ones(len(levels))
        np.maximum.at(worst, rows, np.maximum(1.0, on / self._cores_for_all)[nodes])
        return np.asarray(np.minimum(1.0, self.alone[self.rows, levels] / worst))

    @cached_property
    def _node_slots(self) -> tuple[IntArray, IntArray]:
        """Number of slots of each node, and how many of them are not in play; shape (N,) each."""
        many = np.array([len(slots) for slots in self.slots_on])
        return many, np.bincount(self.node_of[self.owner == CLOSED], minlength=len(many))

    @cached_property
    def _cores_for_all(self) -> FloatArray:
        """The cores of each node, or the node's share of all jobs' least slots if that is more."""
        many, closed = self._node_slots
        least = sum(int(sizes[1]) for sizes in self.sizes)
        share = np.ceil(least * (many - closed) / max(1, int((many - closed).sum())))
        everywhere = closed + np.minimum(share, many - closed)
        return np.asarray(np.maximum(self.cluster.cores, everywhere))

    @cached_property
    def alone(self) -> FloatArray:
        """The factor by which a job's own workers lengthen its steps at each level."""
        found = np.ones(self.sizes.shape)
        for row, job_row in enumerate(self.job_rows):
            found[row, 1 : 1 + len(job_row.table.stretch)] = job_row.table.stretch
        return found

    @cached_property
    def cores(self) -> int:
        """Number of slots in play with a core of their own; all of them if no cores are shared."""
        if not self.cluster.shares_cores:
            return self.capacity
        many, closed = self._node_slots
        open_ = np.minimum(many - closed, np.maximum(self.cluster.cores - closed, 0.0))
        return int(open_.sum())

    def spread(self, owner: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return the distinct (row, node) pairs as two arrays, and each row's number of nodes."""
        at = np.flatnonzero(owner >= 0)
        many = max(1, len(self.slots_on))
        pairs = np.unique(owner[at] * many + self.node_of[at])
        rows, nodes = np.divmod(pairs, many)
        return rows, nodes, np.bincount(rows, minlength=len(self.job_rows))

    def is_scattered(self, levels: IntArray, owner: IntArray) -> bool:
        """True if a job with a changed level is on more nodes than it needs."""
        nodes = self.spread(owner)[2]
        least = -(-self.sizes[self.rows, levels] // self.widest)
        return bool(((nodes > least) & (levels != self.present)).any())

    @cached_property
    def spare(self) -> IntArray:
        """Number of slots that each job may add before it leaves its old ones, shape (J,).

        During a move a job trains on its old and new slots and needs a sample for each slot.
        """
        spare = [job_row.job.batch_limit - len(job_row.now) for job_row in self.job_rows]
        return np.where(self.free_to_move, np.maximum(0, np.array(spare, dtype=np.int64)), 0)

    def has_barred_move(self, owner: IntArray) -> bool:
        """True if the layout needs a move that is not allowed.

        The controller refuses to move a job with fewer samples than old and new slots together.
        """
        differ = np.flatnonzero(owner != self.owner)
        new, old = owner[differ], self.owner[differ]
        takes = np.bincount(new[new >= 0], minlength=len(self.job_rows))
        leaves = np.bincount(old[old >= 0], minlength=len(self.job_rows))
        if ((takes > self.spare) & (leaves > 0)).any():
            return True
        return exchanges_slots(self.owner, owner)

    def scattered_rows(self, owner: IntArray) -> IntArray:
        """Return the rows of the movable jobs that are on more nodes than they need."""
        nodes = self.spread(owner)[2]
        slots = np.bincount(owner[owner >= 0], minlength=len(self.job_rows))
        return np.flatnonzero((nodes > -(-slots // self.widest)) & self.free_to_move)

    def node_costs(self, row: int, owner: IntArray) -> FloatArray:
        """Return log(factor of the step time) of `row` on each node, shape (N,)."""
        found = np.zeros(len(self.slots_on))
        if self.slow is not None:
            found[self.node_of] = np.log(self.slow[row, self.cluster.type_of])
        if self.cluster.shares_cores:
            busy = np.bincount(self.node_of[owner != FREE], minlength=len(found))
            found += np.log(np.maximum(1.0, (busy + 1) / self.cluster.cores))
        return found

    def _stretched(self, row: int, level: int, nodes: int) -> float:
        """Return the step time on the assumed number of nodes divided by that on `nodes`."""
        known = self.stretch.get((row, level, nodes))
        if known is None:
            job_row, at = self.job_rows[row], level - 1
            size = int(job_row.table.sizes[at])
            local = float(job_row.table.batches[at]) / size
            supposed, real = job_row.model.step_s(
                np.array([job_row.table.nodes[at], nodes]),
                np.array([size, size]),
                np.array([local, local]),
            )
            known = self.stretch[row, level, nodes] = float(supposed / real)
        return known
