"""Model of the jobs in the paper's Table 2: 50 workloads by name, and how they train."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal
from zlib import crc32

from numpy.random import default_rng

from controlplane.sim.cluster import TraceError
from controlplane.sim.models.job_model import (
    ChangeCosts,
    EpochMetrics,
    JobModel,
    Placement,
    StepParts,
    Throughput,
    TrainingModel,
    job_name,
    packed,
)
from controlplane.sim.models.table2_constants import (
    ABOVE_TARGET,
    COLD_START_S,
    EPOCHS_SPREAD,
    GPUS_PER_NODE,
    MAX_SLOTS,
    PREPARE_S,
    RESTART_S,
    ROWS,
    SIZES,
    SWITCH_S,
    Row,
)
from controlplane.sim.models.table2_physics import (
    efficiency,
    lost_epochs,
    model_bytes,
    noise_scale,
    reports,
    step_parts,
    step_s,
)
from controlplane.sim.results import TraceJob
from schemas.jobs import JobSpec, StopRule


@dataclass(frozen=True, slots=True)
class Workload:
    """Model on a data set of one size."""

    name: str
    application: str  # key of `ROWS`
    row: Row
    samples: int  # ||D||


def _named(application: str, row: Row, samples: int) -> Workload:
    return Workload(f"{application}-{samples / 1000:g}k", application, row, samples)


WORKLOADS: Final[Mapping[str, Workload]] = {
    workload.name: workload
    for application, row in ROWS.items()
    for samples in SIZES[application.partition("-")[2]]
    for workload in [_named(application, row, samples)]
}


def workload_of(name: str) -> Workload:
    """Return the workload of a name: application, dash, samples in thousands, and k.

    Raises:
        TraceError: if there is no such workload.
    """
    if name in WORKLOADS:
        return WORKLOADS[name]
    near = difflib.get_close_matches(name, WORKLOADS, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else f"one of them is {next(iter(WORKLOADS))}"
    raise TraceError(f"{name!r} is not a workload of Table 2", hint, "workload")


@cache
def duration_s(name: str, slots: int) -> float:
    """Return the training seconds of a workload on packed slots with the batch tuned for them.

    Starts and the differences between jobs are not included.

    Raises:
        TraceError: if there is no such workload.
    """
    workload = workload_of(name)
    row, batch = workload.row, workload.row.tuned * slots
    seconds_per_sample = step_s(row, packed(slots, GPUS_PER_NODE), batch) / batch
    return sum(
        workload.samples
        * seconds_per_sample
        / efficiency(row, batch, noise_scale(row, epoch / row.epochs))
        for epoch in range(row.epochs + ABOVE_TARGET)
    )


def closest(gpu_seconds: float, slots: int) -> str:
    """Return the workload with the closest GPU time on these slots (ONES, appendix)."""
    return min(WORKLOADS, key=lambda name: abs(slots * duration_s(name, slots) - gpu_seconds))


GPU_TIME: Final = "gpu-time:"  # prefix of a workload given by its GPU seconds
Steps = dict[tuple[Placement, int], StepParts]  # by placement and global batch


class Table2Model(TrainingModel):
    """Model of the jobs of the paper's Table 2."""

    def __init__(self, *, stated: bool = False, erratic: bool = False) -> None:
        """Choose the users' statements and the kind of curves.

        Args:
            stated: users state the epochs of their jobs; otherwise a target accuracy.
            erratic: losses have plateaus, spikes and more noise.
        """
        self._stated = stated
        self._erratic = erratic
        self._steps: dict[str, Steps] = {name: {} for name in ROWS}

    def job_model(
        self, job: TraceJob, batch: Literal["fixed", "elastic"], *, seed: int
    ) -> Table2Job:
        """Return the model of a job, which has the same length for either kind of batch."""
        return Table2Job(
            job,
            self._workload(job),
            steps=self._steps,
            batch=batch,
            seed=seed,
            stated=self._stated,
            erratic=self._erratic,
        )

    def _workload(self, job: TraceJob) -> Workload:
        if job.slots < 1 or 0 < job.batch < job.slots or job.batch < 0:
            problem = f"{job.name}: {job.slots} slots with batch {job.batch} are impossible"
            raise TraceError(problem, "give at least one slot, and a sample for each", "slots")
        if not job.workload.startswith(GPU_TIME):
            return workload_of(job.workload)
        try:
            gpu_s = float(job.workload.removeprefix(GPU_TIME))
        except ValueError:
            gpu_s = math.nan
        if not 0.0 <= gpu_s < math.inf:
            problem = f"{job.name}: {job.workload!r} does not state a GPU time"
            raise TraceError(problem, f"write {GPU_TIME}SECONDS", "workload")
        return workload_of(closest(gpu_s, job.slots))


class Table2Job(JobModel):
    """Job of Table 2.

    Paper: an epoch is a pass over the data. Here: it is the value of such a pass at the first
    batch, so that a batch that learns less from a sample takes longer, not more epochs.
    """

    def __init__(
        self,
        job: TraceJob,
        workload: Workload,
        *,
        steps: dict[str, Steps],
        batch: Literal["fixed", "elastic"],
        seed: int,
        stated: bool,
        erratic: bool,
    ) -> None:
        """Draw the job's length and noise from `seed` and its name.

        Args:
            job: of a trace; a recorded job states its number of samples.
            steps: application -> (placement, global batch) -> parts of a step; a cache that all
                jobs share.
            batch: "fixed" or "elastic", as in `TrainingModel.job_model`.
            stated: True if the user states the epochs; otherwise a target accuracy.
            erratic: True if losses have plateaus, spikes and more noise.
        """
        row = workload.row
        rng = default_rng((seed, crc32(job.name.encode())))
        usual = row.epochs * math.exp(EPOCHS_SPREAD * rng.standard_normal())
        if job.samples is not None:  # recorded: the target must still be checkable
            usual = job.samples / workload.samples - ABOVE_TARGET
        self._to_target = max(1, round(usual))
        self.application, self.epoch_samples = workload.application, workload.samples
        self._row = row
        self.epochs = self._to_target + ABOVE_TARGET
        self._phi = [noise_scale(row, epoch / self._to_target) for epoch in range(self.epochs + 1)]
        self._reports = reports(row, self._to_target, self._phi, rng, erratic=erratic)
        self._steps = steps[workload.application]
        self._throughputs: dict[tuple[Placement, int, int], Throughput] = {}
        stop = _stop(row, self.epochs, stated=stated)
        if stated and job.utility is not None:  # a stated deadline implies a known length
            stop = StopRule(samples=self.epochs * workload.samples)
        self.spec = _spec(job, workload, stop, batch)
        self.costs = costs_of(row)

    def throughput(self, placement: Placement, batch: int, epoch: int) -> Throughput:
        """Return the throughput of a group; an epoch has one noise scale."""
        key = (placement, batch, epoch)
        known = self._throughputs.get(key)
        if known is not None:
            return known
        parts = self._step_parts(placement, batch)
        took_s = parts.step_s
        useful = efficiency(self._row, batch, self._true_scale(epoch))
        throughput = Throughput(batch / took_s, useful * batch / took_s, took_s, parts=parts)
        self._throughputs[key] = throughput
        return throughput

    def lost_progress(self, before: int, batch: int, epoch: int) -> float:
        """Return the progress lost when the global batch jumps; may exceed the job's progress."""
        return lost_epochs(before, batch) * self.epoch_samples

    def noise_scale(self, epoch: int, batch: int) -> float | None:
        """Return the noise scale measured in the running epoch, with the error of its report.

        It does not depend on the batch. The throughput uses the true one.
        """
        return self.epoch_metrics(epoch + 1, batch).noise_scale

    def epoch_metrics(self, epoch: int, batch: int) -> EpochMetrics:
        """Return the report after `epoch` epochs; repeated calls return the same report.

        Its noise scale is that of the finished epoch, with an error of measurement.
        """
        return self._reports[min(epoch, self.epochs)]

    def remaining_steps(self, epoch: int, progress: float) -> float:
        """Return the remaining steps at the submitted batch and the current noise scale."""
        batch = self.spec.batch_size
        useful = efficiency(self._row, batch, self._true_scale(epoch))
        left = self.epochs * self.epoch_samples - progress
        return max(0.0, left) / batch / useful

    def _true_scale(self, epoch: int) -> float:
        return self._phi[min(epoch, self.epochs)]

    def _step_parts(self, placement: Placement, batch: int) -> StepParts:
        key = (placement, batch)
        if key not in self._steps:
            self._steps[key] = step_parts(self._row, placement, batch)
        return self._steps[key]


def costs_of(row: Row) -> ChangeCosts:
    """Return costs of changes; starting from a checkpoint takes longer for larger models."""
    sizes = [model_bytes(other) for other in ROWS.values()]
    share = (model_bytes(row) - min(sizes)) / (max(sizes) - min(sizes))
    quick, slow = RESTART_S
    return ChangeCosts(
        start_s=COLD_START_S,
        restart_s=quick + (slow - quick) * share,
        prepare_s=PREPARE_S,
        switch_s=SWITCH_S,
    )


TYPICAL_COSTS: Final = ChangeCosts(
    start_s=COLD_START_S,
    restart_s=sum(RESTART_S) / 2.0,
    prepare_s=PREPARE_S,
    switch_s=SWITCH_S,
)


def _stop(row: Row, epochs: int, *, stated: bool) -> StopRule:
    if stated:
        return StopRule(epochs=epochs)
    return StopRule(metric="accuracy", at_least=row.target, consecutive=ABOVE_TARGET)


def _spec(
    job: TraceJob, workload: Workload, stop: StopRule, batch: Literal["fixed", "elastic"]
) -> JobSpec:
    row = workload.row
    first = most = job.batch or row.tuned * job.slots
    if batch == "elastic":
        first, most = row.first, row.most
    return JobSpec(
        name=job_name(job.name),
        script="train.py",
        args=(workload.name,),
        family=workload.name,
        batch_size=first,
        max_batch_size=most,
        max_local_batch=max(first, row.memory),  # above memory: in several passes
        slots=(1, max(MAX_SLOTS, job.slots)),
        slots_wanted=job.slots,
        stop=stop,
        retries=1,
    )
