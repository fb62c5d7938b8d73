"""Generators of traces: Table 2's workloads, recorded loss curves, Harmony's testbed, utilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from numpy.random import Generator, default_rng

from controlplane.sim.cluster import TraceError
from controlplane.sim.models.curves import WORK_CORE_S, LossCurve
from controlplane.sim.models.demands import demand_of
from controlplane.sim.models.harmony import BATCHES, JOB_S
from controlplane.sim.models.table2 import WORKLOADS, closest, duration_s
from controlplane.sim.models.table2_constants import CRASHES, PATIENCE, USER_SHARES, USER_SLOTS
from controlplane.sim.results import Trace, TraceJob
from controlplane.sim.traces import arrivals as philly
from controlplane.sim.traces import arrivals as processes
from schemas.ids import Seconds
from schemas.jobs import Utility

GpuTimes = Callable[[Generator, int], Iterable[float]]  # GPU seconds of so many jobs
Arrivals = Callable[[Generator, int, float], Iterable[float]]  # jobs, mean interval -> times

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
    """Generate a trace of Table 2's workloads; equal arguments give equal traces.

    ONES, appendix: GPU times are drawn from Microsoft's trace, and each is replaced by the workload
    with the closest one. The paper does not state how many GPUs its jobs ask for; here that is
    drawn first, and GPU times are compared on this number. Each property has a random stream of its
    own, so that a trace with crashes differs from the one without only by the crashes.

    Args:
        mix: distribution of workloads: by GPU time, or uniform.
        arrivals: name of a process of `traces.arrivals`, or such a function.
        crash_share: share of jobs whose scripts fail once.
        cancel_share: share of jobs that their users cancel.
        gpu_times: draws GPU seconds; None: as in Microsoft's trace.
        most_slots: slots of the cluster; no job asks for more.

    Raises:
        TraceError: if a number is out of range, or the mix or process is unknown.
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
    if mix == "uniform":
        return [str(name) for name in rng.choice(tuple(WORKLOADS), size=len(slots))]
    pairs = zip(draw_gpu_times(rng, len(slots)), slots, strict=True)
    return [closest(float(gpu_s), many) for gpu_s, many in pairs]


def _check(jobs: int, mix: str, mean_interval_s: float, shares: tuple[float, ...]) -> None:
    if jobs < 1:
        raise TraceError(f"{jobs} jobs are too few", "give at least 1", "jobs")
    if mix not in {"philly", "uniform"}:
        raise TraceError(f"unknown mix {mix!r}", "choose philly or uniform", "mix")
    if not 0.0 < mean_interval_s < float("inf"):
        problem = f"{mean_interval_s} s between submissions are impossible"
        raise TraceError(problem, "give a positive number", "mean_interval_s")
    for share in shares:
        if not 0.0 <= share <= 1.0:
            raise TraceError(f"{share} is not a share of the jobs", "give 0 to 1", "share")


def shares(
    rng: Generator, jobs: int, share: float, between: tuple[float, float]
) -> list[float | None]:
    """Draw uniformly from `between` for about `share` of the jobs; None for the others."""
    struck = rng.random(jobs) < share
    values = rng.uniform(*between, jobs)
    return [float(value) if hit else None for hit, value in zip(struck, values, strict=True)]


def arrival_process(name: str) -> Arrivals:
    """Return a process by its name.

    Raises:
        TraceError: if it is unknown.
    """
    if name not in PROCESSES:
        problem = f"unknown arrival process {name!r}"
        raise TraceError(problem, f"choose from {', '.join(PROCESSES)}", "arrivals")
    return PROCESSES[name]


USER_CORES: Final = (16, 32, 64)  # requested by users, for policies of fixed sizes; chosen


def generate_curves(
    curves: Iterable[LossCurve],
    *,
    jobs: int,
    seed: int,
    arrivals: str = "poisson",
    mean_interval_s: float = 15.0,
    crash_share: float = 0.0,
    cancel_share: float = 0.0,
    work_core_s: float = WORK_CORE_S,
    most_slots: int | None = None,
) -> Trace:
    """Generate a trace of jobs that replay loss curves; equal arguments give equal traces.

    SLAQ section 3: 160 jobs "with different models, following a Poisson distribution (mean arrival
    time 15 s)". All algorithms are equally frequent, and so are the curves of each.

    Args:
        arrivals: name of a process of `traces.arrivals`.
        crash_share: share of jobs whose scripts fail once.
        cancel_share: share of jobs that their users cancel.
        work_core_s: mean work, seconds on one core; scales the time until users cancel.
        most_slots: slots of the cluster; no job asks for more.

    Raises:
        TraceError: if a number is out of range, or the process is unknown.
    """
    if jobs < 1:
        raise TraceError(f"{jobs} jobs are too few", "give at least 1", "jobs")
    families: dict[str, list[str]] = {}
    for curve in curves:
        families.setdefault(curve.family, []).append(curve.name)
    rngs = [default_rng((seed, number)) for number in range(5)]
    times = [float(at) for at in arrival_process(arrivals)(rngs[0], jobs, mean_interval_s)]
    drawn = rngs[1].random((jobs, 2))
    sizes = rngs[2].choice(USER_CORES, size=jobs)
    most = most_slots or max(USER_CORES)
    crashes = shares(rngs[3], jobs, crash_share, CRASHES)
    patience = shares(rngs[4], jobs, cancel_share, PATIENCE)
    return Trace(
        name=f"curves-{jobs}-{seed}",
        jobs=tuple(
            TraceJob(
                name=f"job-{number:04d}",
                at=Seconds(at),
                workload=_pick(_pick(list(families.values()), one), other),
                slots=min(int(size), most),
                crashes_at=crash,
                cancelled_after_s=None if waits is None else waits * work_core_s / int(size),
            )
            for number, (at, (one, other), size, crash, waits) in enumerate(
                zip(times, drawn.tolist(), sizes, crashes, patience, strict=True), 1
            )
        ),
    )


def _pick(options: list[Any], share: float) -> Any:
    return options[int(share * len(options))]


Exchange = Literal["servers", "all-reduce", "mixed"]
MAX_WORKERS: Final = 3
SPREAD: Final = 0.5  # of the logarithm of a job's length; chosen


def generate_harmony(
    *,
    jobs: int,
    seed: int,
    arrivals: str = "poisson",
    mean_interval_s: float,
    exchange: Exchange = "servers",
    job_s: float = JOB_S,
    crash_share: float = 0.0,
    cancel_share: float = 0.0,
    most_slots: int | None = None,
) -> Trace:
    """Generate a trace of Harmony's testbed; equal arguments give equal traces.

    "Randomly select a job from the 6 jobs and set its required number of workers and PSs randomly
    in [1, 3]" (evaluation, workloads).

    Args:
        arrivals: name of a process of `traces.arrivals`.
        exchange: of gradients: with parameter servers, all-reduce, or each for half of the
            jobs.
        job_s: mean training seconds of a job alone.
        crash_share: share of jobs whose scripts fail once.
        cancel_share: share of jobs that their users cancel.
        most_slots: slots of the cluster; no job asks for more.

    Raises:
        TraceError: if a number is out of range, or the process is unknown.
    """
    if jobs < 1:
        raise TraceError(f"{jobs} jobs are too few", "give at least 1", "jobs")
    rngs = [default_rng((seed, number)) for number in range(7)]
    times = [float(at) for at in arrival_process(arrivals)(rngs[0], jobs, mean_interval_s)]
    models = [str(name) for name in rngs[1].choice(tuple(BATCHES), size=jobs)]
    workers = rngs[2].integers(1, min(MAX_WORKERS, most_slots or MAX_WORKERS) + 1, size=jobs)
    servers = _servers(rngs[3], jobs, exchange)
    lengths = job_s * rngs[4].lognormal(-(SPREAD**2) / 2.0, SPREAD, size=jobs)  # mean: job_s
    crashes = shares(rngs[5], jobs, crash_share, CRASHES)
    patience = shares(rngs[6], jobs, cancel_share, PATIENCE)
    return Trace(
        name=f"harmony-{exchange}-{jobs}-{seed}",
        jobs=tuple(
            TraceJob(
                name=f"job-{number:04d}",
                at=Seconds(at),
                workload=f"{model}-{ps}ps" if ps else model,
                slots=int(many),
                samples=round(length * BATCHES[model] * int(many) / demand_of(model).step_s),
                crashes_at=crash,
                cancelled_after_s=None if waits is None else waits * float(length),
            )
            for number, (at, model, many, ps, length, crash, waits) in enumerate(
                zip(times, models, workers, servers, lengths, crashes, patience, strict=True), 1
            )
        ),
    )


def _servers(rng: Generator, jobs: int, exchange: Exchange) -> list[int]:
    """Draw the number of servers of each job; 0: all-reduce."""
    drawn = rng.integers(1, MAX_WORKERS + 1, size=jobs)
    uses = rng.random(jobs) < {"servers": 1.0, "all-reduce": 0.0, "mixed": 0.5}[exchange]
    return [int(many) if used else 0 for many, used in zip(drawn, uses, strict=True)]


VALUES: Final = (1.0, 100.0)  # theta_1
WINDOWS: Final = (1.5, 6.0)  # theta_3 over the job's time alone; chosen
KINDS: Final = (0.10, 0.55, 0.35)  # shares of jobs: insensitive, sensitive, critical in time
DECAYS: Final = ((0.0, 0.0), (0.01, 1.0), (4.0, 6.0))  # theta_2, per time slot of the paper
WINDOW_SLOTS: Final = 8.0  # time slots of a deadline, the middle of the paper's 1 to 15
STREAM: Final = 5  # random stream; smaller ones draw the trace itself


def with_utilities(trace: Trace, seed: int, own_s: Callable[[TraceJob], float]) -> Trace:
    """Return the trace with a utility for each job.

    OASiS (Bao et al., INFOCOM '18, section VI): values uniform in [1, 100]; a tenth of the jobs is
    insensitive to time, 55% are sensitive, with decays in [0.01, 1] per time slot, and 35% are
    critical, with [4, 6]. Paper: deadlines are 1 to 15 time slots for all jobs. Here: 1.5 to 6
    times the job's time alone on the slots that its user asks for (`own_s`, seconds), and a time
    slot is an eighth of the deadline, because jobs last from a minute to a day.
    """
    rng = default_rng((seed, STREAM))
    jobs = []
    for job in trace.jobs:
        value, window = rng.uniform(*VALUES), rng.uniform(*WINDOWS)
        kind, at = int(rng.choice(len(KINDS), p=KINDS)), rng.random()
        low, high = DECAYS[kind]
        deadline_s = window * own_s(job)
        decay = (low + at * (high - low)) * WINDOW_SLOTS / deadline_s
        utility = Utility(value=float(value), deadline_s=float(deadline_s), decay=float(decay))
        jobs.append(msgspec.structs.replace(job, utility=utility))
    return msgspec.structs.replace(trace, jobs=tuple(jobs))
