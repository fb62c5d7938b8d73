"""One view as the search sees it: who may have which size, what that is worth, and where."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from controlplane.policy.api import ClusterView, JobView
from controlplane.policy.ones.fitness import (
    FloatArray,
    IntArray,
    Offers,
    kept_share,
    offers,
    remaining_s,
    values,
    weights,
)
from controlplane.policy.ones.knowledge import Knowledge
from controlplane.policy.ones.options import OnesOptions
from controlplane.prediction.efficiency import statistical_efficiency
from controlplane.prediction.throughput import SpeedModel
from schemas.ids import JobId, NodeId, Seconds, SlotId

UNPLACED: Final = -1


@dataclass(frozen=True, slots=True)
class Case:
    """One job that may be given slots, or more, or fewer."""

    job: JobView
    now: tuple[int, ...]  # its slots, by place in `Problem.slots`
    level: int  # of its present size: 0 waits, k has offers.sizes[k - 1]
    offers: Offers
    limit: int  # R
    remaining_s: float  # T1, on one slot
    keeps: FloatArray  # c(n) for each size
    moved: float  # c of the present size on other slots
    model: SpeedModel
    gated: bool

    @property
    def present(self) -> tuple[float, float]:
        """Speed and goodput of the present slots and batch, as the model sees them."""
        slots, batch = len(self.now), sum(self.job.running_on.values())
        at = int(np.searchsorted(self.offers.sizes, slots))
        nodes = np.array([self.offers.nodes[at]])
        local = np.array([np.ceil(batch / slots)])
        step_s = float(self.model.step_s(nodes, np.array([slots]), local)[0])
        worth = statistical_efficiency(
            np.array([float(batch)]), self.job.batch_size, self.offers.noise_scale
        )
        return batch / step_s, batch / step_s * float(worth[0])


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything that stays the same while one view is searched.

    A *level* of a job is 0 (it waits) or 1 + the place of a size in its offers.
    """

    version: int
    cases: tuple[Case, ...]
    kept: dict[JobId, dict[SlotId, int]]  # jobs that nobody may move now
    slots: tuple[SlotId, ...]  # in play: free, soon free, or of a case
    node_of: IntArray  # shape (S,), number of each slot's node
    free_now: tuple[int, ...]  # places in `slots`
    free_soon: tuple[int, ...]
    sizes: IntArray  # shape (J, 1 + L), slots at each level; 0 beyond what a job may have
    worth: FloatArray  # shape (J, 1 + L), V; -inf where a level is not allowed
    present: IntArray  # shape (J,), levels now
    weight: FloatArray  # shape (J,)
    backing_off: dict[JobId, Seconds]  # waits before its next try, until then
    too_large: dict[JobId, int]  # wants at least so many slots, which the cluster has not
    total_slots: int  # of the whole cluster
    speedup_exponent: float
    spans: dict[tuple[int, int, int, bool], float] = field(default_factory=dict)  # remembered

    @property
    def capacity(self) -> int:
        """Slots in play."""
        return len(self.slots)


def build(view: ClusterView, knowledge: Knowledge, options: OnesOptions, now: Seconds) -> Problem:
    """The problem that `view` poses at `now`."""
    movable = {
        name: job
        for name, job in view.jobs.items()
        if job.movable and (job.running_on or job.ready_at <= now)
    }
    contended = any(not job.running_on for job in movable.values())
    knowledge.meet(view.jobs.values(), contended=contended, now=now)
    backing_off = {
        name: job.ready_at
        for name, job in view.jobs.items()
        if job.movable and not job.running_on and job.ready_at > now
    }
    mine = {slot for job in movable.values() for slot in job.running_on}
    taken = {slot for job in view.jobs.values() for slot in job.running_on} - mine
    in_play = [
        slot
        for slot in view.slots
        if slot.slot not in taken and (slot.usable or slot.leaving or slot.slot in mine)
    ]
    place = {slot.slot: number for number, slot in enumerate(in_play)}
    nodes: dict[NodeId, int] = {}
    node_of = [nodes.setdefault(slot.node, len(nodes)) for slot in in_play]
    free_now = [place[slot.slot] for slot in in_play if slot.usable and slot.slot not in mine]
    free_soon = [place[slot.slot] for slot in in_play if not slot.usable and slot.slot not in mine]
    widest = max(Counter(slot.node for slot in view.slots).values(), default=1)
    desk = _Desk(
        knowledge,
        options,
        now,
        node_of,
        capacity=len(in_play),
        idle=len(free_now) + len(free_soon),
        widest=widest,
        contended=contended,
    )
    too_large = {
        name: job.least
        for name, job in movable.items()
        if not job.running_on and job.least > len(view.slots)
    }
    cases = [
        desk.case(job, tuple(place[slot] for slot in job.running_on if slot in place))
        for name, job in movable.items()
        if name not in too_large
    ]
    return _tabulated(
        cases,
        options,
        version=view.version,
        kept={
            name: dict(job.running_on)
            for name, job in view.jobs.items()
            if job.running_on and name not in movable
        },
        slots=tuple(slot.slot for slot in in_play),
        node_of=np.array(node_of, dtype=np.int64),
        free_now=tuple(free_now),
        free_soon=tuple(free_soon),
        backing_off=backing_off,
        too_large=too_large,
        total_slots=len(view.slots),
    )


@dataclass(frozen=True, slots=True)
class _Desk:
    """What every job is looked at with."""

    knowledge: Knowledge
    options: OnesOptions
    now: Seconds
    node_of: list[int]
    capacity: int
    idle: int
    widest: int  # slots of the largest node
    contended: bool

    def case(self, job: JobView, now_on: tuple[int, ...]) -> Case:
        """The job as the search sees it."""
        gated = bool(job.running_on) and self.knowledge.gated(job, self.now)
        size = len(job.running_on)
        sizes = self._sizes(job, size, gated=gated)
        nodes = np.maximum(1, -(-sizes // self.widest))
        nodes[sizes == size] = max(1, len({self.node_of[place] for place in now_on}))
        known = offers(job, self.knowledge, self.options, sizes, nodes, keep_batch=gated)
        one_s = remaining_s(job, self.knowledge, known.one_speed, known=known.known)
        return Case(
            job=job,
            now=now_on,
            level=int(np.searchsorted(sizes, size)) + 1 if size else 0,
            offers=known,
            limit=self.knowledge.limit(job),
            remaining_s=one_s,
            keeps=self._keeps(job, known, one_s, size),
            moved=self._moved(known, one_s, size),
            model=self.knowledge.family(job.family).speed(job.batch_size),
            gated=gated,
        )

    def _keeps(self, job: JobView, known: Offers, one_s: float, size: int) -> FloatArray:
        """A first start is no change: every job needs one."""
        if not size and not job.epoch and not job.samples_done:
            return np.ones(len(known.sizes))
        stall = self.options.rescale_stall_s
        if not size:
            stall = job.start_s if job.start_s is not None else self.options.start_stall_s
        length = one_s if np.isfinite(one_s) else 0.0
        return kept_share(known, length, stall, self.options.change_margin, size)

    def _moved(self, known: Offers, one_s: float, size: int) -> float:
        """What is left of a job's value after it went to other slots, all else being the same."""
        if not size:
            return 1.0
        length = one_s if np.isfinite(one_s) else 0.0
        options = self.options
        share = kept_share(known, length, options.rescale_stall_s, options.change_margin, 0)
        return float(share[np.searchsorted(known.sizes, size)])

    def _sizes(self, job: JobView, size: int, *, gated: bool) -> IntArray:
        """What a job may have now: 1 to a node's width, then whole nodes, and what it has."""
        batch = min(self.knowledge.limit(job), job.batch_limit)
        most = min(job.most, self.capacity, max(batch, job.least))
        least = min(job.least, size) if size else job.least
        if self.knowledge.warm(job):
            largest = max(size, self.knowledge.family(job.family).largest, job.least)
            most = min(most, int(self.options.growth * largest))
        else:  # Start: one slot until a few steps were taken
            most = min(most, max(size, least))
        if gated:  # it may grow onto idle slots, and make room for one that waits
            most = min(most, size + (0 if self.contended else self.idle))
            least = least if self.contended else size
        if job.retry_at > self.now:
            most = min(most, size)
        choices = set(range(least, min(self.widest, most) + 1))
        choices.update(n for n in range(self.widest, most + 1, self.widest) if n >= least)
        return np.array(sorted(choices | {size or job.least}), dtype=np.int64)


def _tabulated(cases: list[Case], options: OnesOptions, **rest: object) -> Problem:
    weight = weights(np.array([case.remaining_s for case in cases], dtype=np.float64), options)
    levels = 1 + max((len(case.offers.sizes) for case in cases), default=0)
    sizes = np.zeros((len(cases), levels), dtype=np.int64)
    worth = np.full((len(cases), levels), -np.inf)
    worth[:, 0] = 0.0
    for row, case in enumerate(cases):
        many = 1 + len(case.offers.sizes)
        sizes[row, 1:many] = case.offers.sizes
        worth[row, 1:many] = values(case.offers.gains, case.keeps, float(weight[row]), options)
        if case.gated:
            worth[row, 0] = -np.inf  # it may make room, but is not stopped
    return Problem(
        cases=tuple(cases),
        sizes=sizes,
        worth=worth,
        present=np.array([case.level for case in cases], dtype=np.int64),
        weight=weight,
        speedup_exponent=options.speedup_exponent,
        **rest,  # type: ignore[arg-type]
    )
