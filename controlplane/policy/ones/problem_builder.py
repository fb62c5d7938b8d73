"""Turns views into problems; what did not change since the last one is not worked out again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from controlplane.policy.api import ClusterView, JobView
from controlplane.policy.ones.estimates import Knowledge
from controlplane.policy.ones.interference import Neighbourhood
from controlplane.policy.ones.options import OnesOptions
from controlplane.policy.ones.problem import CLOSED, FREE, Case, Problem
from controlplane.policy.ones.size_table import (
    FloatArray,
    IntArray,
    Offers,
    kept_share,
    left_after,
    offers,
    remaining_s,
    values,
    weights,
)
from controlplane.policy.search.cluster_index import NOTHING, Site
from schemas.ids import JobId, Seconds, SlotId

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


class Desk:
    """Builds problems; what did not change since the last one is not worked out again."""

    def __init__(self, knowledge: Knowledge, options: OnesOptions) -> None:
        self._knowledge = knowledge
        self._options = options
        self._site = Site((), NOTHING, NOTHING, (), (), 1)
        self._numbered: tuple[tuple[SlotId, str], ...] = ()
        self._place: dict[SlotId, int] = {}
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
        self._knowledge.meet(view, contended=contended, now=now)
        idle = len(free_now) + len(free_soon)
        self._now = now
        room = _Room(capacity=len(mine) + idle, idle=idle, contended=contended, now=now)
        cases = [self._case(job, room) for name, job in movable.items() if name not in too_large]
        if len(self._cases) > 2 * len(view.jobs) + 100:
            self._cases = {n: c for n, c in self._cases.items() if n in view.jobs}
        return self._tabulated(
            cases,
            room,
            version=view.version,
            kept=kept,
            site=self._site,
            owner=self._owners(cases, free_now, free_soon),
            early=np.isin(np.arange(len(view.slots)), free_now),
            capacity=room.capacity,
            backing_off=backing_off,
            gates=tuple(self._knowledge.gate(case.job) for case in cases if case.gated),
            too_large=too_large,
            slow=self._knowledge.slowness(self._site.types, [case.job.family for case in cases]),
            neighbours=self._neighbours(cases, kept, view),
            evacuates=self._options.migration,
        )

    def _neighbours(
        self, cases: Sequence[Case], kept: Mapping[JobId, Mapping[SlotId, int]], view: ClusterView
    ) -> Neighbourhood | None:
        """What is known of who slows down whom."""
        names = dict.fromkeys([case.job.family for case in cases])
        names |= dict.fromkeys(view.jobs[job].family for job in kept)
        numbers = {name: number for number, name in enumerate(names)}
        theta = self._knowledge.theta(list(numbers))
        if theta is None:
            return None
        fixed = np.zeros((len(self._site.slots_on), 2 * len(numbers)))
        for job, placed in kept.items():
            places = [self._place[slot] for slot in placed if slot in self._place]
            nodes = set(self._site.node_of[places].tolist())
            for node in nodes:
                fixed[node, 2 * numbers[view.jobs[job].family] + (len(nodes) > 1)] += 1.0
        family = np.array([numbers[case.job.family] for case in cases], dtype=np.int64)
        return Neighbourhood(theta, family, fixed)

    def _number(self, view: ClusterView) -> None:
        """Give every slot a number, the same as long as the cluster has the same slots."""
        numbered = tuple((slot.slot, slot.model) for slot in view.slots)
        if numbered != self._numbered:
            self._numbered = numbered
            self._site = Site.of(view)
            self._place = {name: n for n, name in enumerate(self._site.slots)}
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
        tried = knowledge.may_have(job, room.now)
        if tried is not None:
            most = min(most, max(size, tried))
        noise = knowledge.noise_scale(job)
        others = _coarse(knowledge.remaining_service(job, room.now))
        key = (
            family.edition, noise, limit, warm, gated, samples, most, family.largest, others,
        )  # fmt: skip
        known = self._cases.get(job.job)
        if known is not None and known[0] == key and known[1].job is job:
            return known[1]
        now_on = tuple(self._place[slot] for slot in job.running_on if slot in self._place)
        least = min(job.least, size) if size else job.least
        most = min(most, max(min(limit, job.batch_limit), job.least))
        if warm:
            largest = max(size, family.largest, job.least)
            most = min(most, int(options.growth * largest))
        else:  # Start: one slot until a few steps were taken
            most = min(most, max(size, least))
        sizes = self._sizes(job, least, most)
        nodes = np.maximum(1, -(-sizes // self._site.widest))
        nodes[sizes == size] = max(1, len({int(self._site.node_of[place]) for place in now_on}))
        offered = self._offered(job, (family.edition, limit, gated), noise, sizes, nodes)
        one_s = remaining_s(samples, offered.one_speed, known=offered.known)
        if others is not None:
            one_s = others if math.isnan(one_s) else max(one_s, others)
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
        self,
        job: JobView,
        known: tuple[int, int, bool],
        noise: float,
        sizes: IntArray,
        nodes: IntArray,
    ) -> Offers:
        """The same for all jobs of a family that stand alike."""
        key = (
            job.family, known, job.batch_size, job.batch_limit, job.local_limit, noise,
            job.last_batch, len(job.running_on), sum(job.running_on.values()),
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

    def _owners(
        self, cases: Sequence[Case], free_now: Sequence[int], free_soon: Sequence[int]
    ) -> IntArray:
        owner = np.full(len(self._site.slots), CLOSED, dtype=np.int64)
        owner[list(free_now)] = owner[list(free_soon)] = FREE
        for row, case in enumerate(cases):
            owner[list(case.now)] = row
        return owner

    def _keeps(self, job: JobView, known: Offers, one_s: float, size: int) -> FloatArray:
        """A first start is no change: every job needs one."""
        if not size and not job.epoch and not job.samples_done:
            return np.ones(len(known.sizes))
        stall = self._options.rescale_stall_s
        if not size:
            stall = self._start_stall(job)
        length = one_s if math.isfinite(one_s) else 0.0
        return kept_share(known, length, stall, self._options.change_margin, size)

    def _moved(self, known: Offers, one_s: float, size: int) -> float:
        """What is left of a job's value after it went to other slots, all else being the same."""
        if not size:
            return 1.0
        gain = float(known.gains[np.searchsorted(known.sizes, size)])
        left_s = (one_s if math.isfinite(one_s) else 0.0) / max(gain, 1e-9)
        return left_after(left_s, self._options.rescale_stall_s, self._options.change_margin)

    def _again(self, job: JobView, one_s: float) -> float:
        if not job.running_on:
            return 1.0
        left_s = one_s if math.isfinite(one_s) else 0.0
        return left_after(left_s, self._start_stall(job), self._options.change_margin)

    def _start_stall(self, job: JobView) -> float:
        return job.start_s if job.start_s is not None else self._options.start_stall_s

    def _waited(self, job: JobView) -> float:
        return job.waited_s + (0.0 if job.running_on else max(0.0, self._now - job.moved_at))

    def _sizes(self, job: JobView, least: int, most: int) -> IntArray:
        """What a job may have now: up to 4 or a node's width, then whole nodes, and what it has."""
        widest = self._site.widest
        choices = set(range(least, min(max(widest, ANY_SIZE), most) + 1))
        choices.update(n for n in range(widest, most + 1, widest) if n >= least)
        return np.array(sorted(choices | {len(job.running_on) or job.least}), dtype=np.int64)

    def _tabulated(self, cases: list[Case], room: _Room, **rest: Any) -> Problem:
        options = self._options
        weight = weights(
            np.array([case.remaining_s for case in cases], dtype=np.float64),
            np.array([case.offers.gains[0] for case in cases], dtype=np.float64),
            np.array([self._waited(case.job) for case in cases], dtype=np.float64),
            np.array([case.job.ran_s for case in cases], dtype=np.float64),
            options,
        ) * np.array([case.job.priority for case in cases], dtype=np.float64)
        levels = 1 + max((len(case.offers.sizes) for case in cases), default=0)
        sizes = np.zeros((len(cases), levels), dtype=np.int64)
        spans = np.zeros((len(cases), levels), dtype=np.int64)
        gains = np.full((len(cases), levels), -1.0)
        for row, case in enumerate(cases):
            many = 1 + len(case.offers.sizes)
            sizes[row, 1:many] = case.offers.sizes
            spans[row, 1:many] = case.offers.nodes
            gains[row, 1:many] = case.offers.gains * case.keeps
        worth = values(np.maximum(gains, 0.0), weight[:, None], options)
        worth[gains < 0] = -np.inf
        gated = np.array([case.gated for case in cases], dtype=np.bool_)
        # A gated job may grow onto idle slots, and makes room for one that waits.
        more = sizes - np.array([[len(case.now)] for case in cases], dtype=np.int64).reshape(-1, 1)
        if room.contended or not room.idle:
            worth[gated[:, None] & (more > 0)] = -np.inf
        if not room.contended:
            worth[gated[:, None] & (more < 0)] = -np.inf
        # To stop costs what it will take to start again; gated ones make room, but are not stopped.
        again = np.array([case.again for case in cases], dtype=np.float64)
        stopped = weight * (np.power(again, options.speedup_exponent) - 1.0)
        running = np.array([bool(case.now) for case in cases], dtype=np.bool_)
        stopped -= np.where(running, options.pause_margin * weight, 0.0)
        worth[:, 0] = np.where(gated, -np.inf, stopped)
        return Problem(
            cases=tuple(cases),
            sizes=sizes,
            spans=spans,
            worth=worth,
            moved=np.array([case.moved for case in cases], dtype=np.float64),
            free_to_move=np.array(
                [bool(case.now) and not case.gated for case in cases], dtype=np.bool_
            ),
            present=np.array([case.level for case in cases], dtype=np.int64),
            weight=weight,
            speedup_exponent=options.speedup_exponent,
            **rest,
        )


def _coarse(service: float | None) -> float | None:
    """To a quarter of a doubling: it changes with every second, which should not matter."""
    if service is None or service <= 0.0:
        return None
    return float(2.0 ** (round(4.0 * math.log2(service)) / 4.0))
