"""One view as the search sees it: who may have which size, what that is worth, and where."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from controlplane.policy.api import ClusterView, JobView
from controlplane.policy.ones.fitness import (
    FloatArray,
    IntArray,
    Offers,
    kept_share,
    offers,
    remaining_s,
    stall_share,
    values,
    weights,
)
from controlplane.policy.ones.knowledge import Knowledge
from controlplane.policy.ones.options import OnesOptions
from controlplane.prediction.efficiency import statistical_efficiency
from controlplane.prediction.throughput import SpeedModel
from schemas.ids import JobId, NodeId, Seconds, SlotId

BoolArray = npt.NDArray[np.bool_]
KEPT_OFFERS: Final = 20_000
ANY_SIZE: Final = 4  # slots, up to which a job need not fill its nodes
_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Room:
    """What there is to share out, for everybody alike."""

    capacity: int
    idle: int
    contended: bool
    now: Seconds


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
    again: float  # what is left of its value when it is stopped and started again; 1 if it waits
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


@dataclass(frozen=True)
class Problem:
    """Everything that stays the same while one view is searched.

    A *level* of a job is 0 (it waits) or 1 + the place of a size in its offers.
    """

    version: int
    cases: tuple[Case, ...]
    kept: dict[JobId, dict[SlotId, int]]  # jobs that nobody may move now
    slots: tuple[SlotId, ...]  # all of the cluster
    node_of: IntArray  # shape (S,), number of each slot's node
    free_now: tuple[int, ...]  # places in `slots`
    free_soon: tuple[int, ...]
    sizes: IntArray  # shape (J, 1 + L), slots at each level; 0 beyond what a job may have
    worth: FloatArray  # shape (J, 1 + L), V; -inf where a level is not allowed
    present: IntArray  # shape (J,), levels now
    weight: FloatArray  # shape (J,)
    backing_off: dict[JobId, Seconds]  # waits before its next try, until then
    gates: tuple[Seconds, ...]  # when jobs may be moved again, if no epoch ends before
    too_large: dict[JobId, int]  # wants at least so many slots, which the cluster has not
    widest: int  # slots of the largest node
    capacity: int  # slots in play
    speedup_exponent: float
    spans: dict[tuple[int, int, int, bool], float] = field(default_factory=dict)  # remembered

    @cached_property
    def rows(self) -> IntArray:
        """0 to J - 1."""
        return np.arange(len(self.cases))

    @cached_property
    def allowed(self) -> BoolArray:
        """Levels that jobs may have, shape (J, 1 + L)."""
        return np.isfinite(self.worth)

    @cached_property
    def lowest(self) -> IntArray:
        """The lowest level that each job may have: waiting, but for those that must stay."""
        return np.asarray(self.allowed.argmax(axis=1), dtype=np.int64)

    @cached_property
    def nodes(self) -> list[int]:
        """`node_of`, quick to look into one by one."""
        found: list[int] = self.node_of.tolist()
        return found

    @cached_property
    def spread(self) -> BoolArray:
        """Jobs that are on more nodes than they need, and may be moved; shape (J,)."""
        return np.array([self._is_spread(case) for case in self.cases], dtype=np.bool_)

    def _is_spread(self, case: Case) -> bool:
        if not case.now or case.gated:
            return False
        return len({self.nodes[slot] for slot in case.now}) > -(-len(case.now) // self.widest)


class Desk:
    """Builds problems; what did not change since the last one is not worked out again."""

    def __init__(self, knowledge: Knowledge, options: OnesOptions) -> None:
        self._knowledge = knowledge
        self._options = options
        self._names: tuple[SlotId, ...] = ()
        self._place: dict[SlotId, int] = {}
        self._node_of: IntArray = np.zeros(0, dtype=np.int64)
        self._widest = 1
        self._cases: dict[JobId, tuple[_Key, Case]] = {}
        self._offers: dict[tuple[object, ...], Offers] = {}
        self._now = Seconds(0.0)

    def build(self, view: ClusterView, now: Seconds) -> Problem:
        """The problem that `view` poses at `now`."""
        self._number(view)
        movable: dict[JobId, JobView] = {}
        backing_off: dict[JobId, Seconds] = {}
        kept: dict[JobId, dict[SlotId, int]] = {}
        up = {slot.slot for slot in view.slots if slot.up}
        for name, job in view.jobs.items():
            stuck = not job.movable or job.retry_at > now or not job.running_on.keys() <= up
            if job.running_on and stuck:  # slots of a node that is away can be handed to nobody
                kept[name] = dict(job.running_on)
            elif job.movable and not job.running_on and job.ready_at > now:
                backing_off[name] = job.ready_at
            elif job.movable:
                movable[name] = job
        mine = {slot for job in movable.values() for slot in job.running_on}
        closed = {slot for placed in kept.values() for slot in placed} | mine
        free_now = [n for n, s in enumerate(view.slots) if s.usable and s.slot not in closed]
        free_soon = [n for n, s in enumerate(view.slots) if s.leaving and s.slot not in closed]
        too_large = {
            name: job.least
            for name, job in movable.items()
            if not job.running_on and job.least > len(view.slots)
        }
        contended = any(not j.running_on and n not in too_large for n, j in movable.items())
        self._knowledge.meet(view.jobs.values(), contended=contended, now=now)
        idle = len(free_now) + len(free_soon)
        self._now = now
        room = _Room(capacity=len(mine) + idle, idle=idle, contended=contended, now=now)
        cases = [self._case(job, room) for name, job in movable.items() if name not in too_large]
        if len(self._cases) > 2 * len(view.jobs) + 100:
            self._cases = {n: c for n, c in self._cases.items() if n in view.jobs}
        return self._tabulated(
            cases,
            version=view.version,
            kept=kept,
            slots=self._names,
            node_of=self._node_of,
            widest=self._widest,
            capacity=room.capacity,
            free_now=tuple(free_now),
            free_soon=tuple(free_soon),
            backing_off=backing_off,
            gates=tuple(self._knowledge.gate(case.job) for case in cases if case.gated),
            too_large=too_large,
        )

    def _number(self, view: ClusterView) -> None:
        """Give every slot a number, the same as long as the cluster has the same slots."""
        names = tuple(slot.slot for slot in view.slots)
        if names == self._names:
            return
        nodes: dict[NodeId, int] = {}
        numbers = [nodes.setdefault(slot.node, len(nodes)) for slot in view.slots]
        self._names, self._place = names, {name: n for n, name in enumerate(names)}
        self._node_of = np.array(numbers, dtype=np.int64)
        self._widest = max(Counter(numbers).values(), default=1)
        self._cases.clear()

    def _case(self, job: JobView, room: _Room) -> Case:
        """The job as the search sees it."""
        knowledge, options = self._knowledge, self._options
        gated = bool(job.running_on) and knowledge.gated(job, room.now)
        limit, warm = knowledge.limit(job), knowledge.warm(job)
        family = knowledge.family(job.family)
        model = family.speed(job.batch_size)
        samples = knowledge.remaining(job)
        size = len(job.running_on)
        most = min(job.most, room.capacity)
        if gated:  # it may grow onto idle slots, and make room for one that waits
            most = min(most, size + (0 if room.contended else room.idle))
        tried = knowledge.may_have(job, room.now)
        if tried is not None:
            most = min(most, max(size, tried))
        key = (
            family.edition, limit, warm, gated, samples, most,
            gated and room.contended, family.largest,
        )  # fmt: skip
        known = self._cases.get(job.job)
        if known is not None and known[0] == key and known[1].job is job:
            return known[1]
        now_on = tuple(self._place[slot] for slot in job.running_on if slot in self._place)
        least = min(job.least, size) if size else job.least
        if gated and not room.contended:
            least = size
        most = min(most, max(min(limit, job.batch_limit), job.least))
        if warm:
            largest = max(size, family.largest, job.least)
            most = min(most, int(options.growth * largest))
        else:  # Start: one slot until a few steps were taken
            most = min(most, max(size, least))
        sizes = self._sizes(job, least, most)
        nodes = np.maximum(1, -(-sizes // self._widest))
        nodes[sizes == size] = max(1, len({int(self._node_of[place]) for place in now_on}))
        offered = self._offered(job, (family.edition, limit, gated), sizes, nodes)
        one_s = remaining_s(samples, offered.one_speed, known=offered.known)
        case = Case(
            job=job,
            now=now_on,
            level=int(np.searchsorted(sizes, size)) + 1 if size else 0,
            offers=offered,
            limit=limit,
            remaining_s=one_s,
            keeps=self._keeps(job, offered, one_s, size),
            moved=self._moved(offered, one_s, size),
            again=self._again(job, one_s),
            model=model,
            gated=gated,
        )
        self._cases[job.job] = (key, case)
        return case

    def _offered(
        self, job: JobView, known: tuple[int, int, bool], sizes: IntArray, nodes: IntArray
    ) -> Offers:
        """The same for all jobs of a family that stand alike."""
        key = (
            job.family, known, job.batch_size, job.batch_limit, job.local_limit, job.noise_scale,
            job.noise_epochs, job.last_batch, len(job.running_on), sum(job.running_on.values()),
            sizes.tobytes(), nodes.tobytes(),
        )  # fmt: skip
        found = self._offers.get(key)
        if found is None:
            if len(self._offers) > KEPT_OFFERS:
                self._offers.clear()
            found = self._offers[key] = offers(
                job, self._knowledge, self._options, sizes, nodes, keep_batch=known[2]
            )
        return found

    def _keeps(self, job: JobView, known: Offers, one_s: float, size: int) -> FloatArray:
        """A first start is no change: every job needs one."""
        if not size and not job.epoch and not job.samples_done:
            return np.ones(len(known.sizes))
        stall = self._options.rescale_stall_s
        if not size:
            stall = self._start_stall(job)
        length = one_s if np.isfinite(one_s) else 0.0
        return kept_share(known, length, stall, self._options.change_margin, size)

    def _moved(self, known: Offers, one_s: float, size: int) -> float:
        """What is left of a job's value after it went to other slots, all else being the same."""
        if not size:
            return 1.0
        length = one_s if np.isfinite(one_s) else 0.0
        options = self._options
        share = kept_share(known, length, options.rescale_stall_s, options.change_margin, 0)
        return float(share[np.searchsorted(known.sizes, size)])

    def _again(self, job: JobView, one_s: float) -> float:
        if not job.running_on:
            return 1.0
        length = one_s if np.isfinite(one_s) else 0.0
        share = stall_share(np.array([length]), self._start_stall(job), self._options.change_margin)
        return float(share[0])

    def _start_stall(self, job: JobView) -> float:
        return job.start_s if job.start_s is not None else self._options.start_stall_s

    def _waited(self, job: JobView) -> float:
        return job.waited_s + (0.0 if job.running_on else max(0.0, self._now - job.moved_at))

    def _sizes(self, job: JobView, least: int, most: int) -> IntArray:
        """What a job may have now: up to 4 or a node's width, then whole nodes, and what it has."""
        widest = self._widest
        choices = set(range(least, min(max(widest, ANY_SIZE), most) + 1))
        choices.update(n for n in range(widest, most + 1, widest) if n >= least)
        return np.array(sorted(choices | {len(job.running_on) or job.least}), dtype=np.int64)

    def _tabulated(self, cases: list[Case], **rest: Any) -> Problem:
        options = self._options
        weight = weights(
            np.array([case.remaining_s for case in cases], dtype=np.float64),
            np.array([case.offers.gains[0] for case in cases], dtype=np.float64),
            np.array([self._waited(case.job) for case in cases], dtype=np.float64),
            np.array([case.job.ran_s for case in cases], dtype=np.float64),
            options,
        )
        levels = 1 + max((len(case.offers.sizes) for case in cases), default=0)
        sizes = np.zeros((len(cases), levels), dtype=np.int64)
        gains = np.full((len(cases), levels), -1.0)
        for row, case in enumerate(cases):
            many = 1 + len(case.offers.sizes)
            sizes[row, 1:many] = case.offers.sizes
            gains[row, 1:many] = case.offers.gains * case.keeps
        worth = values(np.maximum(gains, 0.0), weight[:, None], options)
        worth[gains < 0] = -np.inf
        gated = np.array([case.gated for case in cases], dtype=np.bool_)
        # To stop costs what it will take to start again; gated ones make room, but are not stopped.
        again = np.array([case.again for case in cases], dtype=np.float64)
        stopped = weight * (np.power(again, options.speedup_exponent) - 1.0)
        worth[:, 0] = np.where(gated, -np.inf, stopped)
        return Problem(
            cases=tuple(cases),
            sizes=sizes,
            worth=worth,
            present=np.array([case.level for case in cases], dtype=np.int64),
            weight=weight,
            speedup_exponent=options.speedup_exponent,
            **rest,
        )
