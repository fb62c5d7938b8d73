"""Arrival processes of jobs, and distributions of a real cluster: GPU times, gaps, sizes.

All processes take the mean time between jobs, so that they can be compared at the same load, and
return increasing times in seconds. The quantiles are those of Microsoft's Philly trace, 82,247
completed jobs of September to December 2017: https://github.com/msr-fiddle/philly-traces,
CC-BY-4.0, described by Jeon et al., *Analysis of Large-Scale Multi-Tenant GPU Clusters for DNN
Training Workloads*, USENIX ATC '19. Numbers have four significant digits.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

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
    _check(jobs, mean_s)
    return np.cumsum(rng.exponential(mean_s, jobs))


def uniform(rng: Generator, jobs: int, mean_s: float) -> FloatArray:
    """Return times drawn uniformly from a window of `jobs` times `mean_s`; see `poisson`.

    Raises:
        ValueError: if a number is out of its range.
    """
    _check(jobs, mean_s)
    return np.sort(rng.uniform(0.0, jobs * mean_s, jobs))


def bursts(rng: Generator, jobs: int, mean_s: float, size: int = 4) -> FloatArray:
    """Return times of simultaneous groups of `size` jobs; the last one may be smaller.

    The groups are a Poisson process of mean interval `size` times `mean_s`; see `poisson`.

    Raises:
        ValueError: if a number is out of its range.
    """
    _check(jobs, mean_s)
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
    _check(jobs, mean_s)
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
    _check(jobs, mean_s)
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


def _check(jobs: int, mean_s: float) -> None:
    if jobs < 0 or not 0.0 < mean_s < np.inf:
        raise ValueError(f"{jobs} jobs every {mean_s} s cannot arrive")
