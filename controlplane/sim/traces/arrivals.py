"""When jobs are submitted: moments in growing order, seconds since the beginning.

All processes take the mean time between jobs, so that they can be compared at the same load.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from controlplane.sim.traces.philly_quantiles import mean_gap_s, sample_gaps

FloatArray = NDArray[np.float64]

HOUR_S: Final = 3600.0
STRETCH: Final = 20  # jobs that come at one rate
# Share of the submissions of the Philly trace in each hour of the day, as its clocks show it; see
# `gpu_times` for the source.
BY_HOUR: Final = (
    0.0531, 0.0410, 0.0466, 0.0460, 0.0292, 0.0480, 0.0697, 0.0870,
    0.0462, 0.0419, 0.0427, 0.0362, 0.0312, 0.0294, 0.0266, 0.0270,
    0.0367, 0.0278, 0.0334, 0.0303, 0.0423, 0.0382, 0.0472, 0.0421,
)  # fmt: skip


def poisson(rng: Generator, jobs: int, mean_s: float) -> FloatArray:
    """Independent exponential gaps, the first one before the first job (ONES: mean 30 s).

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
    """Each job at any moment of a window of `jobs` times `mean_s`.

    Args:
        mean_s: between jobs, above 0.

    Returns:
        Shape (jobs,), seconds.

    Raises:
        ValueError: if a number is out of its range.
    """
    _check(jobs, mean_s)
    return np.sort(rng.uniform(0.0, jobs * mean_s, jobs))


def bursts(rng: Generator, jobs: int, mean_s: float, size: int = 4) -> FloatArray:
    """Groups of jobs at the same moment, the last one perhaps smaller.

    The groups are a Poisson process of mean interval `size` times `mean_s`.

    Args:
        mean_s: between jobs, above 0.
        size: jobs of a group, at least 1.

    Returns:
        Shape (jobs,), seconds.

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
    """Bursts on a load that rises and falls, like Google's cluster trace; our own generator.

    Harmony takes the arrivals of that trace, scaled down. Here users submit geometric groups of
    `together` jobs on average, at a rate that is drawn anew for each stretch of about twenty jobs,
    log-normal with a coefficient of variation of `spread`; both numbers are chosen.

    Args:
        mean_s: between jobs, above 0.
        together: jobs of a group on average, at least 1.

    Returns:
        Shape (jobs,), seconds.

    Raises:
        ValueError: if a number is out of its range.
    """
    _check(jobs, mean_s)
    sizes = rng.geometric(1.0 / together, jobs)
    sigma = np.sqrt(np.log1p(spread**2))
    rates = rng.lognormal(-(sigma**2) / 2.0, sigma, jobs)  # of stretches; of mean 1
    each = rates[(np.cumsum(sizes) // STRETCH) % max(1, jobs)]
    slowed = np.exp(sigma**2)  # the mean of 1 / rate
    gaps = rng.exponential(together * mean_s, jobs) / each / slowed
    return np.repeat(np.cumsum(gaps), sizes)[:jobs]


def philly(
    rng: Generator, jobs: int, mean_s: float, *, begin_hour: float | None = None
) -> FloatArray:
    """Heavy-tailed gaps as in the Philly trace, scaled to the mean; see `poisson`.

    Args:
        mean_s: between jobs, above 0; of a whole day if there are busy and quiet hours.
        begin_hour: of the day, in [0, 24): hours are as busy as in the trace. None: all are equal.
    """
    _check(jobs, mean_s)
    moments = np.cumsum(sample_gaps(rng, jobs)) * (mean_s / mean_gap_s())
    return moments if begin_hour is None else _by_day(moments, begin_hour)


def _by_day(moments: FloatArray, begin_hour: float) -> FloatArray:
    """Stretch quiet hours and squeeze busy ones; a whole day stays a day."""
    if not 0.0 <= begin_hour < 24.0:  # noqa: PLR2004 - hours of a day
        raise ValueError(f"begin_hour {begin_hour} is not in [0, 24)")
    share = np.concatenate([[0.0], np.cumsum(BY_HOUR) / np.sum(BY_HOUR)])
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
