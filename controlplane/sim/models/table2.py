"""Model of the jobs in the paper's Table 2: 50 named workloads and their training."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Final, Literal
from zlib import crc32

import numpy as np
from numpy.random import Generator, default_rng

from controlplane.prediction import FloatArray
from controlplane.sim.cluster import TraceError
from controlplane.sim.models import table2_constants as constants
from controlplane.sim.models.job_model import (
    ChangeCosts,
    EpochMetrics,
    JobModel,
    Placement,
    Throughput,
    TrainingModel,
    job_spec,
    packed,
    seconds_of,
)
from controlplane.sim.models.table2_constants import ROWS, Row
from controlplane.sim.results import TraceJob
from schemas.epochs import StepTimes
from schemas.jobs import JobSpec, StopRule

MARGIN = 1e-4  # smallest distance between an accuracy and its target
MAX_GPU_S: Final = 1e12  # longest job: 30,000 years on one GPU


def noise_scale(row: Row, share: float) -> float:
    """Return the noise scale phi in samples; it grows geometrically up to a `share` of 1."""
    first, last = row.noise
    return first * float((last / first) ** min(1.0, share))


def efficiency(row: Row, batch: int, phi: float) -> float:
    """Return the progress per sample relative to the first batch: (phi + m0) / (phi + m).

    McCandlish et al. 2018, and Pollux section 3.1, with the global batch m and the first batch m0.
    """
    return (phi + row.first) / (phi + batch)


def lost_epochs(before: int, batch: int) -> float:
    """Return the number of epochs that an increase of the global batch loses.

    ONES section 3.3.2 and figure 13: after an abrupt increase the loss needs many epochs to
    recover; after gradual increases (figure 14) it needs none. Paper: no formula. Here: each
    doubling beyond the first costs `JUMP_EPOCHS`. `before` is 0 if the job had no batch yet.
    """
    if before <= 0 or batch <= constants.SAFE_JUMP * before:
        return 0.0
    return constants.JUMP_EPOCHS * math.log2(batch / (constants.SAFE_JUMP * before))


def reports(
    row: Row, to_target: int, phi: Sequence[float], rng: Generator, *, erratic: bool
) -> tuple[EpochMetrics, ...]:
    """Return the reports after 0, 1, ... epochs.

    The accuracy exceeds its target in exactly the epochs after `to_target`. The loss after epoch k
    is 1 / (b0 k + b1) + b2 (Optimus, section 3.1) with noise. `erratic` losses have plateaus,
    spikes and more noise (ONES section 2.1). `phi` has the noise scale of each epoch, in order, and
    then the noise scale after the last epoch.
    """
    done = np.arange(len(phi), dtype=np.float64)
    measured = np.exp(constants.NOISE_SPREAD * rng.standard_normal(done.size))
    scales = np.array([phi[0], *phi[:-1]]) * measured
    losses = _losses(row, done, to_target, rng, erratic=erratic)
    accuracies = _accuracies(row, done, to_target, rng)
    columns = (values.tolist() for values in (losses, accuracies, scales))
    return tuple(
        EpochMetrics(loss, {"accuracy": accuracy}, scale)
        for loss, accuracy, scale in zip(*columns, strict=True)
    )


def _losses(
    row: Row, done: FloatArray, to_target: int, rng: Generator, *, erratic: bool
) -> FloatArray:
    noise = rng.standard_normal(done.size)
    spiking = rng.random(done.size) < constants.SPIKES
    height = rng.uniform(*constants.SPIKE, done.size)
    if erratic:
        done = done // constants.PLATEAU * constants.PLATEAU
    above = math.log(row.classes) - row.floor
    curve: FloatArray = row.floor + above / (1 + (1 / constants.LOSS_LEFT - 1) * done / to_target)
    curve *= np.exp((constants.ERRATIC_SPREAD if erratic else constants.LOSS_SPREAD) * noise)
    if erratic:
        curve[spiking] *= height[spiking]
    return curve


def _accuracies(row: Row, done: FloatArray, to_target: int, rng: Generator) -> FloatArray:
    guess = 1 / row.classes
    rate = 3 / to_target  # 5% (e^-3) of the way remains at the target
    way = -np.expm1(-rate * done) / -np.expm1(-3.0)
    curve = guess + (row.target - guess) * way + 0.01 * rng.standard_normal(done.size)
    low = np.where(done > to_target, row.target + MARGIN, 0.0)
    high = np.where(done > to_target, 1.0, row.target - MARGIN)
    return np.asarray(np.clip(curve, low, high))


def model_bytes(row: Row) -> float:
    """Return the size of the gradients in fp32 in bytes; all of them go through the ring."""
    return row.parameters * 1e6 * 4


def sync_s(row: Row, placement: Placement) -> float:
    """Return the seconds of a ring all-reduce: 2 (c - 1) steps, each with 1/c of the gradients."""
    workers = sum(placement)
    apart = sum(slots > 0 for slots in placement) > 1
    hop_s = constants.NETWORK_HOP_S if apart else constants.NODE_HOP_S
    bytes_per_s = constants.NETWORK_BYTES_PER_S if apart else constants.NODE_BYTES_PER_S
    return 2 * (workers - 1) * (model_bytes(row) / workers / bytes_per_s + hop_s)


@lru_cache(maxsize=100_000)
def step_parts(row: Row, placement: Placement, batch: int) -> StepTimes:
    """Return the passes of a step with a global batch that is divided evenly between the workers.

    If the local batch does not fit the memory, a step takes several passes. Only the last pass
    overlaps with the synchronisation and takes T = sqrt(T_grad^2 + T_sync^2), as in Pollux section
    3.2 with gamma 2. The part of T beyond T_grad is reported as synchronisation.
    """
    local = math.ceil(batch / sum(placement))
    passes = math.ceil(local / row.memory)
    compute_s = row.fixed_ms / 1000 + local / passes / row.peak
    pass_s = math.hypot(compute_s, sync_s(row, placement))
    return StepTimes(pass_s, pass_s - compute_s, math.ceil(local / passes), passes)


def step_s(row: Row, placement: Placement, batch: int) -> float:
    """Return the seconds of a step with a global batch, divided evenly between the workers."""
    return seconds_of(step_parts(row, placement, batch))


@dataclass(frozen=True, slots=True)
class Workload:
    """A model on one size of a data set."""

    name: str
    application: str  # key of `ROWS`
    row: Row
    samples: int  # ||D||


WORKLOADS: Final[Mapping[str, Workload]] = {
    name: Workload(name, application, row, samples)
    for application, row in ROWS.items()
    for samples in constants.SIZES[application.partition("-")[2]]
    for name in [f"{application}-{samples / 1000:g}k"]
}


GPU_TIME: Final = "gpu-time:"  # prefix of a workload that is defined by its GPU seconds
LARGEST: Final = tuple({each.application: each for each in WORKLOADS.values()}.values())


def workload_of(name: str, slots: int) -> Workload:
    """Return the workload with a name like `resnet18-cifar10-20k` or `gpu-time:SECONDS`.

    The second form is a workload with this GPU time on `slots`. `TraceError` is raised for other
    names.
    """
    if name in WORKLOADS:
        return WORKLOADS[name]
    if name.startswith(GPU_TIME):
        return _workload_with(_gpu_seconds(name), slots)
    near = difflib.get_close_matches(name, WORKLOADS, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else f"one of them is {next(iter(WORKLOADS))}"
    raise TraceError(f"{name!r} is not a workload of Table 2", hint, "workload")


def _gpu_seconds(name: str) -> float:
    try:
        gpu_s = float(name.removeprefix(GPU_TIME))
    except ValueError:
        gpu_s = math.nan
    if not 0.0 <= gpu_s <= MAX_GPU_S:
        hint = f"write {GPU_TIME}SECONDS, from 0 to {MAX_GPU_S:g}"
        raise TraceError(f"{name!r} does not state a GPU time", hint, "workload")
    return gpu_s


def _workload_with(gpu_s: float, slots: int) -> Workload:
    """Return the workload with the closest GPU time on `slots` (ONES, appendix).

    Paper: the longest workload replaces all longer jobs. Here: a job that is longer than all
    workloads trains an application on a larger data set, so that its GPU time is right. The choice
    among the applications depends on the GPU time only, and all of them are equally frequent.
    """
    if gpu_s <= max(_gpu_times(slots)):
        return WORKLOADS[closest(gpu_s, slots)]
    base = LARGEST[crc32(f"{gpu_s!r}".encode()) % len(LARGEST)]
    return replace(base, samples=round(base.samples * gpu_s / slots / duration_s(base.name, slots)))


@cache
def _gpu_times(slots: int) -> tuple[float, ...]:
    return tuple(slots * duration_s(name, slots) for name in WORKLOADS)


def closest(gpu_seconds: float, slots: int) -> str:
    """Return the name of the workload of Table 2 with the closest GPU time on `slots`."""
    times = zip(WORKLOADS, _gpu_times(slots), strict=True)
    return min(times, key=lambda each: abs(each[1] - gpu_seconds))[0]


@lru_cache(maxsize=100_000)
def duration_s(name: str, slots: int) -> float:
    """Return the training seconds of a workload on packed slots, with the batch tuned for them.

    The time of starts and the random differences between jobs are not included.
    """
    workload = workload_of(name, slots)
    row, batch = workload.row, workload.row.tuned * slots
    seconds_per_sample = step_s(row, packed(slots, constants.GPUS_PER_NODE), batch) / batch
    return sum(
        workload.samples
        * seconds_per_sample
        / efficiency(row, batch, noise_scale(row, epoch / row.epochs))
        for epoch in range(row.epochs + constants.ABOVE_TARGET)
    )


TYPICAL_COSTS: Final = ChangeCosts(
    start_s=constants.COLD_START_S,
    restart_s=sum(constants.RESTART_S) / 2.0,
    prepare_s=constants.PREPARE_S,
    switch_s=constants.SWITCH_S,
)


@dataclass(eq=False)
class Table2Model(TrainingModel):
    """Training model of the jobs of the paper's Table 2."""

    costs: ChangeCosts = TYPICAL_COSTS
    stated: bool = False  # True: users state epochs; False: a target accuracy
    erratic: bool = False  # True: losses have plateaus, spikes and more noise

    def job_model(
        self, job: TraceJob, batch: Literal["fixed", "elastic"], *, seed: int
    ) -> Table2Job:
        """Return the model of a job; its number of epochs is the same for either kind of batch."""
        return Table2Job(job, self._workload(job), self, batch=batch, seed=seed)

    def _workload(self, job: TraceJob) -> Workload:
        if job.slots < 1 or 0 < job.batch < job.slots or job.batch < 0:
            problem = f"{job.name}: {job.slots} slots with batch {job.batch} are impossible"
            raise TraceError(problem, "give at least one slot, and a sample for each", "slots")
        return workload_of(job.workload, job.slots)


def gpu_times(jobs: Iterable[TraceJob]) -> list[float]:
    """Return the GPU seconds of Table 2's jobs on the requested slots, without starts."""
    return [job.slots * duration_s(job.workload, job.slots) for job in jobs]


class Table2Job(JobModel):
    """Job of Table 2.

    Paper: an epoch is a pass over the data. Here: an epoch is the progress of such a pass at the
    first batch. A batch with less progress per sample thus has longer epochs, not more epochs.
    """

    def __init__(
        self,
        job: TraceJob,
        workload: Workload,
        model: Table2Model,
        *,
        batch: Literal["fixed", "elastic"],
        seed: int,
    ) -> None:
        """Draw the job's number of epochs and noise from `seed` and the job's name."""
        row = workload.row
        rng = default_rng((seed, crc32(job.name.encode())))
        usual = row.epochs * math.exp(constants.EPOCHS_SPREAD * rng.standard_normal())
        if job.samples is not None:  # recorded work includes the epochs above the target
            usual = job.samples / workload.samples - constants.ABOVE_TARGET
        self._to_target = max(1, round(usual))
        self.application, self.epoch_samples = workload.application, workload.samples
        self._row = row
        self.epochs = self._to_target + constants.ABOVE_TARGET
        self._phi = [noise_scale(row, epoch / self._to_target) for epoch in range(self.epochs + 1)]
        self._reports = reports(row, self._to_target, self._phi, rng, erratic=model.erratic)
        self._throughputs: dict[tuple[Placement, int, int], Throughput] = {}
        stop = StopRule(metric="accuracy", at_least=row.target, consecutive=constants.ABOVE_TARGET)
        if model.stated:
            stop = StopRule(epochs=self.epochs)
        if model.stated and job.utility is not None:  # a stated deadline implies a known length
            stop = StopRule(samples=self.epochs * workload.samples)
        self.spec = _spec(job, workload, stop, batch)
        self.costs = _costs(row)

    def throughput(self, placement: Placement, batch: int, epoch: int) -> Throughput:
        """Return the throughput of a group; the noise scale is constant within an epoch."""
        key = (placement, batch, epoch)
        if key not in self._throughputs:
            parts = step_parts(self._row, placement, batch)
            took_s = seconds_of(parts)
            useful = efficiency(self._row, batch, self._true_scale(epoch))
            found = Throughput(batch / took_s, useful * batch / took_s, took_s, parts=parts)
            self._throughputs[key] = found
        return self._throughputs[key]

    def lost_progress(self, before: int, batch: int, epoch: int) -> float:
        """Return the progress lost at a jump of the batch, which can exceed the job's progress."""
        return lost_epochs(before, batch) * self.epoch_samples

    def noise_scale(self, epoch: int, batch: int) -> float | None:
        """Return the noise scale measured in the running epoch; speeds use the true one."""
        return self.epoch_metrics(epoch + 1, batch).noise_scale

    def epoch_metrics(self, epoch: int, batch: int) -> EpochMetrics:
        """Return the report after `epoch` epochs, with the noise scale of the finished epoch."""
        return self._reports[min(epoch, self.epochs)]

    def remaining_steps(self, epoch: int, progress: float) -> float:
        """Return the remaining steps at the submitted batch and the current noise scale."""
        batch = self.spec.batch_size
        useful = efficiency(self._row, batch, self._true_scale(epoch))
        left = self.epochs * self.epoch_samples - progress
        return max(0.0, left) / batch / useful

    def _true_scale(self, epoch: int) -> float:
        return self._phi[min(epoch, self.epochs)]


def _costs(row: Row) -> ChangeCosts:
    """Return the costs of changes; a start from a checkpoint takes longer for larger models."""
    sizes = [model_bytes(other) for other in ROWS.values()]
    share = (model_bytes(row) - min(sizes)) / (max(sizes) - min(sizes))
    quick, slow = constants.RESTART_S
    return replace(TYPICAL_COSTS, restart_s=quick + (slow - quick) * share)


def _spec(
    job: TraceJob, workload: Workload, stop: StopRule, batch: Literal["fixed", "elastic"]
) -> JobSpec:
    row = workload.row
    first = most = job.batch or row.tuned * job.slots
    if batch == "elastic":
        first, most = row.first, row.most
    return job_spec(
        job,
        args=(workload.name,),
        family=workload.name,
        batch_size=first,
        max_batch_size=most,
        max_local_batch=max(first, row.memory),  # a batch beyond the memory takes several passes
        slots=(1, max(constants.MAX_SLOTS, job.slots)),
        stop=stop,
    )
