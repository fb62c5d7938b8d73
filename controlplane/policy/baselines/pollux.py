"""Pollux as published: a genetic search over placements, with tuned batches (OSDI '21)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np
from numpy.random import default_rng

from controlplane.policy.api import (
    ClusterView,
    EpochSeen,
    ImmediatePolicy,
    JobEnded,
    JobView,
    Plan,
    PolicyEvent,
    StepsSeen,
)
from controlplane.policy.baselines.pollux_search import AllocationProblem, AllocationSearch, States
from controlplane.policy.options import PolluxOptions
from controlplane.policy.placement.sizes import Rounds
from controlplane.policy.placement.slot_partition import (
    Partition,
    compose_plan,
    partition_of,
    with_batch,
)
from controlplane.prediction import FloatArray
from controlplane.prediction.pollux_throughput import (
    PASSES_ALONE,
    BatchBounds,
    PassModel,
    PassSample,
    best_batches,
    fit_passes,
)
from controlplane.prediction.step_times import Size, StepTimes
from schemas.ids import JobId, NodeId, Seconds, SlotId, node_of

MAX_SIZES: Final = 400  # latest sizes of a job; bounds the time of a fit
MIN_S: Final = 1e-9  # least seconds of a pass
SEVERAL: Final = np.array([[1], [2]])  # one node or more: the model makes no other difference

Workers = dict[NodeId, int]  # workers of a job on each of its nodes


@dataclass(slots=True)
class _JobRecord:
    """Measurements of one job."""

    compute_s: StepTimes[Size] = field(default_factory=lambda: StepTimes(MAX_SIZES))
    pass_s: StepTimes[Size] = field(default_factory=lambda: StepTimes(MAX_SIZES))
    largest: int = 0  # most slots that were measured
    largest_pass: int = 0  # samples
    splits: bool = False  # True if memory made steps take several passes
    noise_scale: float | None = None  # latest
    edition: int = 0  # number of fits
    placements: int = 0  # number of placements so far
    workers: Workers = field(default_factory=dict)  # latest
    best: tuple[object, float, int] = (None, 0.0, 0)  # latest inputs, goodput and batch
    _model: PassModel | None = None

    def observe(self, event: EpochSeen | StepsSeen) -> None:
        """Record the times of a pass, its size, and the noise scale."""
        noise_scale = event.noise_scale
        if noise_scale is not None and noise_scale > 0.0:
            self.noise_scale = noise_scale
        rate, slots, parts = event.samples_per_s, event.slots, event.step_times
        if parts is not None:
            local, whole_s, sync_s = parts.local_batch, parts.pass_s, parts.sync_s
            self.splits |= parts.passes > (PASSES_ALONE if slots == 1 else 1)
        elif math.isfinite(rate) and rate > 0 and slots:
            local, sync_s = max(1, round(event.global_batch / slots)), 0.0
            whole_s = event.global_batch / rate
        else:
            return
        if not (math.isfinite(whole_s) and whole_s > MIN_S and local > 0 and slots > 0):
            return
        self.largest_pass = max(self.largest_pass, local)
        self.largest = max(self.largest, slots)
        size = (event.nodes, slots, local)
        changed = self.compute_s.add(size, max(MIN_S, whole_s - sync_s))
        if self.pass_s.add(size, whole_s) or changed:
            self._model = None

    @property
    def most_pass(self) -> float:
        """Estimated largest pass of one slot, in samples."""
        return self.largest_pass if self.splits else math.inf

    def model(self) -> PassModel | None:
        """Return the model of passes, or None before the first measurement."""
        means = self.pass_s.means
        if self._model is None and means:
            self._model = fit_passes([
                PassSample(*size, self.compute_s.means[size].step_s, mean.step_s)
                for size, mean in means.items()
            ])  # fmt: skip
            self.compute_s.mark_fitted()
            self.pass_s.mark_fitted()
            self.edition += 1
        return self._model


@dataclass(frozen=True, slots=True)
class _Target:
    workers: Workers
    speedup: float  # relative to a fair share


class Pollux(ImmediatePolicy):
    """Policy that searches for the placements with the greatest mean of speed-ups in goodput.

    A round takes all generations of the search at once, because its result is used only at its end.
    The random numbers depend only on the option `seed` and the version of the view.
    """

    def __init__(self, options: PolluxOptions | None = None) -> None:
        self.options = options or PolluxOptions()
        self._rounds = Rounds(self.options.interval_s)
        self._records: dict[JobId, _JobRecord] = {}
        self._targets: dict[JobId, _Target] = {}
        self._population: tuple[States, list[JobId], list[NodeId]] | None = None

    # --- the policy's methods

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn the speed and the noise of a job from its own reports."""
        match event:
            case EpochSeen() | StepsSeen():
                if isinstance(event, StepsSeen) or event.whole:
                    self._record(event.job).observe(event)
            case JobEnded():
                self._records.pop(event.job, None)

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Return the placements of the last or a new round, with the best batches on them."""
        partition = partition_of(view, now)
        self._follow(view)
        if self._rounds.is_due(partition, self._targets) or not self._fits(partition):
            self._targets = self._round(partition)
            self._rounds.begin(now)
        slots = self._slots(partition)
        return compose_plan(
            partition,
            {name: self._local_batches(view.jobs[name], chosen) for name, chosen in slots.items()},
            self._why,
            restart=tuple(job.job for job in partition.running if _restarts(job, slots)),
            wake_at=self._rounds.next_at(partition),
        )

    def batches(self, view: ClusterView, now: Seconds) -> Plan:
        """Return the best batches of running jobs on their slots."""
        partition = partition_of(view, now)
        found = {
            job.job: batches
            for job in partition.running
            if (batches := self._local_batches(job, list(job.running_on))) != job.running_on
        }
        return Plan(based_on=view.version, local_batch=found)

    # --- measurements

    def _record(self, job: JobId) -> _JobRecord:
        return self._records.setdefault(job, _JobRecord())

    def _follow(self, view: ClusterView) -> None:
        """Count changes of the jobs' placements; a repeated view changes nothing."""
        for name in [name for name in self._records if name not in view.jobs]:
            del self._records[name]
        for name, job in view.jobs.items():
            record, workers = self._record(name), _workers(job)
            record.placements += bool(workers) and workers != record.workers
            record.workers = workers

    def _bounds(self, job: JobView) -> BatchBounds:
        return BatchBounds(
            first=job.batch_size,
            least=job.batch_size,
            most=job.batch_limit,
            most_local=job.local_limit,
            most_pass=self._record(job.job).most_pass,
        )

    def _noise_scale(self, job: JobView) -> float:
        known = self._record(job.job).noise_scale
        return self.options.noise_scale_prior * job.batch_size if known is None else known

    # --- a round

    def _round(self, partition: Partition) -> dict[JobId, _Target]:
        now, jobs = partition.now, [*partition.running, *partition.waiting]
        jobs.sort(key=lambda job: (job.served(now), job.submitted_at, job.job))
        if not jobs or not partition.room:
            return {}
        rng = default_rng((self.options.seed, partition.view.version))
        nodes, problem = self._problem(jobs, partition)
        search = AllocationSearch(problem, self._begin(jobs, nodes, problem), rng)
        search.evolve(self.options.generations)
        self._population = search.front, [job.job for job in jobs], nodes
        best = search.best
        speedups = problem.of(best[None])[0]
        return {
            job.job: _Target(
                {node: int(many) for node, many in zip(nodes, row, strict=True) if many},
                float(speedup),
            )
            for job, row, speedup in zip(jobs, best, speedups, strict=True)
        }

    def _problem(
        self, jobs: list[JobView], partition: Partition
    ) -> tuple[list[NodeId], AllocationProblem]:
        all_slots = Counter(slot.node for slot in partition.view.slots)
        usable = _usable(partition)
        nodes = list(all_slots)
        shared: set[NodeId] = set()
        for job in partition.pinned:
            workers = _workers(job)
            shared |= workers.keys() if len(workers) > 1 else set()
        limits = [self._limits(job, len(partition.view.slots)) for job in jobs]
        fair = math.ceil(len(partition.view.slots) / len(jobs))
        widest = max(most for _, most in limits)
        problem = AllocationProblem(
            speedups=np.array([
                self._speedups(job, most, fair, widest)
                for job, (_, most) in zip(jobs, limits, strict=True)
            ]),
            present=_rows(jobs, nodes),
            least=np.array([least for least, _ in limits]),
            most=np.array([most for _, most in limits]),
            kept=np.array([self._share_kept(job, partition.now) for job in jobs]),
            slots=np.array([usable[node] for node in nodes]),
            all_slots=np.array([all_slots[node] for node in nodes]),
            shared=np.array([int(node in shared) for node in nodes]),
            power=self.options.power,
        )  # fmt: skip
        return nodes, problem

    def _limits(self, job: JobView, cluster: int) -> tuple[int, int]:
        """Return least and most slots: at most `growth` times those measured (section 4.2.1)."""
        least = max(job.least, -(-job.batch_size // max(1, job.local_limit)))
        grown = int(self.options.growth * self._record(job.job).largest)
        return least, max(1, min(job.most, job.batch_limit, cluster, max(least, grown)))

    def _speedups(self, job: JobView, most: int, fair: int, widest: int) -> FloatArray:
        """Return the speed-ups on one and several nodes by slots, shape (2, widest + 1)."""
        found = np.zeros((2, widest + 1))
        slots = np.arange(1, most + 1)
        model = self._record(job.job).model()
        if model is None:
            found[:, slots] = slots / fair
            return found
        of = partial(best_batches, model, self._bounds(job), self._noise_scale(job))
        base, _ = of(np.array([1]), np.array([min(fair, job.batch_limit)]))
        goodputs, _ = of(SEVERAL, np.broadcast_to(slots, (2, most)))
        found[:, slots] = goodputs / (base[0] or goodputs.max() or 1.0)
        return found

    def _share_kept(self, job: JobView, now: Seconds) -> float:
        """Return (T - R delta) / (T + delta): the part of age T that R + 1 restarts leave."""
        age, cost = max(0.0, now - job.submitted_at), self.options.rescale_stall_s
        if not cost:
            return 1.0
        restarts = max(0, self._record(job.job).placements - 1)
        return max(0.0, (age - restarts * cost) / (age + cost))

    def _begin(
        self, jobs: list[JobView], nodes: list[NodeId], problem: AllocationProblem
    ) -> States:
        """Return the candidates of the last round for the present jobs, or the present state."""
        if self._population is None:
            return problem.present[None]
        states, names, places = self._population
        row_of = {name: row for row, name in enumerate(names)}
        column_of = {node: column for column, node in enumerate(places)}
        found = np.zeros((len(states), *problem.present.shape), dtype=states.dtype)
        rows = [(new, row_of[job.job]) for new, job in enumerate(jobs) if job.job in row_of]
        columns = [(new, column_of[node]) for new, node in enumerate(nodes) if node in column_of]
        if rows and columns:
            new_rows, old_rows = np.array(rows).T
            new_columns, old_columns = np.array(columns).T
            found[:, new_rows[:, None], new_columns] = states[:, old_rows[:, None], old_columns]
        return found

    # --- results

    def _fits(self, partition: Partition) -> bool:
        """True if the nodes still have room for the targets, and for jobs without a target."""
        needed: Counter[NodeId] = Counter()
        for job in (*partition.running, *partition.waiting):
            needed.update(self._wanted(job))
        return needed <= _usable(partition)

    def _wanted(self, job: JobView) -> Workers:
        target = self._targets.get(job.job)
        return _workers(job) if target is None else target.workers

    def _slots(self, partition: Partition) -> dict[JobId, list[SlotId]]:
        """Return the slots of each job; a job keeps slots on nodes that it stays on."""
        kept: dict[JobId, list[SlotId]] = {}
        for job in partition.running:
            left = Counter(self._wanted(job))
            kept[job.job] = []
            for slot in job.running_on:
                if left[node_of(slot)] > 0:
                    left[node_of(slot)] -= 1
                    kept[job.job].append(slot)
            partition.release([slot for slot in job.running_on if slot not in kept[job.job]])
        for job in (*partition.waiting, *partition.running):  # free slots first to new jobs
            missing = Counter(self._wanted(job))
            missing.subtract(map(node_of, kept.setdefault(job.job, [])))
            for node, many in missing.items():
                free = partition.free[node] if many else []
                kept[job.job] += free[:many]
                del free[:many]
        return {name: slots for name, slots in kept.items() if slots}

    def _local_batches(self, job: JobView, slots: list[SlotId]) -> dict[SlotId, int]:
        """Return the best batch; on the same slots only if it gains more than the margin."""
        record, many, stays = self._record(job.job), len(slots), job.running_on.keys() == set(slots)
        model = record.model()
        if model is None:
            batch = max(job.batch_size, many)
            return dict(job.running_on) if stays else with_batch(job, batch, slots)
        nodes = np.array([len({node_of(slot) for slot in slots})])
        bounds, noise_scale = self._bounds(job), self._noise_scale(job)
        key = (record.edition, bounds, noise_scale, int(nodes[0]), many)
        if record.best[0] != key:
            found = best_batches(model, bounds, noise_scale, nodes, np.array([many]))
            record.best = (key, float(found[0][0]), int(found[1][0]))
        _, goodput, batch = record.best
        present = sum(job.running_on.values())
        if stays and batch != present and self.options.batch_margin:
            fixed = replace(bounds, least=present, most=present)
            (current,), _ = best_batches(model, fixed, noise_scale, nodes, np.array([many]))
            if goodput <= current * (1 + self.options.batch_margin):
                return dict(job.running_on)
        return with_batch(job, batch, slots)

    def _why(self, job: JobView, slots: int) -> tuple[str, dict[str, float]]:
        target = self._targets.get(job.job)
        if target is None:
            return "placements are chosen again in the next round", {}
        numbers = {"speedup": target.speedup, "noise_scale": self._noise_scale(job)}
        if slots:
            return f"expected: {target.speedup:.2f} x the goodput of a fair share", numbers
        return "the best placements that were found give all slots to other jobs", numbers


def _workers(job: JobView) -> Workers:
    return dict(Counter(map(node_of, job.running_on)))


def _usable(partition: Partition) -> Counter[NodeId]:
    """Return the slots of each node that are free or held by a job that may change."""
    usable = Counter({node: len(slots) for node, slots in partition.free.items()})
    for job in partition.running:
        usable.update(_workers(job))
    return usable


def _rows(jobs: list[JobView], nodes: list[NodeId]) -> States:
    """Return the present workers of each job on each node, shape (J, N)."""
    column_of = {node: column for column, node in enumerate(nodes)}
    found = np.zeros((len(jobs), len(nodes)), dtype=np.int16)
    for row, job in enumerate(jobs):
        for node, many in _workers(job).items():
            found[row, column_of[node]] = many
    return found


def _restarts(job: JobView, slots: dict[JobId, list[SlotId]]) -> bool:
    """True if a job moves, but has no sample for each of its old and new slots together."""
    chosen = slots.get(job.job, [])
    both = len(job.running_on.keys() | set(chosen))
    return both > len(job.running_on) and both > max(len(chosen), job.batch_limit)
