"""When jobs come, and how large they are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from controlplane.sim.traces.generators import (
    GAP_S,
    GPU_TIME_S,
    GPUS,
    HOURLY_SHARES,
    SHARES,
    bursts,
    google,
    mean_gap_s,
    philly,
    poisson,
    sample,
    sample_gaps,
    sample_gpus,
    uniform,
)

FloatArray = NDArray[np.float64]
Process = Callable[[Generator, int, float], FloatArray]


def in_threes(rng: Generator, jobs: int, mean_s: float) -> FloatArray:
    return bursts(rng, jobs, mean_s, 3)


def by_day(rng: Generator, jobs: int, mean_s: float) -> FloatArray:
    return philly(rng, jobs, mean_s, begin_hour=9.5)


PROCESSES: list[Process] = [poisson, uniform, in_threes, philly, by_day, google]


@pytest.mark.parametrize("process", PROCESSES)
@settings(deadline=None)
@given(seed=st.integers(0, 2**32), jobs=st.integers(0, 50), mean_s=st.floats(1e-3, 1e6))
def test_moments_grow_from_zero_and_depend_on_the_seed_only(
    process: Process, seed: int, jobs: int, mean_s: float
) -> None:
    found = process(default_rng(seed), jobs, mean_s)

    assert found.shape == (jobs,)
    assert (np.diff(found, prepend=0.0) >= -1e-6 * mean_s).all()
    assert found.tolist() == process(default_rng(seed), jobs, mean_s).tolist()


def test_jobs_like_google_s_come_in_groups_of_three_on_average() -> None:
    found = google(default_rng(2), 30_000, 30.0)

    assert 30_000 / np.unique(found).size == pytest.approx(3.0, rel=0.03)


@pytest.mark.parametrize("process", PROCESSES)
def test_every_process_has_the_mean_that_was_asked_for(process: Process) -> None:
    found = process(default_rng(1), 100_000, 30.0)

    assert found[-1] / 100_000 == pytest.approx(30.0, rel=0.02)


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize(("jobs", "mean_s"), [(-1, 30.0), (3, 0.0), (3, np.nan), (3, np.inf)])
def test_numbers_out_of_range_are_refused(process: Process, jobs: int, mean_s: float) -> None:
    with pytest.raises(ValueError, match="cannot arrive"):
        process(default_rng(0), jobs, mean_s)


def test_gaps_of_a_poisson_process_vary_as_much_as_their_mean() -> None:
    gaps = np.diff(poisson(default_rng(1), 50_000, 30.0))

    assert gaps.std() == pytest.approx(30.0, rel=0.02)


def test_a_burst_comes_at_one_moment_and_the_last_may_be_smaller() -> None:
    found = bursts(default_rng(1), 7, 30.0, 3)

    assert [len(list(found[found == at])) for at in dict.fromkeys(found.tolist())] == [3, 3, 1]
    with pytest.raises(ValueError, match="at least 1 job"):
        bursts(default_rng(1), 7, 30.0, 0)


def test_gaps_of_philly_are_heavier_tailed_than_exponential_ones() -> None:
    gaps = np.diff(philly(default_rng(1), 50_000, 30.0))

    assert gaps.std() > 1.7 * 30.0
    assert np.median(gaps) < 0.15 * 30.0  # ln 2 for exponential ones


def test_hours_of_the_day_are_as_busy_as_in_the_trace() -> None:
    found = philly(default_rng(1), 400_000, 30.0, begin_hour=6.0)
    hour = ((found / 3600.0 + 6.0) % 24.0).astype(int)

    whole_days = found < found[-1] // 86_400.0 * 86_400.0
    share = np.bincount(hour[whole_days], minlength=24) / whole_days.sum()

    assert share == pytest.approx(np.array(HOURLY_SHARES) / sum(HOURLY_SHARES), abs=0.004)
    with pytest.raises(ValueError, match="begin_hour"):
        philly(default_rng(1), 3, 30.0, begin_hour=24.0)


# --- sizes


def test_the_tables_are_whole() -> None:
    assert len(SHARES) == len(GPU_TIME_S) == len(GAP_S)
    for table in (SHARES, GPU_TIME_S, GAP_S):
        assert list(table) == sorted(table)
    assert sum(GPUS.values()) == pytest.approx(1.0, abs=1e-4)
    assert sum(HOURLY_SHARES) == pytest.approx(1.0, abs=1e-3)


def test_gpu_times_have_the_quantiles_of_the_table() -> None:
    found = sample(default_rng(1), 200_000)

    for share in (0.1, 0.5, 0.9, 0.99):
        wanted = GPU_TIME_S[SHARES.index(share)]
        assert np.quantile(found, share) == pytest.approx(wanted, rel=0.06)
    assert found.min() >= 1.0
    assert found.max() <= GPU_TIME_S[-1]


def test_gpu_times_can_be_cut_off_without_a_heap_at_the_cut() -> None:
    found = sample(default_rng(1), 100_000, longest_s=7200.0)

    assert found.max() <= 7200.0 * (1 + 1e-9)
    assert (found > 7100.0).mean() < 0.01
    with pytest.raises(ValueError, match=r"as short as 0.5 s"):
        sample(default_rng(1), 1, longest_s=0.5)
    with pytest.raises(ValueError, match="as short as nan"):
        sample(default_rng(1), 1, longest_s=float("nan"))


def test_gaps_have_the_mean_that_is_told() -> None:
    assert sample_gaps(default_rng(1), 200_000).mean() == pytest.approx(mean_gap_s(), rel=0.01)


def test_sizes_come_as_often_as_in_the_trace_and_fit_the_cluster() -> None:
    found = sample_gpus(default_rng(1), 100_000, 8)

    assert sorted(set(found.tolist())) == [1, 2, 4, 8]
    assert (found == 1).mean() == pytest.approx(0.9317, abs=0.006)
    with pytest.raises(ValueError, match="at least one GPU"):
        sample_gpus(default_rng(1), 1, 0)
