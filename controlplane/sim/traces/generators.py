"""Generators of traces: Table 2's workloads, recorded loss curves, Harmony's testbed, utilities.

Arrival processes of jobs, and distributions of a real cluster: GPU times, gaps, sizes.

All processes take the mean time between jobs, so that they can be compared at the same load, and
return increasing times in seconds. The quantiles are those of Microsoft's Philly trace, 82,247
completed jobs of September to December 2017: https://github.com/msr-fiddle/philly-traces,
CC-BY-4.0, described by Jeon et al., *Analysis of Large-Scale Multi-Tenant GPU Clusters for DNN
Training Workloads*, USENIX ATC '19. Numbers have four significant digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from controlplane.sim.cluster import TraceError
from controlplane.sim.models.curves import WORK_CORE_S, LossCurve
from controlplane.sim.models.demands import demand_of
from controlplane.sim.models.harmony import BATCHES, JOB_S
from controlplane.sim.models.table2 import WORKLOADS, closest, duration_s
from controlplane.sim.models.table2_constants import CRASHES, PATIENCE, USER_SHARES, USER_SLOTS
from controlplane.sim.results import Trace, TraceJob
from schemas.ids import Seconds
from schemas.jobs import Utility

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# fmt: off
# Cumulative shares of the jobs: whole percents, and more detail in the tail.
_TAIL: Final = (0.995, 0.998, 0.999, 0.9995, 0.9999, 1.0)
SHARES: Final = (*(percent / 100.0 for percent in range(100)), *_TAIL)

# GPUs times duration, seconds; the mean is 42,811.
GPU_TIME_S: Final = (
    1.0, 26.0, 36.0, 42.0, 46.0, 49.0, 52.0, 55.0, 57.0, 59.0, 61.0, 63.0, 64.0, 65.0, 67.0, 68.0,
    69.0, 70.0, 72.0, 73.0, 75.0, 78.0, 82.0, 91.0, 104.0, 123.0, 143.0, 165.0, 182.0, 203.0,
    220.0, 259.0, 296.0, 320.0, 350.0, 417.0, 484.0, 527.0, 558.0, 587.0, 627.0, 672.0, 722.0,
    779.0, 842.0, 888.0, 929.0, 985.0, 1052.0, 1120.0, 1186.0, 1251.0, 1328.0, 1409.0, 1459.0,
    1497.0, 1540.0, 1594.0, 1680.0, 1787.0, 1861.0, 1930.0, 1990.0, 2045.0, 2109.0, 2201.0,
    2328.0, 2414.0, 2473.0, 2529.0, 2575.0, 2625.0, 2681.0, 2747.0, 2840.0, 3171.0, 3448.0,
    3646.0, 3944.0, 4092.0, 4461.0, 5012.0, 5306.0, 5582.0, 5820.0, 6046.0, 6906.0, 8606.0,
    9447.0, 1.084e+04, 1.268e+04, 1.525e+04, 2.009e+04, 2.798e+04, 4.425e+04, 6.243e+04,
    9.878e+04, 176_300.0, 376_000.0, 1_031_000.0, 1_886_000.0, 3_611_000.0, 5_194_000.0,
    7_425_000.0, 17_020_000.0, 37_030_000.0,
)

# Time between two submissions of the whole trace, seconds; the mean is 114.4.
GAP_S: Final = (
    0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0,
    2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0,
    5.0, 5.0, 5.0, 5.0, 6.0, 6.0, 6.0, 6.0, 7.0, 7.0, 7.0, 8.0, 8.0, 8.0, 9.0, 9.0, 10.0, 10.0,
    11.0, 11.0, 12.0, 13.0, 13.0, 14.0, 15.0, 16.0, 17.0, 18.0, 19.0, 20.0, 22.0, 24.0, 26.0,
    28.0, 31.0, 34.0, 38.0, 44.0, 53.0, 62.0, 73.0, 87.0, 101.0, 118.0, 135.0, 155.0, 176.0,
    201.0, 227.0, 255.0, 287.0, 323.0, 361.0, 408.0, 458.0, 519.0, 591.0, 599.0, 600.0, 600.0,
    600.0, 601.0, 725.0, 1260.0, 2293.0, 1.078e+04, 5.74e+04, 247_200.0,
)

# GPUs of a job -> share of jobs.
GPUS: Final = {
    1: 0.9317, 2: 0.0221, 4: 0.02274, 8: 0.01998,
    12: 0.0000851, 16: 0.0024195, 24: 0.0000851, 32: 0.0008146, 64: 0.0000730, 128: 0.0000365,
}
# fmt: on
MAX_GAP_QUANTILE: Final = 0.999  # quantile; longer gaps are holes in the trace


def sample(rng: Generator, n: int, *, longest_s: float | None = None) -> FloatArray:
    """Draw GPU times of `n` jobs by inverse transform, geometric between quantiles; seconds.

    Their mean is 44,200 s, 3% above the trace's, because a table has little detail about the
    longest jobs. With `longest_s` the distribution is cut off there.

    Raises:
        ValueError: if `longest_s` is shorter than every job of the trace.
    """
    longest = GPU_TIME_S[-1] if longest_s is None else longest_s
    if not longest >= GPU_TIME_S[0]:
        raise ValueError(f"no job of the trace is as short as {longest} s")
    top = np.interp(np.log(longest), np.log(GPU_TIME_S), SHARES)
    return np.exp(np.interp(rng.uniform(0.0, top, n), SHARES, np.log(GPU_TIME_S)))


def sample_gaps(rng: Generator, n: int) -> FloatArray:
    """Draw `n` independent times between submissions, seconds.

    Independence loses that busy hours follow busy hours. Gaps above the quantile of 99.9% (38
    minutes; the longest is three days) are left out: they are holes in the trace.
    """
    top = MAX_GAP_QUANTILE
    return np.expm1(np.interp(rng.uniform(0.0, top, n), SHARES, np.log1p(GAP_S)))


def mean_gap_s() -> float:
    """Return the mean of `sample_gaps`."""
    middle = (np.arange(100_000) + 0.5) / 100_000 * MAX_GAP_QUANTILE
    return float(np.expm1(np.interp(middle, SHARES, np.log1p(GAP_S))).mean())


def sample_gpus(rng: Generator, n: int, most: int) -> IntArray:
    """Draw the GPUs of `n` jobs; sizes above `most` are left out.

    Raises:
        ValueError: if `most` is below 1.
    """
    if most < 1:
        raise ValueError("a job needs at least one GPU")
    sizes = [size for size in GPUS if size <= most]
    shares = np.array([GPUS[size] for size in sizes])
    return rng.choice(np.array(sizes, dtype=np.int64), size=n, p=shares / shares.sum())


HOUR_S: Final = 3600.0
JOBS_PER_RATE: Final = 20  # jobs per rate
# Share of the submissions of the Philly trace in each hour of the day, by its clocks; see the
# module's docstring for the source.
HOURLY_SHARES: Final = (
    0.0531, 0.0410, 0.0466, 0.0460, 0.0292, 0.0480, 0.0697, 0.0870,
    0.0462, 0.0419, 0.0427, 0.0362, 0.0312, 0.0294, 0.0266, 0.0270,
    0.0367, 0.0278, 0.0334, 0.0303, 0.0423, 0.0382, 0.0472, 0.0421,
)  # fmt: skip


def poisson(rng: Generator, jobs: int, mean_s: float) -> FloatArray:
    """Return times with independent exponential gaps, also before the first job (ONES: 30 s).

    Args:
        mean_s: between jobs, above 0.

    Returns:
        Shape (jobs,), seconds.

    Raises:
        ValueError: if a number is out of its range.
    """
    _check_rate(jobs, mean_s)
    return np.cumsum(rng.exponential(mean_s, jobs))


def uniform(rng: Generator, jobs: int, mean_s: float) -> FloatArray:
    """Return times drawn uniformly from a window of `jobs` times `mean_s`; see `poisson`.

    Raises:
        ValueError: if a number is out of its range.
    """
    _check_rate(jobs, mean_s)
    return np.sort(rng.uniform(0.0, jobs * mean_s, jobs))


def bursts(rng: Generator, jobs: int, mean_s: float, size: int = 4) -> FloatArray:
    """Return times of simultaneous groups of `size` jobs; the last one may be smaller.

    The groups are a Poisson process of mean interval `size` times `mean_s`; see `poisson`.

    Raises:
        ValueError: if a number is out of its range.
    """
    _check_rate(jobs, mean_s)
    if size < 1:
        raise ValueError(f"a burst has at least 1 job, not {size}")
    groups = -(-jobs // size)
    return np.repeat(poisson(rng, groups, size * mean_s), size)[:jobs]


def google(
    rng: Generator, jobs: int, mean_s: float, *, spread: float = 0.25, together: float = 3.0
) -> FloatArray:
    """Return times of bursts under a changing load, like Google's cluster trace; see `poisson`.

    Harmony uses the arrivals of that trace, scaled down; this is our own generator. Users submit
    geometric groups of `together` jobs on average (at least 1), at a rate that is drawn anew for
    each stretch of about twenty jobs, log-normal with a coefficient of variation of `spread`; both
    numbers are chosen.

    Raises:
        ValueError: if a number is out of its range.
    """
    _check_rate(jobs, mean_s)
    sizes = rng.geometric(1.0 / together, jobs)
    sigma = np.sqrt(np.log1p(spread**2))
    rates = rng.lognormal(-(sigma**2) / 2.0, sigma, jobs)  # by stretch; mean 1
    each = rates[(np.cumsum(sizes) // JOBS_PER_RATE) % max(1, jobs)]
    slowed = np.exp(sigma**2)  # the mean of 1 / rate
    gaps = rng.exponential(together * mean_s, jobs) / each / slowed
    return np.repeat(np.cumsum(gaps), sizes)[:jobs]


def philly(
    rng: Generator, jobs: int, mean_s: float, *, begin_hour: float | None = None
) -> FloatArray:
    """Return times with gaps as in the Philly trace, scaled to the mean; see `poisson`.

    With `begin_hour`, in [0, 24), hours are as busy as in the trace, and `mean_s` is that of a
    whole day. Without it all hours are equal.
    """
    _check_rate(jobs, mean_s)
    moments = np.cumsum(sample_gaps(rng, jobs)) * (mean_s / mean_gap_s())
    return moments if begin_hour is None else _by_day(moments, begin_hour)


def _by_day(moments: FloatArray, begin_hour: float) -> FloatArray:
    """Stretch quiet hours and compress busy ones; a whole day stays a day."""
    if not 0.0 <= begin_hour < 24.0:  # noqa: PLR2004 - hours of a day
        raise ValueError(f"begin_hour {begin_hour} is not in [0, 24)")
    share = np.concatenate([[0.0], np.cumsum(HOURLY_SHARES) / np.sum(HOURLY_SHARES)])
    hours = np.arange(25.0)
    day_s = 24.0 * HOUR_S
    begin = np.interp(begin_hour, hours, share) * day_s
    days, within = np.divmod(moments + begin, day_s)
    clock = np.interp(within / day_s, share, hours) * HOUR_S
    moved: FloatArray = days * day_s + clock - begin_hour * HOUR_S
    return moved


def _check_rate(jobs: int, mean_s: float) -> None:
    if jobs < 0 or not 0.0 < mean_s < np.inf:
        raise ValueError(f"{jobs} jobs every {mean_s} s cannot arrive")


GpuTimes = Callable[[Generator, int], Iterable[float]]  # GPU seconds of so many jobs
Arrivals = Callable[[Generator, int, float], Iterable[float]]  # jobs, mean interval -> times

PROCESSES: Final[Mapping[str, Arrivals]] = {
    "poisson": poisson,
    "uniform": uniform,
    "bursts": bursts,
    "philly": philly,
    "google": google,
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
    names = _workloads(rngs[2], mix, slots, gpu_times or sample)
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
MOST_WORKERS: Final = 3
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
    workers = rngs[2].integers(1, min(MOST_WORKERS, most_slots or MOST_WORKERS) + 1, size=jobs)
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
    drawn = rng.integers(1, MOST_WORKERS + 1, size=jobs)
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
