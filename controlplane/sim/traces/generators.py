"""Generators of traces: Table 2's workloads, recorded loss curves, Harmony's testbed, utilities.

Arrival processes return increasing times in seconds, shape (jobs,), for a mean time between jobs.
The quantiles are those of Microsoft's Philly trace, 82,247 completed jobs of September to December
2017: https://github.com/msr-fiddle/philly-traces, CC-BY-4.0, described by Jeon et al., *Analysis of
Large-Scale Multi-Tenant GPU Clusters for DNN Training Workloads*, USENIX ATC '19. Numbers have four
significant digits.

Each property has its own random stream, so that a trace with crashes differs from the same trace
without crashes only in the crashes. In all generators, `arrivals` is a key of `PROCESSES`,
`crash_share` is the share of jobs with a script that fails once, `cancel_share` the share of jobs
that their users cancel, and `most_slots` the number of slots of the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.random import Generator, default_rng

from controlplane.prediction import FloatArray
from controlplane.sim.models.curves import WORK_CORE_S, LossCurve
from controlplane.sim.models.demands import demand_of
from controlplane.sim.models.harmony import BATCHES, JOB_S
from controlplane.sim.models.table2 import GPU_TIME, WORKLOADS, closest, duration_s
from controlplane.sim.models.table2_constants import CRASHES, PATIENCE, USER_SHARES, USER_SLOTS
from controlplane.sim.results import Trace, TraceJob
from schemas.ids import Seconds
from schemas.jobs import Utility

# --- distributions of a real cluster

# fmt: off
# Cumulative shares of the jobs: one per percent, and more detail in the tail.
_TAIL: Final = (0.995, 0.998, 0.999, 0.9995, 0.9999, 1.0)
SHARES: Final = (*(percent / 100.0 for percent in range(100)), *_TAIL)

# Quantiles of GPUs times duration, in seconds; the mean is 42,811 s.
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

# Quantiles of the time between two submissions, in seconds; the mean is 114.4 s.
GAP_S: Final = (
    0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0,
    2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0,
    5.0, 5.0, 5.0, 5.0, 6.0, 6.0, 6.0, 6.0, 7.0, 7.0, 7.0, 8.0, 8.0, 8.0, 9.0, 9.0, 10.0, 10.0,
    11.0, 11.0, 12.0, 13.0, 13.0, 14.0, 15.0, 16.0, 17.0, 18.0, 19.0, 20.0, 22.0, 24.0, 26.0,
    28.0, 31.0, 34.0, 38.0, 44.0, 53.0, 62.0, 73.0, 87.0, 101.0, 118.0, 135.0, 155.0, 176.0,
    201.0, 227.0, 255.0, 287.0, 323.0, 361.0, 408.0, 458.0, 519.0, 591.0, 599.0, 600.0, 600.0,
    600.0, 601.0, 725.0, 1260.0, 2293.0, 1.078e+04, 5.74e+04, 247_200.0,
)
# fmt: on
MAX_GAP_QUANTILE: Final = 0.999  # longer gaps are holes in the trace


def sample(rng: Generator, n: int) -> FloatArray:
    """Draw GPU times in seconds, by inverse transform with geometric interpolation.

    Their mean is 44,200 s, 3% above the trace's mean, because the table has little detail about the
    longest jobs.
    """
    return np.exp(np.interp(rng.uniform(0.0, 1.0, n), SHARES, np.log(GPU_TIME_S)))


def sample_gaps(rng: Generator, n: int) -> FloatArray:
    """Draw `n` independent times between submissions, in seconds.

    In the Philly trace busy hours follow busy hours; independent times lose this property. Gaps
    above the 99.9% quantile (38 minutes) are not drawn, because they are holes in the trace.
    """
    return _gaps_at(rng.uniform(0.0, MAX_GAP_QUANTILE, n))


def mean_gap_s() -> float:
    """Return the mean of the times that `sample_gaps` draws, in seconds."""
    middle = (np.arange(100_000) + 0.5) / 100_000 * MAX_GAP_QUANTILE
    return float(_gaps_at(middle).mean())


def _gaps_at(shares: FloatArray) -> FloatArray:
    return np.expm1(np.interp(shares, SHARES, np.log1p(GAP_S)))


# --- arrival processes

BURST_JOBS: Final = 4
GOOGLE_GROUP_JOBS: Final = 3.0  # mean jobs per group; chosen
GOOGLE_SPREAD: Final = 0.25  # coefficient of variation of the rate; chosen
JOBS_PER_RATE: Final = 20


def poisson(rng: Generator, jobs: int, mean_s: float) -> FloatArray:
    """Return times with independent exponential gaps, including the first time (ONES: 30 s)."""
    return np.cumsum(rng.exponential(mean_s, jobs))


def uniform(rng: Generator, jobs: int, mean_s: float) -> FloatArray:
    """Return sorted times, drawn uniformly from a window of `jobs` times `mean_s` seconds."""
    return np.sort(rng.uniform(0.0, jobs * mean_s, jobs))


def bursts(rng: Generator, jobs: int, mean_s: float) -> FloatArray:
    """Return times of groups of `BURST_JOBS` simultaneous jobs; the last group can be smaller.

    The groups form a Poisson process.
    """
    groups = -(-jobs // BURST_JOBS)
    return np.repeat(poisson(rng, groups, BURST_JOBS * mean_s), BURST_JOBS)[:jobs]


def google(rng: Generator, jobs: int, mean_s: float) -> FloatArray:
    """Return times of bursts under a changing load, like those in Google's cluster trace.

    Harmony scales that trace down; this generator is our own. Users submit groups with a geometric
    size of `GOOGLE_GROUP_JOBS` on average. A log-normal rate applies to about twenty jobs.
    """
    sizes = rng.geometric(1.0 / GOOGLE_GROUP_JOBS, jobs)
    sigma = np.sqrt(np.log1p(GOOGLE_SPREAD**2))
    rates = rng.lognormal(-(sigma**2) / 2.0, sigma, jobs)  # one per stretch; mean 1
    each = rates[(np.cumsum(sizes) // JOBS_PER_RATE) % max(1, jobs)]
    slowed = np.exp(sigma**2)  # mean of 1 / rate
    gaps = rng.exponential(GOOGLE_GROUP_JOBS * mean_s, jobs) / each / slowed
    return np.repeat(np.cumsum(gaps), sizes)[:jobs]


def philly(rng: Generator, jobs: int, mean_s: float) -> FloatArray:
    """Return times with the gaps of the Philly trace, scaled to the mean, without busy hours."""
    return np.cumsum(sample_gaps(rng, jobs)) * (mean_s / mean_gap_s())


Arrivals = Callable[[Generator, int, float], FloatArray]  # jobs, mean interval -> times
PROCESSES: Final[Mapping[str, Arrivals]] = {
    "poisson": poisson, "uniform": uniform, "bursts": bursts, "philly": philly, "google": google,
}  # fmt: skip


# --- traces


def generate(
    *,
    jobs: int = 400,
    seed: int,
    mix: Literal["philly", "heavy", "uniform"] = "philly",
    arrivals: str = "poisson",
    mean_interval_s: float = 30.0,
    crash_share: float = 0.0,
    cancel_share: float = 0.0,
    most_slots: int | None = None,
) -> Trace:
    """Generate a trace of Table 2's workloads.

    ONES, appendix: GPU times are drawn from Microsoft's trace, and each is replaced by the workload
    with the closest GPU time. The paper does not specify how many GPUs its jobs request. Here this
    number is drawn first. With mix "heavy", jobs that are longer than all workloads keep the GPU
    time that was drawn. With mix "uniform" all workloads are equally frequent.
    """
    rngs = [default_rng((seed, number)) for number in range(5)]
    times = PROCESSES[arrivals](rngs[0], jobs, mean_interval_s)
    drawn = rngs[1].choice(USER_SLOTS, size=jobs, p=USER_SHARES)
    slots = [min(int(many), most_slots or int(many)) for many in drawn]
    if mix == "uniform":
        names = [str(name) for name in rngs[2].choice(tuple(WORKLOADS), size=jobs)]
    elif mix == "heavy":
        names = [f"{GPU_TIME}{gpu_s:.6g}" for gpu_s in sample(rngs[2], jobs)]
    else:
        names = [closest(float(s), n) for s, n in zip(sample(rngs[2], jobs), slots, strict=True)]
    drawn_jobs = (
        (duration_s(name, many), {"workload": name, "slots": many})
        for name, many in zip(names, slots, strict=True)
    )
    fates = _fates(rngs[3], rngs[4], jobs, crash_share, cancel_share)
    return _trace(f"table2-{mix}-{jobs}-{seed}", times, drawn_jobs, fates)


Job = tuple[float, dict[str, Any]]  # seconds alone; other fields
Fate = tuple[float | None, float | None]  # share of the work at a crash; patience in times alone


def _fates(
    crash_rng: Generator, cancel_rng: Generator, jobs: int, crash_share: float, cancel_share: float
) -> list[Fate]:
    crashes = shares(crash_rng, jobs, crash_share, CRASHES)
    patience = shares(cancel_rng, jobs, cancel_share, PATIENCE)
    return list(zip(crashes, patience, strict=True))


def shares(
    rng: Generator, jobs: int, share: float, between: tuple[float, float]
) -> list[float | None]:
    """Draw a uniform value in `between` for about `share` of the jobs; other jobs get None."""
    struck = rng.random(jobs) < share
    values = rng.uniform(*between, jobs)
    return [float(value) if hit else None for hit, value in zip(struck, values, strict=True)]


def _trace(name: str, times: FloatArray, jobs: Iterable[Job], fates: Sequence[Fate]) -> Trace:
    drawn = zip(times.tolist(), jobs, fates, strict=True)
    return Trace(
        name=name,
        jobs=tuple(
            TraceJob(
                name=f"job-{number:04d}",
                at=Seconds(at),
                crashes_at=crash,
                cancelled_after_s=None if patience is None else patience * own_s,
                **fields,
            )
            for number, (at, (own_s, fields), (crash, patience)) in enumerate(drawn, 1)
        ),
    )


USER_CORES: Final = (16, 32, 64)  # sizes that users request, for policies of fixed sizes; chosen


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
    """Generate a trace of jobs that replay loss curves.

    SLAQ section 3: 160 jobs "with different models, following a Poisson distribution (mean arrival
    time 15 s)". All algorithms are equally frequent, and so are the curves of each algorithm.
    `work_core_s` is the mean work of a job in seconds on one core; the time until users cancel is
    proportional to it.
    """
    families: dict[str, list[str]] = {}
    for curve in curves:
        families.setdefault(curve.family, []).append(curve.name)
    rngs = [default_rng((seed, number)) for number in range(5)]
    times = PROCESSES[arrivals](rngs[0], jobs, mean_interval_s)
    drawn = rngs[1].random((jobs, 2)).tolist()
    sizes = rngs[2].choice(USER_CORES, size=jobs).tolist()
    most = most_slots or max(USER_CORES)
    names = (_pick(_pick(list(families.values()), one), other) for one, other in drawn)
    drawn_jobs = (
        (work_core_s / size, {"workload": name, "slots": min(size, most)})
        for name, size in zip(names, sizes, strict=True)
    )
    fates = _fates(rngs[3], rngs[4], jobs, crash_share, cancel_share)
    return _trace(f"curves-{jobs}-{seed}", times, drawn_jobs, fates)


def _pick(options: list[Any], share: float) -> Any:
    return options[int(share * len(options))]


Exchange = Literal["servers", "all-reduce", "mixed"]
SERVED_SHARES: Final = {"servers": 1.0, "all-reduce": 0.0, "mixed": 0.5}  # share of the jobs
MAX_WORKERS: Final = 3
SPREAD: Final = 0.5  # sigma of the logarithm of a job's length; chosen


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
    """Generate a trace of jobs in Harmony's testbed.

    "Randomly select a job from the 6 jobs and set its required number of workers and PSs randomly
    in [1, 3]" (evaluation, workloads). Jobs exchange gradients through parameter servers or by
    all-reduce; with "mixed" half of the jobs use each method. `job_s` is the mean training time of
    a job alone, in seconds.
    """
    rngs = [default_rng((seed, number)) for number in range(7)]
    times = PROCESSES[arrivals](rngs[0], jobs, mean_interval_s)
    models = [str(name) for name in rngs[1].choice(tuple(BATCHES), size=jobs)]
    most = min(MAX_WORKERS, most_slots or MAX_WORKERS)
    workers = rngs[2].integers(1, most + 1, size=jobs).tolist()
    drawn = rngs[3].integers(1, MAX_WORKERS + 1, size=jobs)
    servers = np.where(rngs[3].random(jobs) < SERVED_SHARES[exchange], drawn, 0).tolist()
    lengths = job_s * rngs[4].lognormal(-(SPREAD**2) / 2.0, SPREAD, size=jobs)  # mean: job_s
    columns = (models, workers, servers, lengths.tolist())
    drawn_jobs = (
        (
            length,
            {
                "workload": f"{model}-{served}ps" if served else model,
                "slots": many,
                "samples": round(length * BATCHES[model] * many / demand_of(model).step_s),
            },
        )
        for model, many, served, length in zip(*columns, strict=True)
    )
    fates = _fates(rngs[5], rngs[6], jobs, crash_share, cancel_share)
    return _trace(f"harmony-{exchange}-{jobs}-{seed}", times, drawn_jobs, fates)


VALUES: Final = (1.0, 100.0)  # range of theta_1, the value of a job
WINDOWS: Final = (1.5, 6.0)  # range of theta_3 (deadline) divided by the time alone; chosen
KINDS: Final = (0.10, 0.55, 0.35)  # shares of jobs: time-insensitive, time-sensitive, time-critical
DECAYS: Final = ((0.0, 0.0), (0.01, 1.0), (4.0, 6.0))  # theta_2, decay per time slot
WINDOW_SLOTS: Final = 8.0  # time slots of a deadline, the middle of the paper's 1 to 15
STREAM: Final = 5  # random stream; streams 0 to 4 draw the trace of Table 2's jobs


def with_utilities(trace: Trace, seed: int, own_s: Callable[[TraceJob], float]) -> Trace:
    """Return the trace with a utility for each job.

    OASiS (Bao et al., INFOCOM '18, section VI): values are uniform in [1, 100]. 10% of the jobs are
    insensitive to time, 55% are sensitive with decays in [0.01, 1] per time slot, and 35% are
    critical with decays in [4, 6]. Paper: deadlines are 1 to 15 time slots. Here: deadlines are 1.5
    to 6 times the job's time alone on the requested slots (`own_s`, seconds), and a time slot is an
    eighth of the deadline, because jobs run from a minute to a day.
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


USER_STREAM: Final = 6  # random stream of users


def with_users(trace: Trace, seed: int, users: int, projects: int) -> Trace:
    """Return the trace with its jobs dealt to `users`, of whom the k-th has a share of 1 / k.

    Users belong to `projects` in turn; 0: each user has an own project.
    """
    shares = 1.0 / np.arange(1, users + 1)
    drawn = default_rng((seed, USER_STREAM)).choice(
        users, size=len(trace.jobs), p=shares / shares.sum()
    )
    jobs = [
        msgspec.structs.replace(
            job,
            user=f"user-{user + 1}",
            project=f"project-{user % projects + 1}" if projects else "",
        )
        for job, user in zip(trace.jobs, drawn.tolist(), strict=True)
    ]
    return msgspec.structs.replace(trace, jobs=tuple(jobs))
