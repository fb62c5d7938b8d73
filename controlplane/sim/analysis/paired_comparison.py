"""Paired comparison of two policies on the same jobs, with confidence intervals and tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.sim.analysis.summary import finished
from controlplane.sim.cluster import ResultsError
from controlplane.sim.results import SimulationResult

RESAMPLES: Final = 5_000
MAX_DRAWS: Final = 2_000_000  # random numbers per draw, to bound memory
INTERVAL_QUANTILES: Final = (0.025, 0.975)  # of a 95% interval

FloatArray = NDArray[np.float64]


class Interval(msgspec.Struct, frozen=True):
    """A 95% confidence interval."""

    low: float
    high: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Completion times of the first policy compared with those of the second, paired by job."""

    first: str
    second: str
    jobs: int  # pairs
    simulations: int  # pairs of results with such jobs: seeds times settings
    left_out: int  # counted jobs that did not finish under both
    first_mean_s: float
    second_mean_s: float
    difference_s: float  # first minus second; below 0: the first is faster
    difference_ci_s: Interval
    ratio: float  # first over second; below 1: the first is faster
    ratio_ci: Interval
    changed: int  # pairs that differ: the sample of the Wilcoxon tests
    two_sided_p: float  # small: the policies are not equivalent
    less_p: float  # small: the first is faster
    greater_p: float  # small: the first is slower; ONES table 4 has it near 1


def compare(
    first: Sequence[SimulationResult], second: Sequence[SimulationResult], *, seed: int = 0
) -> Comparison:
    """Compare two policies on the simulations of equal setting and seed that both have.

    Means are over all pairs of jobs. Intervals come from a bootstrap that first draws simulations,
    then jobs within each, because jobs of one simulation depend on each other. With a single
    simulation only jobs are drawn, and the interval does not cover other traces. Wilcoxon's
    signed-rank tests are on pairs of jobs, as in table 4 of ONES, which treats them as independent:
    the p values are smaller than repeated simulations would support.

    Args:
        seed: of the bootstrap; equal seeds give equal intervals.

    Raises:
        ResultsError: if the policies have no simulation, or no finished job, in common; or a
            simulation occurs twice.
    """
    left, right = _by_simulation(first), _by_simulation(second)
    shared = [simulation for simulation in left if simulation in right]
    pairs = [_paired(left[simulation], right[simulation]) for simulation in shared]
    times = [pair for pair in pairs if len(pair)]
    if not times:
        problem = "the two policies have no finished job of the same setting and seed in common"
        raise ResultsError(problem, "simulate both on the same traces and seeds")
    every = np.concatenate(times)
    counted = sum(_counted(left[simulation], right[simulation]) for simulation in shared)
    return Comparison(
        first=first[0].policy,
        second=second[0].policy,
        jobs=len(every),
        simulations=len(times),
        left_out=counted - len(every),
        first_mean_s=float(every[:, 0].mean()),
        second_mean_s=float(every[:, 1].mean()),
        difference_s=float((every[:, 0] - every[:, 1]).mean()),
        ratio=_ratio(every[:, 0].mean(), every[:, 1].mean()),
        **_intervals(times, np.random.default_rng(seed)),
        **_wilcoxon(every[:, 0] - every[:, 1]),
    )


def mean_interval(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Return a bootstrap interval of the mean; a single value is its own interval."""
    given = np.asarray(values, dtype=float)
    drawn = np.random.default_rng(seed).integers(len(given), size=(RESAMPLES, len(given)))
    return _interval(given[drawn].mean(axis=1))


def _by_simulation(results: Sequence[SimulationResult]) -> dict[str, SimulationResult]:
    found: dict[str, SimulationResult] = {}
    for result in results:
        simulation = msgspec.json.encode(
            (result.setting, result.seed), order="deterministic"
        ).decode()
        if simulation in found:
            problem = f"{result.policy} has two results of seed {result.seed} in the same setting"
            raise ResultsError(problem, "compare one policy with one set of options at a time")
        found[simulation] = result
    return found


def _paired(first: SimulationResult, second: SimulationResult) -> FloatArray:
    """Return completion times of the jobs that finished under both, shape (J, 2), seconds."""
    theirs = {job.job: job.jct_s for job in finished(second)}
    both = [(job.jct_s, theirs[job.job]) for job in finished(first) if job.job in theirs]
    return np.array(both, dtype=float).reshape(-1, 2)


def _counted(first: SimulationResult, second: SimulationResult) -> int:
    return len({job.job for result in (first, second) for job in result.jobs if job.counted})


def _intervals(times: Sequence[FloatArray], rng: np.random.Generator) -> dict[str, Any]:
    largest = max(len(pair) for pair in times)
    step = max(1, MAX_DRAWS // (largest * len(times)))
    sums = np.zeros((RESAMPLES, 2))
    counts = np.zeros(RESAMPLES)
    for begin in range(0, RESAMPLES, step):
        rows = np.arange(begin, min(begin + step, RESAMPLES))
        drawn = rng.integers(len(times), size=(len(rows), len(times)))
        for index, pair in enumerate(times):
            taken = np.repeat(rows, (drawn == index).sum(axis=1))
            jobs = rng.integers(len(pair), size=(len(taken), len(pair)))
            np.add.at(sums, taken, pair[jobs].sum(axis=1))
            np.add.at(counts, taken, len(pair))
    means = sums / counts[:, None]
    ratios = [_ratio(mine, other) for mine, other in means]
    return {
        "difference_ci_s": _interval(means[:, 0] - means[:, 1]),
        "ratio_ci": _interval(np.array(ratios)),
    }


def _interval(values: FloatArray) -> Interval:
    low, high = np.quantile(values, INTERVAL_QUANTILES)
    return Interval(float(low), float(high))


def _ratio(mine: float, other: float) -> float:
    """Return the ratio; 1 if both are 0, infinite if only `other` is."""
    if other == 0.0:
        return 1.0 if mine == 0.0 else float("inf")
    return float(mine / other)


def _wilcoxon(differences: FloatArray) -> dict[str, Any]:
    """Run signed-rank tests; pairs without a difference are left out (Wilcoxon 1945)."""
    from scipy import stats  # noqa: PLC0415 - the import takes a second

    changed = differences[differences != 0.0]
    sides = {"two_sided_p": "two-sided", "less_p": "less", "greater_p": "greater"}
    if not len(changed):
        return {"changed": 0, **dict.fromkeys(sides, 1.0)}
    return {
        "changed": len(changed),
        **{
            name: float(stats.wilcoxon(changed, alternative=side).pvalue)
            for name, side in sides.items()
        },
    }
