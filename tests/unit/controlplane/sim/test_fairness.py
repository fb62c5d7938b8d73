"""Finish-time fairness, on cases that can be worked out by hand."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.sim.analysis.summary import (
    fairness_figures,
    finish_time_fairness,
    mean_contention,
)
from controlplane.sim.cluster import NodeGroup
from controlplane.sim.results import SimulationResult
from controlplane.sim.run import simulate
from controlplane.sim.scenario import Scenario
from tests.support.sim_results import job_result, result

UNKNOWN = {"ftf_mean": None, "ftf_worst": None, "ftf_unfair_share": None}


@pytest.mark.parametrize(
    ("names", "jct", "wanted", "alone_s", "rho"),
    [
        ("a", 150.0, 2, 100.0, 1.5),  # alone in the cluster
        ("ab", 100.0, 4, 50.0, 1.0),  # half of the time each
        ("abcd", 100.0, 1, 80.0, 1.25),  # a larger share than wanted is no help
    ],
)
def test_fairness_compares_with_the_time_in_a_share_of_the_cluster(
    names: str, jct: float, wanted: int, alone_s: float, rho: float
) -> None:
    jobs = [job_result(name, jct, wanted=wanted, alone_s=alone_s) for name in names]

    assert finish_time_fairness(result(*jobs)) == dict.fromkeys(names, rho)


def test_contention_is_the_mean_over_the_life_of_a_job() -> None:
    found = result(
        job_result("a", 100.0, wanted=4, alone_s=50.0),  # beside b for half of its life
        job_result("b", 100.0, at=50.0, wanted=4, alone_s=100.0),
    )

    assert mean_contention(found).tolist() == [1.5, 1.5]
    assert finish_time_fairness(found) == {
        "a": pytest.approx(100.0 / 75.0),
        "b": pytest.approx(100.0 / 150.0),
    }


def test_jobs_that_are_not_counted_or_do_not_end_contend_and_have_no_fairness() -> None:
    found = result(
        job_result("warm", 100.0, wanted=4, alone_s=10.0, counted=False),
        job_result("open", None, wanted=4, alone_s=10.0),
        job_result("gone", 100.0, wanted=4, alone_s=10.0, state="cancelled"),
        job_result("bad", 100.0, wanted=4, alone_s=10.0, state="failed"),
        job_result("a", 100.0, wanted=4, alone_s=10.0),
    )

    assert finish_time_fairness(found) == {"a": 2.0}


def test_the_figures_are_mean_maximum_and_share_above_one() -> None:
    alone_s = {"a": 100.0, "b": 50.0, "c": 25.0, "d": 200.0}
    jobs = [job_result(name, 100.0, alone_s=each) for name, each in alone_s.items()]

    assert fairness_figures(result(*jobs)) == {
        "ftf_mean": (1.0 + 2.0 + 4.0 + 0.5) / 4, "ftf_worst": 4.0, "ftf_unfair_share": 0.5,
    }  # fmt: skip


def test_jobs_without_a_time_alone_have_no_figures() -> None:
    for empty in (result(), result(job_result("a", 100.0)), result(job_result("a", None))):
        assert fairness_figures(empty) == UNKNOWN


@given(
    st.lists(st.tuples(st.integers(0, 20), st.none() | st.integers(0, 20)), min_size=1, max_size=8)
)
def test_contention_equals_a_count_of_every_second(lives: list[tuple[int, int | None]]) -> None:
    jobs = [job_result(f"j{n}", jct, at=float(at)) for n, (at, jct) in enumerate(lives)]
    found = msgspec.structs.replace(result(*jobs), ended_at=60.0)
    spans = [(at, 60 if jct is None else at + jct) for at, jct in lives]

    counted = [
        np.mean([sum(a <= t < b for a, b in spans) for t in range(begin, end)])
        if end > begin
        else 1.0
        for begin, end in spans
    ]

    assert mean_contention(found).tolist() == pytest.approx(counted)


def simulated(policy: str, **changes: object) -> SimulationResult:
    scenario = msgspec.structs.replace(Scenario(jobs=1, warm_up=0.0, latency_s=0.0), **changes)
    return simulate(policy, scenario, 3)


@pytest.mark.parametrize("model", ["v100", "k80"])
def test_a_single_job_takes_its_time_alone(model: str) -> None:
    found = simulated("fifo", nodes=(NodeGroup(count=4, slots=4, model=model),))

    assert fairness_figures(found)["ftf_mean"] == pytest.approx(1.0, abs=0.01)
    assert found.jobs[0].alone_s == pytest.approx(found.jobs[0].jct_s, rel=0.01)
