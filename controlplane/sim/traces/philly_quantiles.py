"""How much GPU time jobs take, how far apart they come, and how large they are, in a real cluster.

Quantiles of the Philly trace of Microsoft, 82,247 completed jobs of September to December 2017:
https://github.com/msr-fiddle/philly-traces, CC-BY-4.0, described by Jeon et al., *Analysis of
Large-Scale Multi-Tenant GPU Clusters for DNN Training Workloads*, USENIX ATC '19. Numbers have
four significant digits.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# fmt: off
# Share of the jobs that are at most as large: whole percents, and the tail in more detail.
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

# From one submission of the whole trace to the next, seconds; the mean is 114.4.
GAP_S: Final = (
    0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0,
    2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0,
    5.0, 5.0, 5.0, 5.0, 6.0, 6.0, 6.0, 6.0, 7.0, 7.0, 7.0, 8.0, 8.0, 8.0, 9.0, 9.0, 10.0, 10.0,
    11.0, 11.0, 12.0, 13.0, 13.0, 14.0, 15.0, 16.0, 17.0, 18.0, 19.0, 20.0, 22.0, 24.0, 26.0,
    28.0, 31.0, 34.0, 38.0, 44.0, 53.0, 62.0, 73.0, 87.0, 101.0, 118.0, 135.0, 155.0, 176.0,
    201.0, 227.0, 255.0, 287.0, 323.0, 361.0, 408.0, 458.0, 519.0, 591.0, 599.0, 600.0, 600.0,
    600.0, 601.0, 725.0, 1260.0, 2293.0, 1.078e+04, 5.74e+04, 247_200.0,
)

# GPUs of a job, and the share of jobs that ask for so many.
GPUS: Final = {
    1: 0.9317, 2: 0.0221, 4: 0.02274, 8: 0.01998,
    12: 0.0000851, 16: 0.0024195, 24: 0.0000851, 32: 0.0008146, 64: 0.0000730, 128: 0.0000365,
}
# fmt: on
HOLES: Final = 0.999  # longer gaps are holes of the trace


def sample(rng: Generator, n: int, *, longest_s: float | None = None) -> FloatArray:
    """GPU times of `n` jobs, by inverse transform; geometric between quantiles.

    Their mean is 44,200 s, 3% above the trace's: a table knows little of the longest jobs.

    Args:
        longest_s: none is longer; as if the trace ended there. None: as in the trace.

    Returns:
        Shape (n,), seconds.

    Raises:
        ValueError: if `longest_s` is shorter than every job of the trace.
    """
    longest = GPU_TIME_S[-1] if longest_s is None else longest_s
    if not longest >= GPU_TIME_S[0]:
        raise ValueError(f"no job of the trace is as short as {longest} s")
    top = np.interp(np.log(longest), np.log(GPU_TIME_S), SHARES)
    return np.exp(np.interp(rng.uniform(0.0, top, n), SHARES, np.log(GPU_TIME_S)))


def sample_gaps(rng: Generator, n: int) -> FloatArray:
    """Times between submissions.

    Drawn one by one: that busy hours follow busy hours is lost. Gaps above the quantile of 99.9%
    (38 minutes; the longest is three days) are left out: the trace has holes.

    Returns:
        Shape (n,), seconds.
    """
    top = HOLES
    return np.expm1(np.interp(rng.uniform(0.0, top, n), SHARES, np.log1p(GAP_S)))


def mean_gap_s() -> float:
    """The mean of what `sample_gaps` draws."""
    middle = (np.arange(100_000) + 0.5) / 100_000 * HOLES
    return float(np.expm1(np.interp(middle, SHARES, np.log1p(GAP_S))).mean())


def sample_gpus(rng: Generator, n: int, most: int) -> IntArray:
    """GPUs of jobs; larger jobs are left out.

    Args:
        most: GPUs of the largest one, at least 1.

    Returns:
        Shape (n,).

    Raises:
        ValueError: if `most` is below 1.
    """
    if most < 1:
        raise ValueError("a job needs at least one GPU")
    sizes = [size for size in GPUS if size <= most]
    shares = np.array([GPUS[size] for size in sizes])
    return rng.choice(np.array(sizes, dtype=np.int64), size=n, p=shares / shares.sum())
