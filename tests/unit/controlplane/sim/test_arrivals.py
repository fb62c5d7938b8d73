"""Arrival processes and distributions of generated traces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from controlplane.sim.cluster import TraceError
from controlplane.sim.traces.generators import (
    GAP_S,
    GPU_TIME_S,
    PROCESSES,
    SHARES,
    arrival_times,
    bursts,
    google,
    mean_gap_s,
    philly,
    poisson,
    sample,
    sample_gaps,
)


@pytest.mark.parametrize("process", PROCESSES)
@settings(deadline=None)
@given(seed=st.integers(0, 2**32), jobs=st.integers(1, 50), mean_s=st.floats(1e-3, 1e6))
def test_times_grow_and_depend_on_the_seed(
    process: str, seed: int, jobs: int, mean_s: float
) -> None:
    found = arrival_times(default_rng(seed), jobs, process, mean_s)

    assert len(found) == jobs
    assert (np.diff(found, prepend=0.0) >= -1e-6 * mean_s).all()
    assert found == arrival_times(default_rng(seed), jobs, process, mean_s)


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_has_the_given_mean_interval(process: str) -> None:
    found = arrival_times(default_rng(1), 100_000, process, 30.0)

    assert found[-1] / 100_000 == pytest.approx(30.0, rel=0.02)


@pytest.mark.parametrize(
    ("jobs", "process", "mean_s", "field"),
    [
        (0, "poisson", 30.0, "jobs"), (3, "poisson", 0.0, "mean_interval_s"),
        (3, "philly", np.nan, "mean_interval_s"), (3, "google", np.inf, "mean_interval_s"),
        (3, "never", 30.0, "arrivals"),
    ],
)  # fmt: skip
def test_impossible_numbers_are_refused(jobs: int, process: str, mean_s: float, field: str) -> None:
    with pytest.raises(TraceError) as refused:
        arrival_times(default_rng(0), jobs, process, mean_s)

    assert (refused.value.field, bool(refused.value.hint)) == (field, True)


def test_jobs_of_google_arrive_in_groups_of_three_on_average() -> None:
    found = google(default_rng(2), 30_000, 30.0)

    assert 30_000 / np.unique(found).size == pytest.approx(3.0, rel=0.03)


def test_gaps_of_a_poisson_process_vary_as_much_as_their_mean() -> None:
    gaps = np.diff(poisson(default_rng(1), 50_000, 30.0))

    assert gaps.std() == pytest.approx(30.0, rel=0.02)


def test_a_burst_arrives_at_once_and_the_last_may_be_smaller() -> None:
    _, sizes = np.unique(bursts(default_rng(1), 9, 30.0), return_counts=True)

    assert sizes.tolist() == [4, 4, 1]


def test_gaps_of_philly_have_a_heavier_tail_than_exponential_gaps() -> None:
    gaps = np.diff(philly(default_rng(1), 50_000, 30.0))

    assert gaps.std() > 1.7 * 30.0
    assert np.median(gaps) < 0.15 * 30.0  # ln 2 for exponential ones
    assert sample_gaps(default_rng(1), 200_000).mean() == pytest.approx(mean_gap_s(), rel=0.01)


def test_gpu_times_have_the_quantiles_of_the_table() -> None:
    found = sample(default_rng(1), 200_000)

    assert len(SHARES) == len(GPU_TIME_S) == len(GAP_S)
    for table in (SHARES, GPU_TIME_S, GAP_S):
        assert list(table) == sorted(table)
    for share in (0.1, 0.5, 0.9, 0.99):
        wanted = GPU_TIME_S[SHARES.index(share)]
        assert np.quantile(found, share) == pytest.approx(wanted, rel=0.06)
    assert 1.0 <= found.min() <= found.max() <= GPU_TIME_S[-1]
