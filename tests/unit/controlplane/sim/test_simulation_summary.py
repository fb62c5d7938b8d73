"""Summaries of results, comparisons of policies, finish-time fairness."""

from __future__ import annotations

import json
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.sim.analysis.comparison import Interval, compare, mean_interval
from controlplane.sim.analysis.summary import (
    fairness_figures,
    finish_time_fairness,
    mean_contention,
    summary,
)
from controlplane.sim.cluster import NodeGroup, ResultsError
from controlplane.sim.results import SimulationResult, StartForecast
from controlplane.sim.run import simulate
from controlplane.sim.scenario import Scenario
from schemas.ids import Seconds
from tests.support.simulations import job_result, result, times

# --- summary


def test_a_summary_has_exactly_these_figures() -> None:
    found = summary(
        result(
            job_result("warm", 1000.0, at=10.0, counted=False),
            job_result("a", 40.0, at=20.0, alone_s=30.0),
            job_result(
                "b", 160.0, at=20.0, application="ncf", rescales=4, trained_s=100.0,
                extrapolated_s=25.0, alone_s=200.0, started_at=Seconds(60.0),
                forecast=StartForecast(Seconds(20.0), Seconds(40.0), Seconds(30.0), Seconds(90.0)),
            ),
            bound_s=50.0,
            busy_slot_s=1000.0,
        )
    )  # fmt: skip

    assert found == {
        "policy": "ones", "options": {}, "setting": {"physics": "table2"}, "seed": 5, "slots": 4,
        "jobs": 2, "avg_jct_s": 100.0, "geo_jct_s": pytest.approx(80.0), "avg_exec_s": 75.0,
        "avg_queue_s": 25.0, "rescales_per_job": 3.0, "extrapolated_share": 0.25,
        "p50_jct_s": 100.0, "p90_jct_s": pytest.approx(148.0), "p99_jct_s": pytest.approx(158.8),
        "makespan_s": 1000.0, "utilisation": 0.25, "decision_ms_mean": 2.0,
        "decision_ms_p99": pytest.approx(2.98), "bound_avg_jct_s": 50.0, "vs_bound": 2.0,
        "ftf_mean": pytest.approx((40.0 / 30.0 + 160.0 / 200.0) / 2),
        "ftf_worst": pytest.approx(40.0 / 30.0), "ftf_unfair_share": 0.5,
        "start_forecasts": 1, "start_error_median": 0.5, "start_coverage": 1.0,
        "unfinished": 0, "failed": 0, "cancelled": 0, "rejected": 0,
        "utility": None, "utility_share": None, "promised": 0, "promises_kept": 0,
        "promises_broken": 0, "lateness_s": None, "events": 70, "wall_s": 0.5,
        "jct_s": {"a": 40.0, "b": 160.0},
        "per_application": {
            "bert": {
                "jobs": 1, "unfinished": 0, "avg_jct_s": 40.0, "geo_jct_s": pytest.approx(40.0),
                "avg_exec_s": 30.0, "avg_queue_s": 10.0, "rescales_per_job": 2.0,
                "extrapolated_share": None,
            },
            "ncf": {
                "jobs": 1, "unfinished": 0, "avg_jct_s": 160.0, "geo_jct_s": pytest.approx(160.0),
                "avg_exec_s": 120.0, "avg_queue_s": 40.0, "rescales_per_job": 4.0,
                "extrapolated_share": 0.25,
            },
        },
    }  # fmt: skip


def test_jobs_that_did_not_end_were_cancelled_or_rejected_are_counted_but_not_averaged() -> None:
    found = summary(
        result(
            job_result("a", 40.0), job_result("b", None), job_result("c", 2.0, state="cancelled"),
            job_result("x", 2.0, state="rejected"), job_result("d", 60.0, state="failed"),
            job_result("e", 50.0, state="failed"),
        )
    )  # fmt: skip

    assert found["jct_s"] == {"a": 40.0, "b": None, "c": None, "x": None, "d": 60.0, "e": 50.0}
    assert (found["avg_jct_s"], found["jobs"], found["makespan_s"]) == (50.0, 6, None)
    assert (found["unfinished"], found["cancelled"], found["failed"]) == (1, 1, 2)
    assert found["rejected"] == 1


def test_figures_without_a_value_are_null() -> None:
    for empty in (result(decisions_ms=()), result(job_result("a", None), decisions_ms=())):
        found = json.loads(json.dumps(summary(empty), allow_nan=False))

        names = ("avg_jct_s", "geo_jct_s", "p99_jct_s", "makespan_s", "decision_ms_p99", "vs_bound")
        assert [found[name] for name in names] == [None] * len(names)
    assert summary(times("ones", 0.0, 4.0))["geo_jct_s"] is None


# --- comparison


def test_the_difference_is_of_pairs_of_jobs() -> None:
    found = compare([times("ones", 10.0, 30.0)], [times("fifo", 20.0, 60.0)])

    assert (found.first, found.second, found.jobs, found.simulations) == ("ones", "fifo", 2, 1)
    assert (found.first_mean_s, found.second_mean_s) == (20.0, 40.0)
    assert (found.difference_s, found.ratio) == (-20.0, 0.5)
    assert found.ratio_ci == Interval(0.5, 0.5)  # the same for every job
    assert found.difference_ci_s == Interval(-30.0, -10.0)


def test_seeds_are_paired_in_any_order() -> None:
    ours = [times("ones", 10.0, seed=1), times("ones", 100.0, seed=2)]
    theirs = [times("fifo", 300.0, seed=2), times("fifo", 30.0, seed=1), times("fifo", 9.0, seed=3)]

    found = compare(ours, theirs)

    assert (found.simulations, found.first_mean_s, found.second_mean_s) == (2, 55.0, 165.0)
    assert found.ratio_ci == Interval(1 / 3, 1 / 3)
    assert found.difference_ci_s == Interval(-200.0, -20.0)  # seeds are drawn, not only jobs


def test_jobs_that_did_not_finish_under_both_policies_are_left_out() -> None:
    ours = result(job_result("a", 10.0), job_result("b", None), job_result("c", 5.0, counted=False))
    theirs = result(
        job_result("a", 20.0), job_result("b", 7.0), job_result("c", 6.0, counted=False)
    )

    found = compare([ours], [theirs])

    assert (found.jobs, found.left_out, found.first_mean_s) == (1, 1, 10.0)


def test_the_interval_is_the_same_every_time_and_holds_the_truth() -> None:
    rng = np.random.default_rng(1)
    base = rng.exponential(100.0, (20, 50))
    ours = [times("ones", *row * rng.uniform(0.4, 0.6, 50), seed=i) for i, row in enumerate(base)]
    theirs = [times("fifo", *row, seed=i) for i, row in enumerate(base)]

    found = compare(ours, theirs)

    assert found == compare(ours, theirs)
    assert found.ratio_ci.low < 0.5 < found.ratio_ci.high
    assert found.ratio_ci.high - found.ratio_ci.low < 0.02
    assert found.two_sided_p < 1e-6
    assert found.less_p < 1e-6
    assert found.greater_p > 0.999


def test_the_tests_of_wilcoxon_are_exact_for_few_jobs() -> None:
    found = compare([times("ones", 1.0, 2.0, 3.0, 4.0)], [times("fifo", 2.0, 4.0, 6.0, 8.0)])

    assert (found.two_sided_p, found.less_p, found.greater_p) == (0.125, 0.0625, 1.0)


def test_equal_pairs_do_not_count_in_the_tests() -> None:
    equal = compare([times("ones", 5.0, 7.0)], [times("fifo", 5.0, 7.0)])
    found = compare([times("a", 1.0, 5.0, 5.0)], [times("b", 2.0, 5.0, 5.0)])

    assert (equal.changed, equal.difference_s, equal.ratio) == (0, 0.0, 1.0)
    assert (equal.two_sided_p, equal.less_p, equal.greater_p) == (1.0, 1.0, 1.0)
    assert equal.difference_ci_s == Interval(0.0, 0.0)
    assert (found.jobs, found.changed, found.less_p) == (3, 1, 0.5)


def test_results_without_common_jobs_are_refused() -> None:
    with pytest.raises(ResultsError, match="no finished job of the same setting and seed"):
        compare([times("ones", 1.0, seed=1)], [times("fifo", 1.0, seed=2)])
    with pytest.raises(ResultsError, match="no finished job"):
        compare([result(job_result("a", None))], [result(job_result("a", 1.0))])
    with pytest.raises(ResultsError, match="two results of seed 5"):
        compare([times("ones", 1.0)] * 2, [times("fifo", 1.0)])


@settings(deadline=None)
@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=20))
def test_the_mean_is_within_its_interval(values: list[float]) -> None:
    interval = mean_interval(values)

    slack = 1e-9 * max(values)
    assert min(values) - slack <= interval.low <= interval.high <= max(values) + slack
    assert math.isfinite(interval.low)


def test_utilities_are_summed_and_ends_compared_with_promises() -> None:
    worth = {"most_worth": 10.0, "promised_at": Seconds(50.0)}
    found = summary(
        result(
            job_result("a", 40.0, worth=9.0, **worth),
            job_result("b", 60.0, worth=5.0, **worth),
            job_result("c", 90.0, worth=0.0, most_worth=10.0, state="rejected"),
            job_result("d", 20.0, state="cancelled", worth=0.0, **worth),
        )
    )

    assert (found["utility"], found["utility_share"]) == (14.0, 0.35)
    assert (found["promised"], found["promises_kept"], found["promises_broken"]) == (3, 1, 1)
    assert (found["lateness_s"], found["rejected"], found["avg_jct_s"]) == (5.0, 1, 50.0)


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
