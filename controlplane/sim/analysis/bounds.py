"""Lower bounds of the average completion time of a trace, and times of jobs that run alone."""

from __future__ import annotations

import contextlib
import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from controlplane.prediction import FloatArray
from controlplane.sim.cluster import TraceError
from controlplane.sim.models.job_model import (
    JobModel,
    Throughput,
    TrainingModel,
    packed,
    training_s,
)
from controlplane.sim.results import TraceJob


def fluid_srpt(release: FloatArray, work: FloatArray, most: FloatArray, capacity: float) -> float:
    """Return a lower bound of the average completion time (end minus release) of any schedule.

    The bound is the largest of three bounds, each of which ignores a different limit. Jobs are
    fluid: at any moment a job progresses at any rate up to `most`, and the sum of all rates is at
    most `capacity`.

    - Shortest remaining processing time first, on one machine as fast as the cluster. This order is
      optimal there (Schrage 1968). It ignores `most`.
    - Every job alone: work / most.
    - Mean busy times. A job with a rate of at most m ends at least work / (2 m) after the mean
      moment of its work. The sum of these mean moments is smallest if the least work runs first,
      with pre-emption (Goemans 1997, LP in mean busy times).

    Shortest-first with the limits `most` is not a lower bound. Example: on 4 slots, jobs of (work
    4, most 4) and (work 4.4, most 1) take 6.4 s in total if the shorter job runs first, but 5.7 s
    if the longer job has its one slot from the start.

    Args:
        release: shape (J,), seconds.
        work: shape (J,), slot seconds at the best possible efficiency of the job; 0 or more.
        most: shape (J,), largest speed of the job, in slots; above 0, can be infinite.
        capacity: slots of the cluster; above 0.

    Raises:
        ValueError: if shapes differ or a value is out of its range.
    """
    _check(release, work, most, capacity)
    if not len(work):
        return 0.0
    fastest = np.minimum(most, capacity).tolist()
    return least_flow(release.tolist(), work.tolist(), fastest, float(capacity)) / len(work)


def least_flow(
    release: Sequence[float], work: Sequence[float], fastest: Sequence[float], capacity: float
) -> float:
    """Return the bound of `fluid_srpt` for the sum, not the mean, without a check of the inputs.

    `release` is in seconds, `work` in slot seconds, `fastest` in slots and at most `capacity`.
    """
    size = [area / capacity for area in work]
    ends, _ = _one_machine(release, size, shortest=True)
    _, busy = _one_machine(release, size, shortest=False)
    alone = [area / fast for area, fast in zip(work, fastest, strict=True)]
    released = sum(release)
    return max(sum(ends) - released, sum(alone), sum(busy) + sum(alone) / 2.0 - released)


def _check(release: FloatArray, work: FloatArray, most: FloatArray, capacity: float) -> None:
    if not release.shape == work.shape == most.shape == (len(release),):
        raise ValueError(f"shapes differ: {release.shape}, {work.shape}, {most.shape}")
    if not (np.isfinite(release).all() and np.isfinite(work).all() and (work >= 0.0).all()):
        raise ValueError("release and work must be finite, and work not negative")
    if not ((most > 0.0).all() and 0.0 < capacity < np.inf):
        raise ValueError("most and capacity must be above 0")


def _one_machine(
    release: Sequence[float], size: Sequence[float], *, shortest: bool
) -> tuple[list[float], list[float]]:
    """Run jobs of `size` seconds pre-emptively, one at a time; return ends and mean moments.

    The job with the least remaining work (`shortest`) or the least total work runs first.
    """
    order = sorted(range(len(release)), key=release.__getitem__)
    left, ends, busy = list(size), list(release), [0.0] * len(size)
    waiting: list[tuple[float, int]] = []
    now, arrived = -math.inf, 0
    while waiting or arrived < len(order):
        if not waiting:
            now = max(now, release[order[arrived]])
        while arrived < len(order) and release[order[arrived]] <= now:
            job = order[arrived]
            heapq.heappush(waiting, (size[job], job))
            arrived += 1
        _, job = heapq.heappop(waiting)
        end = now + left[job]
        until = min(end, release[order[arrived]]) if arrived < len(order) else end
        share = (until - now) / size[job] if size[job] else 1.0
        busy[job] += share * (now + until) / 2.0
        if until < end:
            left[job] -= until - now
            heapq.heappush(waiting, (left[job] if shortest else size[job], job))
        else:
            ends[job] = end
        now = until
    return ends, busy


MAX_SINGLE_SIZE: Final = 8  # up to this size every size is tried; above it, only whole nodes are
BATCHES_PER_DOUBLING: Final = 3  # number of batches tried per doubling
UNTRIED_MARGIN: Final = 0.95  # factor for untried sizes and batches, which can be better
MIN_JOB_S: Final = 1e-9  # lower limit of a job's time
MIN_RATE: Final = 1e-300  # divisor if the rate is 0


Cost = tuple[float, float]  # least slot seconds and least seconds; no schedule needs to reach both


def min_cost(job_model: JobModel, fixed_batch: int, slots: int, widest: int) -> Cost:
    """Return the least cost of a job over all sizes and batches.

    Each epoch has its best size and batch. 5% is subtracted for the sizes and batches between those
    tried. Progress per sample depends on batch and epoch, and samples per second on size and batch,
    so the model is queried for the two separately. `fixed_batch` is the user's batch if it exceeds
    the largest batch that policies can select, otherwise 0.
    """
    spec = job_model.spec
    most = min(max(spec.slots[1], fixed_batch and slots), slots)
    sizes = [
        *range(1, min(MAX_SINGLE_SIZE, most) + 1),
        *range(MAX_SINGLE_SIZE + widest, most + 1, widest),
    ]
    batches = _batches(spec.batch_size, max(spec.batch_limit, fixed_batch), fixed_batch)
    speed = _speeds(job_model, sizes, batches, widest)
    efficiency = _efficiencies(job_model, sizes, batches, speed, widest)
    ends = np.array([0.0, *(job_model.epoch_ends_at(epoch) for epoch in range(job_model.epochs))])
    rate = (speed[:, :, None] * efficiency[None, :, :]).max(axis=1)  # (size, epoch)
    if not (rate.max(axis=0) > 0.0).all():
        return 0.0, MIN_JOB_S
    seconds = np.diff(ends) / np.maximum(rate, MIN_RATE)
    least_slot_s = float((seconds * np.array(sizes)[:, None]).min(axis=0).sum())
    least_s = float(seconds.min(axis=0).sum())
    return least_slot_s * UNTRIED_MARGIN, max(least_s * UNTRIED_MARGIN, MIN_JOB_S)


def _speeds(
    job_model: JobModel, sizes: Sequence[int], batches: Sequence[int], widest: int
) -> FloatArray:
    """Return samples/s in the first epoch, shape (sizes, batches), or 0 if a group cannot run."""

    def speed(size: int, batch: int) -> float:
        known = known_throughput(job_model, size, batch, 0, widest) if size <= batch else None
        return known.samples_per_s if known else 0.0

    return np.array([[speed(size, batch) for batch in batches] for size in sizes])


def _efficiencies(
    job_model: JobModel,
    sizes: Sequence[int],
    batches: Sequence[int],
    speed: FloatArray,
    widest: int,
) -> FloatArray:
    """Return progress per sample, shape (batches, epochs), at the smallest size that can run."""
    found = np.zeros((len(batches), job_model.epochs))
    for column, batch in enumerate(batches):
        fits = next((size for row, size in enumerate(sizes) if speed[row, column] > 0.0), None)
        for epoch in range(job_model.epochs if fits is not None else 0):
            known = known_throughput(job_model, fits or 1, batch, epoch, widest)
            found[column, epoch] = known.progress_per_s / known.samples_per_s if known else 0.0
    return found


def _batches(first: int, most: int, fixed: int) -> list[int]:
    steps = int(np.ceil(np.log2(max(most / first, 1.0)) * BATCHES_PER_DOUBLING))
    factors = (2.0 ** (step / BATCHES_PER_DOUBLING) for step in range(steps + 1))
    found = {most, fixed, *(min(most, round(first * factor)) for factor in factors)}
    return sorted(found - {0})


def known_throughput(
    job_model: JobModel, size: int, batch: int, epoch: int, widest: int
) -> Throughput | None:
    """Return the throughput of a group on the fewest nodes, or None if the group cannot run."""
    try:
        throughput = job_model.throughput(packed(size, widest), batch, epoch)
    except TraceError:
        return None  # no such group was measured
    return throughput if throughput.samples_per_s > 0.0 else None


def lower_bound_s(
    jobs: Sequence[TraceJob],
    model: TrainingModel,
    *,
    slots: int,
    widest: int,
    fastest: float,
    seed: int,
) -> float | None:
    """Return a lower bound of the average completion time of `jobs`, in seconds, on any schedule.

    The bound is None without jobs, or if a job crashes or is cancelled. `fastest` is the speed of
    the fastest GPU, relative to the GPU that the model describes.
    """
    fated = (job for job in jobs if (job.crashes_at, job.cancelled_after_s) != (None, None))
    if not jobs or any(fated):
        return None
    slot_s, least_s = np.array(_min_costs(jobs, model, slots=slots, widest=widest, seed=seed)).T
    release = np.array([float(job.at) for job in jobs])
    return fluid_srpt(release, slot_s / fastest, slot_s / least_s, float(slots))


def _min_costs(
    jobs: Sequence[TraceJob], model: TrainingModel, *, slots: int, widest: int, seed: int
) -> list[Cost]:
    """Return the least cost of each job; the cost of equal jobs is computed once."""
    known: dict[tuple[str, int, int, int, float], Cost] = {}
    batches: dict[tuple[str, int, int], int] = {}
    costs = []
    for job in jobs:
        job_model = model.job_model(job, "elastic", seed=seed)
        tuned = (job.workload, job.slots, job.batch)
        if tuned not in batches:
            batches[tuned] = model.job_model(job, "fixed", seed=seed).spec.batch_size
        # `min_cost` tries batches around any batch up to the limit.
        beyond = batches[tuned] > job_model.spec.batch_limit
        fixed = batches[tuned] if beyond else 0
        alone = known_throughput(job_model, 1, job_model.spec.batch_size, 0, widest)
        speed = alone.samples_per_s if alone else 0.0
        key = (job.workload, job_model.epochs, job_model.epoch_samples, fixed, speed)
        if key not in known:
            known[key] = min_cost(job_model, fixed, slots, widest)
        costs.append(known[key])
    return costs


def times_alone(
    jobs: Sequence[TraceJob],
    model: TrainingModel,
    *,
    widest: int,
    speed: float,
    first_stall_s: float | None,
    seed: int,
) -> Mapping[str, tuple[int, float]]:
    """Return the requested slots of each job, and its time on these slots without other jobs.

    The batch is always the batch that the user tuned for these slots, so that the time is the same
    for every policy. The time includes the first start. A job is missing if its group was never
    measured. `speed` is the mean speed of the GPUs relative to the GPU that the model describes.
    """
    found: dict[str, tuple[int, float]] = {}
    for job in jobs:
        job_model = model.job_model(job, "fixed", seed=seed)
        wanted, batch = job_model.spec.wanted, job_model.spec.batch_size
        with contextlib.suppress(TraceError):  # such a group was never measured
            took_s = training_s(job_model, packed(wanted, widest), batch)
            if math.isfinite(took_s):
                start_s = job_model.costs.overridden(None, first_stall_s).start_s
                found[job.name] = (wanted, start_s + took_s / speed)
    return found
