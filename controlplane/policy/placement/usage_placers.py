"""Placers by the resources that workers use: `lif-linear`, `lif-quadratic` and `tetris-resources`.

Least interference first (LIF) placers are baselines of Harmony (Bao et al., INFOCOM '19,
evaluation): "a linear or non-linear interference model by assuming that task slowdown is a function
of CPU and bandwidth usage". Both learn online from the speeds and the usage that workers report.
The model does not know what the jobs train.

`tetris-resources` is multi-resource packing (Tetris: Grandl et al., SIGCOMM '14, section 3.2). A
task goes to a machine with room for its peak demands. Among these, the machine with the greatest
dot product of demand and free resources wins (both are shares of its capacity). Harmony compares
itself with Tetris ("to avoid resource fragmentation"). Here demands are the usage that workers
report. Tetris knows every capacity. Here slots and cores of a node are known, and the bandwidth of
a node is assumed to be the most that was ever used on one node. Unlike Tetris, nodes in use are
preferred, because the next gang needs an empty node.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from controlplane.policy.api import ClusterView, JobEnded, JobView, PolicyEvent, StepsSeen
from controlplane.policy.placement.placers import NodeLoad, Score
from controlplane.prediction.slowdowns import (
    Form,
    fit_usage_slowdowns,
    predicted_slowdown,
    prior_weights,
    usage_features,
)
from schemas.ids import JobId, NodeId, Seconds

USAGE_MEMORY = 0.8  # weight of the former mean at each report


class WorkerUsage(NamedTuple):
    """The mean resource usage of one worker."""

    cores: float = 0.0
    bytes_per_s: float = 0.0  # bytes of gradients that the worker sends


UNKNOWN = WorkerUsage()


class WorkerUsages:
    """Smoothed usage of one worker, for each job and for each family."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, WorkerUsage] = {}
        self._families: dict[str, WorkerUsage] = {}

    def observe(self, event: PolicyEvent) -> None:
        """Record the usage in a report, if any; forget a job that ended, but not its family."""
        match event:
            case StepsSeen(cpu_cores=cores, sent_bytes_per_s=sent):
                if cores is None or sent is None:
                    return
                seen = WorkerUsage(cores, sent)
                self._jobs[event.job] = _mixed(self._jobs.get(event.job), seen)
                self._families[event.family] = _mixed(self._families.get(event.family), seen)
            case JobEnded():
                self._jobs.pop(event.job, None)

    def of(self, job: JobId, family: str) -> WorkerUsage:
        """Return the usage of the job, else of its family, else the mean of families, else 0."""
        known = self._jobs.get(job) or self._families.get(family)
        if known is not None or not self._families:
            return known or UNKNOWN
        columns = zip(*self._families.values(), strict=True)
        return WorkerUsage(*(sum(column) / len(column) for column in columns))

    def total(
        self, workers: Iterable[tuple[JobId, int]], view: ClusterView | None
    ) -> tuple[float, float]:
        """Return the cores and the sent bytes/s of these workers; skip jobs not in the view."""
        jobs = view.jobs if view is not None else {}
        uses = [(many, self.of(job, jobs[job].family)) for job, many in workers if job in jobs]
        cores = math.fsum(many * use.cores for many, use in uses)
        return cores, math.fsum(many * use.bytes_per_s for many, use in uses)


def _mixed(known: WorkerUsage | None, seen: WorkerUsage) -> WorkerUsage:
    if known is None:
        return seen
    both = zip(known, seen, strict=True)
    return WorkerUsage(*(USAGE_MEMORY * old + (1.0 - USAGE_MEMORY) * new for old, new in both))


SETTLED_S: Final = 30.0  # wait after a change of neighbours: newcomers may still be starting
MAX_NEIGHBOURHOODS: Final = 500  # kept measurements of neighbourhoods
RIDGE: Final = 2.0  # weight of the prior, as a number of measurements
DIGITS: Final = 6  # digits of slow-downs, so that equal nodes tie
Neighbourhood = tuple[
    tuple[tuple[JobId, int], ...], ...
]  # on each node: other jobs and their workers
Size = tuple[str, int, int, int]  # family, slots, nodes, global batch


class LeastInterference:
    """Scorer by the predicted slow-downs that a worker on a node suffers and causes."""

    def __init__(self, form: Form) -> None:
        self.form: Form = form
        self._usages = WorkerUsages()
        self._weights = prior_weights(form)
        self._seen: dict[
            tuple[JobId, int, Neighbourhood], tuple[Size, tuple[float, ...], float]
        ] = {}
        self._stale = False
        self._view: ClusterView | None = None
        self._loads: Sequence[NodeLoad] = ()
        self._planned_at: Seconds | None = None  # time of `_loads`, until they are evaluated
        self._neighbourhoods: dict[
            JobId, tuple[Neighbourhood, Seconds]
        ] = {}  # neighbours, since when

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn the usage of workers, and step times beside the current neighbours."""
        self._usages.observe(event)
        if isinstance(event, StepsSeen):
            self._update_neighbourhoods()
            self._learn(event, now)

    def begin(self, view: ClusterView, loads: Sequence[NodeLoad], now: Seconds) -> None:
        """Start a plan; the loads of the previous plan have become final."""
        self._update_neighbourhoods()
        self._view, self._loads, self._planned_at = view, loads, now
        if self._stale:
            self._fit()

    def score(self, job: JobView, load: NodeLoad) -> Score:
        """Return Harmony's interference level of the node: the sum of slow-downs (case study 2)."""
        mine = self._usages.of(job.job, job.family)
        cores, sent = self._usages.total(load.workers.items(), self._view)
        suffers = 0.0 if job.job in load.workers else self._slowdown(cores, sent)
        causes = 0.0
        for worker in load.workers.items():
            other = worker[0]
            if other != job.job and self._view is not None and other in self._view.jobs:
                own = self._usages.total([worker], self._view)
                before = self._slowdown(cores - own[0], sent - own[1])
                more = cores - own[0] + mine.cores, sent - own[1] + mine.bytes_per_s
                causes += self._slowdown(*more) - before
        return (round(suffers + causes, DIGITS),)

    def _slowdown(self, cores: float, bytes_per_s: float) -> float:
        return predicted_slowdown(self.form, self._weights, cores, bytes_per_s)

    # --- learning

    def _update_neighbourhoods(self) -> None:
        """Update each job's neighbours in the last plan, and the time of their last change."""
        if self._planned_at is None:
            return
        at, before, self._planned_at = self._planned_at, self._neighbourhoods, None
        found: dict[JobId, list[tuple[tuple[JobId, int], ...]]] = {}
        for load in self._loads:
            for job in load.workers:
                others = tuple(sorted(one for one in load.workers.items() if one[0] != job))
                found.setdefault(job, []).append(others)
        self._neighbourhoods = {}
        for job, nodes in found.items():
            around = tuple(nodes)
            same = before.get(job)
            since = same[1] if same is not None and same[0] == around else at
            self._neighbourhoods[job] = (around, since)

    def _learn(self, event: StepsSeen, now: Seconds) -> None:
        around, since = self._neighbourhoods.get(event.job, ((), now))
        speed = event.samples_per_s
        if len(around) != event.nodes or now - since < SETTLED_S:
            return
        if not math.isfinite(speed) or speed <= 0.0 or event.global_batch < 1:
            return
        size = (event.family, event.slots, event.nodes, event.global_batch)
        key = (event.job, event.group, around)
        self._seen.pop(key, None)
        self._seen[key] = (size, self._features(around), math.log(event.global_batch / speed))
        if len(self._seen) > MAX_NEIGHBOURHOODS:
            del self._seen[next(iter(self._seen))]
        self._stale = True

    def _features(self, around: Neighbourhood) -> tuple[float, ...]:
        """Return the features of the neighbours' usage on the node that slows the job down most."""
        nodes = []
        for others in around:
            cores, sent = self._usages.total(others, self._view)
            nodes.append((self._slowdown(cores, sent), cores, sent))
        _, cores, sent = max(nodes)
        return usage_features(self.form, cores, sent)

    def _fit(self) -> None:
        sizes, features, logs = zip(*self._seen.values(), strict=True)
        self._weights = fit_usage_slowdowns(
            self.form, sizes, np.array(features), np.array(logs), RIDGE
        )
        self._stale = False


LinearInterference = partial(LeastInterference, "linear")  # the placer `lif-linear`
QuadraticInterference = partial(LeastInterference, "quadratic")  # the placer `lif-quadratic`


class AlignedPacking:
    """Scorer of `tetris-resources`: nodes with room, then nodes in use, then best aligned nodes."""

    def __init__(self) -> None:
        self._usages = WorkerUsages()
        self._view: ClusterView | None = None
        self._loads: Sequence[NodeLoad] = ()
        self._cores: dict[NodeId, int] = {}
        self._peak_bytes_per_s = 0.0

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn the usage of workers."""
        self._usages.observe(event)

    def begin(self, view: ClusterView, loads: Sequence[NodeLoad], now: Seconds) -> None:
        """Start a plan; the usage in the previous plan updates the peak bandwidth."""
        for load in self._loads:
            self._peak_bytes_per_s = max(
                self._peak_bytes_per_s, self._usages.total(load.workers.items(), self._view)[1]
            )
        self._view, self._loads = view, loads
        self._cores = {slot.node: slot.host_cores for slot in view.slots}

    def score(self, job: JobView, load: NodeLoad) -> Score:
        """Return (no room, empty node, minus the alignment); less is better in each part."""
        mine = self._usages.of(job.job, job.family)
        used = self._usages.total(load.workers.items(), self._view)
        capacity = (float(self._cores.get(load.node, 0)), self._peak_bytes_per_s)
        fits, alignment = True, len(load.free) / load.slots**2
        for asks, taken, whole in zip((mine.cores, mine.bytes_per_s), used, capacity, strict=True):
            if whole > 0.0:
                fits &= asks + taken <= whole
                alignment += asks / whole * max(0.0, 1.0 - taken / whole)
        return float(not fits), float(not load.workers), -round(alignment, DIGITS)
