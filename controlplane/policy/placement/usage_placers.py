"""Least interference first: the placers `lif-linear` and `lif-quadratic`.

Harmony's baselines LIF-Line and LIF-Quad (Bao et al., INFOCOM '19, evaluation): "a linear or
non-linear interference model by assuming that task slowdown is a function of CPU and bandwidth
usage". Both are learnt online from the speeds and the usage that workers report; of who trains
what the model knows nothing.

Multi-resource packing: the placer `tetris-resources`.

Grandl et al., SIGCOMM '14 (Tetris), section 3.2: a task goes to a machine that has room for its
peak demands, where the dot product of demand and what is free is greatest, both as shares of the
machine. Harmony compares itself with it ("to avoid resource fragmentation"). Demands are what
workers report to use. Tetris knows every capacity; here a node's slots and cores are known, and its
bandwidth is taken to be the most that was ever used on one. Tetris does not prefer nodes in use;
here it does, because a node alone is what the next gang wants.

What workers use of their hosts, from what they report: of a job, its family, or anybody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from controlplane.policy.api import ClusterView, JobEnded, JobView, PolicyEvent, StepsSeen
from controlplane.policy.placement.placers import NodeLoad, Score
from controlplane.prediction.slowdowns import (
    Form,
    believed_weights,
    fit_usage_slowdowns,
    predicted_slowdown,
    usage_features,
)
from schemas.ids import JobId, NodeId, Seconds

MAX_USAGES = 0.8  # weight of what was known, at each report


@dataclass(frozen=True, slots=True)
class WorkerUsage:
    """Of one worker, means."""

    cores: float = 0.0
    bytes_per_s: float = 0.0  # gradients that it sends


UNKNOWN = WorkerUsage()


class WorkerUsages:
    """Smoothed reports of each job, and of all jobs of a family."""

    def __init__(self) -> None:
        """Begin with nothing reported."""
        self._jobs: dict[JobId, WorkerUsage] = {}
        self._families: dict[str, WorkerUsage] = {}

    def take(self, event: StepsSeen) -> None:
        """Take in a report; one without usage teaches nothing.

        Args:
            event: telemetry; numbers that cannot be are not in it any more.
        """
        if event.cpu_cores is None or event.sent_bytes_per_s is None:
            return
        seen = WorkerUsage(event.cpu_cores, event.sent_bytes_per_s)
        self._jobs[event.job] = _mixed(self._jobs.get(event.job), seen)
        self._families[event.family] = _mixed(self._families.get(event.family), seen)

    def forget(self, job: JobId) -> None:
        """It is over; its family is remembered.

        Args:
            job: may have reported nothing.
        """
        self._jobs.pop(job, None)

    def of(self, job: JobId, family: str) -> WorkerUsage:
        """Its own, else its family's, else the mean of all families; zeros if nobody reported."""
        known = self._jobs.get(job) or self._families.get(family)
        if known is not None or not self._families:
            return known or UNKNOWN
        many, all_ = len(self._families), self._families.values()
        return WorkerUsage(
            sum(one.cores for one in all_) / many, sum(one.bytes_per_s for one in all_) / many
        )


def _mixed(known: WorkerUsage | None, seen: WorkerUsage) -> WorkerUsage:
    if known is None:
        return seen
    return WorkerUsage(
        MAX_USAGES * known.cores + (1.0 - MAX_USAGES) * seen.cores,
        MAX_USAGES * known.bytes_per_s + (1.0 - MAX_USAGES) * seen.bytes_per_s,
    )


SETTLED_S: Final = 30.0  # after neighbours changed: newcomers may still be starting
KEPT: Final = 500  # neighbourhoods that are remembered
RIDGE: Final = 2.0  # measurements that what is believed beforehand weighs
DIGITS: Final = 6  # of predicted slow-downs, in which nodes are equally good
Around = tuple[tuple[tuple[JobId, int], ...], ...]  # on each node: other jobs and their workers
Size = tuple[str, int, int, int]  # family, slots, nodes, global batch


class LeastInterference:
    """Score a node by the predicted slow-downs that a worker there suffers and causes."""

    def __init__(self, form: Form) -> None:
        self.form: Form = form
        self._usages = WorkerUsages()
        self._weights = believed_weights(form)
        self._seen: dict[tuple[JobId, int, Around], tuple[Size, tuple[float, ...], float]] = {}
        self._stale = False
        self._view: ClusterView | None = None
        self._loads: Sequence[NodeLoad] = ()
        self._planned_at: Seconds | None = None  # of loads that nobody looked at since
        self._around: dict[JobId, tuple[Around, Seconds]] = {}  # and since when

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn usage, and how long steps are beside whom."""
        match event:
            case StepsSeen():
                self._usages.take(event)
                self._look_around()
                self._learn(event, now)
            case JobEnded():
                self._usages.forget(event.job)

    def begin(self, view: ClusterView, loads: Sequence[NodeLoad], now: Seconds) -> None:
        """A plan is being made: what was planned before is over."""
        self._look_around()
        self._view, self._loads, self._planned_at = view, loads, now
        if self._stale:
            self._fit()

    def score(self, job: JobView, load: NodeLoad) -> Score:
        """Harmony's interference level of the node: the sum of all slow-downs (case study 2)."""
        jobs = self._view.jobs if self._view is not None else {}
        mine = self._usages.of(job.job, job.family)
        uses = [
            (other, many, self._usages.of(other, jobs[other].family))
            for other, many in load.workers.items()
            if other in jobs
        ]
        cores = math.fsum(many * use.cores for _, many, use in uses)
        sent = math.fsum(many * use.bytes_per_s for _, many, use in uses)
        suffers = 0.0 if job.job in load.workers else self._slowdown(cores, sent)
        causes = 0.0
        for other, many, use in uses:
            if other != job.job:
                own = many * use.cores, many * use.bytes_per_s
                before = self._slowdown(cores - own[0], sent - own[1])
                more = cores - own[0] + mine.cores, sent - own[1] + mine.bytes_per_s
                causes += self._slowdown(*more) - before
        return (round(suffers + causes, DIGITS),)

    def _slowdown(self, cores: float, bytes_per_s: float) -> float:
        return predicted_slowdown(self.form, self._weights, cores, bytes_per_s)

    # --- learning

    def _look_around(self) -> None:
        """Who is beside whom by the last plan, and since when it is so."""
        if self._planned_at is None:
            return
        at, before, self._planned_at = self._planned_at, self._around, None
        found: dict[JobId, list[tuple[tuple[JobId, int], ...]]] = {}
        for load in self._loads:
            for job in load.workers:
                others = tuple(sorted(one for one in load.workers.items() if one[0] != job))
                found.setdefault(job, []).append(others)
        self._around = {}
        for job, nodes in found.items():
            around = tuple(nodes)
            same = before.get(job)
            since = same[1] if same is not None and same[0] == around else at
            self._around[job] = (around, since)

    def _learn(self, event: StepsSeen, now: Seconds) -> None:
        around, since = self._around.get(event.job, ((), now))
        speed = event.samples_per_s
        if len(around) != event.nodes or now - since < SETTLED_S:
            return
        if not math.isfinite(speed) or speed <= 0.0 or event.global_batch < 1:
            return
        size = (event.family, event.slots, event.nodes, event.global_batch)
        key = (event.job, event.group, around)
        self._seen.pop(key, None)
        self._seen[key] = (size, self._features(around), math.log(event.global_batch / speed))
        if len(self._seen) > KEPT:
            del self._seen[next(iter(self._seen))]
        self._stale = True

    def _features(self, around: Around) -> tuple[float, ...]:
        """Of what neighbours use on the node that is believed to be the worst."""
        jobs = self._view.jobs if self._view is not None else {}
        nodes = []
        for others in around:
            uses = [
                (many, self._usages.of(job, jobs[job].family))
                for job, many in others
                if job in jobs
            ]
            cores = sum(many * use.cores for many, use in uses)
            sent = sum(many * use.bytes_per_s for many, use in uses)
            nodes.append((self._slowdown(cores, sent), cores, sent))
        _, cores, sent = max(nodes)
        return usage_features(self.form, cores, sent)

    def _fit(self) -> None:
        sizes, features, logs = zip(*self._seen.values(), strict=True)
        self._weights = fit_usage_slowdowns(
            self.form, sizes, np.array(features), np.array(logs), RIDGE
        )
        self._stale = False


class LinearInterference(LeastInterference):
    """The placer `lif-linear`."""

    def __init__(self) -> None:
        super().__init__("linear")


class QuadraticInterference(LeastInterference):
    """The placer `lif-quadratic`."""

    def __init__(self) -> None:
        super().__init__("quadratic")


Amounts = tuple[float, float]  # cores, bytes per second that are sent


class AlignedPacking:
    """Nodes with room for all that a worker uses, those in use first, the best aligned first."""

    def __init__(self) -> None:
        """Begin with nothing reported: then only slots count."""
        self._usages = WorkerUsages()
        self._view: ClusterView | None = None
        self._loads: Sequence[NodeLoad] = ()
        self._cores: dict[NodeId, int] = {}
        self._peak_bytes_per_s = 0.0

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn what workers use."""
        match event:
            case StepsSeen():
                self._usages.take(event)
            case JobEnded():
                self._usages.forget(event.job)

    def begin(self, view: ClusterView, loads: Sequence[NodeLoad], now: Seconds) -> None:
        """A plan is being made: what was planned before is what was used since."""
        for load in self._loads:
            self._peak_bytes_per_s = max(self._peak_bytes_per_s, self._used(load)[1])
        self._view, self._loads = view, loads
        self._cores = {slot.node: slot.host_cores for slot in view.slots}

    def score(self, job: JobView, load: NodeLoad) -> Score:
        """Whether it has no room, whether it is empty, and minus the alignment."""
        mine, used = self._usages.of(job.job, job.family), self._used(load)
        there = (float(self._cores.get(load.node, 0)), self._peak_bytes_per_s)
        fits, alignment = True, len(load.free) / load.slots**2
        for asks, taken, whole in zip((mine.cores, mine.bytes_per_s), used, there, strict=True):
            if whole > 0.0:
                fits &= asks + taken <= whole
                alignment += asks / whole * max(0.0, 1.0 - taken / whole)
        return float(not fits), float(not load.workers), -round(alignment, DIGITS)

    def _used(self, load: NodeLoad) -> Amounts:
        jobs = self._view.jobs if self._view is not None else {}
        uses = [
            (many, self._usages.of(job, jobs[job].family))
            for job, many in load.workers.items()
            if job in jobs
        ]
        cores = math.fsum(many * use.cores for many, use in uses)
        return cores, math.fsum(many * use.bytes_per_s for many, use in uses)
