"""Traces of Table 2's workloads, as the paper's appendix draws them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal

from numpy.random import Generator, default_rng

from controlplane.sim.models.table2.constants import (
    CRASHES,
    PATIENCE,
    USER_SHARES,
    USER_SLOTS,
)
from controlplane.sim.models.table2.workloads import WORKLOADS, closest, duration_s
from controlplane.sim.simulator_errors import TraceError
from controlplane.sim.submissions import Trace, TraceJob
from controlplane.sim.traces import arrivals as processes
from controlplane.sim.traces import philly_quantiles as philly
from schemas.ids import Seconds

GpuTimes = Callable[[Generator, int], Iterable[float]]  # so many jobs' GPU seconds
Arrivals = Callable[[Generator, int, float], Iterable[float]]  # their times, at such an interval

PROCESSES: Final[Mapping[str, Arrivals]] = {
    "poisson": processes.poisson,
    "uniform": processes.uniform,
    "bursts": processes.bursts,
    "philly": processes.philly,
    "google": processes.google,
}


def generate(
    *,
    jobs: int = 400,
    seed: int,
    mix: Literal["philly", "uniform"] = "philly",
    arrivals: str | Arrivals = "poisson",
    mean_interval_s: float = 30.0,
    crash_share: float = 0.0,
    cancel_share: float = 0.0,
    gpu_times: GpuTimes | None = None,
    most_slots: int | None = None,
) -> Trace:
    """A trace that is the same for the same arguments.

    ONES, appendix: GPU times are drawn from Microsoft's trace, and each is replaced by the workload
    with the closest one. The paper does not say how many GPUs its jobs ask for; here that is drawn
    first, and GPU times are compared on so many. Each property has draws of its own, so that a
    trace with crashes is the one without, but for the crashes.

    Args:
        mix: of the workloads: by GPU time, or each as often as any other.
        arrivals: the name of a process of `controlplane.sim.traces.arrivals`, or such a function.
        crash_share: of the jobs; their scripts fail once.
        cancel_share: of the jobs; their users give up.
        gpu_times: draws GPU seconds; None: as Microsoft's trace has them.
        most_slots: of the cluster; nobody asks for more.

    Raises:
        TraceError: if a number is out of range, or there is no such mix or process.
    """
    _check(jobs, mix, mean_interval_s, (crash_share, cancel_share))
    rngs = [default_rng((seed, number)) for number in range(5)]
    arrive = arrival_process(arrivals) if isinstance(arrivals, str) else arrivals
    times = [float(at) for at in arrive(rngs[0], jobs, mean_interval_s)]
    drawn = rngs[1].choice(USER_SLOTS, size=jobs, p=USER_SHARES)
    slots = [min(int(many), most_slots or int(many)) for many in drawn]
    names = _workloads(rngs[2], mix, slots, gpu_times or philly.sample)
    crashes = shares(rngs[3], jobs, crash_share, CRASHES)
    patience = shares(rngs[4], jobs, cancel_share, PATIENCE)
    return Trace(
        name=f"table2-{mix}-{jobs}-{seed}",
        jobs=tuple(
            _trace_job(f"job-{number:04d}", at, name, many, crash=crash, patience=waits)
            for number, (at, name, many, crash, waits) in enumerate(
                zip(times, names, slots, crashes, patience, strict=True), 1
            )
        ),
    )


def _trace_job(
    name: str, at: float, workload: str, slots: int, *, crash: float | None, patience: float | None
) -> TraceJob:
    """A job whose user gives up after `patience` times its duration."""
    waits_s = None if patience is None else patience * duration_s(workload, slots)
    return TraceJob(
        name=name,
        at=Seconds(at),
        workload=workload,
        slots=slots,
        crashes_at=crash,
        cancelled_after_s=waits_s,
    )


def _workloads(
    rng: Generator, mix: str, slots: Sequence[int], draw_gpu_times: GpuTimes
) -> list[str]:
    """A workload for each job, by the mix and by how many slots it asks for."""
    if mix == "uniform":
        return [str(name) for name in rng.choice(tuple(WORKLOADS), size=len(slots))]
    pairs = zip(draw_gpu_times(rng, len(slots)), slots, strict=True)
    return [closest(float(gpu_s), many) for gpu_s, many in pairs]


def _check(jobs: int, mix: str, mean_interval_s: float, shares: tuple[float, ...]) -> None:
    if jobs < 1:
        raise TraceError(f"{jobs} jobs are no trace", "give at least 1", "jobs")
    if mix not in {"philly", "uniform"}:
        raise TraceError(f"there is no mix {mix!r}", "choose philly or uniform", "mix")
    if not 0.0 < mean_interval_s < float("inf"):
        what = f"{mean_interval_s} s between submissions are impossible"
        raise TraceError(what, "give a positive number", "mean_interval_s")
    for share in shares:
        if not 0.0 <= share <= 1.0:
            raise TraceError(f"{share} is no share of the jobs", "give 0 to 1", "share")


def shares(
    rng: Generator, jobs: int, share: float, between: tuple[float, float]
) -> list[float | None]:
    """A uniform draw for about `share` of the jobs, None for the others.

    Args:
        between: least and most of what is drawn.
    """
    struck = rng.random(jobs) < share
    values = rng.uniform(*between, jobs)
    return [float(value) if hit else None for hit, value in zip(struck, values, strict=True)]


def arrival_process(name: str) -> Arrivals:
    """The process of that name.

    Raises:
        TraceError: if there is none.
    """
    if name not in PROCESSES:
        what = f"there is no arrival process {name!r}"
        raise TraceError(what, f"choose from {', '.join(PROCESSES)}", "arrivals")
    return PROCESSES[name]
