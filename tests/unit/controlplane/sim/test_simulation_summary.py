"""Summaries of results, comparisons of policies, finish-time fairness, forecasts of starts."""

from __future__ import annotations

import json
import math
from functools import partial

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.sim.analysis.comparison import Interval, compare, mean_interval
from controlplane.sim.analysis.summary import (
    fairness_figures,
    finish_time_fairness,
    forecast_figures,
    mean_contention,
    summary,
)
from controlplane.sim.cluster import NodeGroup, ResultsError
from controlplane.sim.results import JobResult, SimulationResult, StartForecast
from controlplane.sim.run import simulate
from controlplane.sim.scenario import Scenario
from schemas.ids import Seconds
from tests.support.simulations import job_result, result, times


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


def uncounted(a: float, b: float | None, c: float) -> SimulationResult:
    return result(job_result("a", a), job_result("b", b), job_result("c", c, counted=False))


ONES, FIFO = partial(times, "ones"), partial(times, "fifo")


@pytest.mark.parametrize(
    ("ours", "theirs", "figures"),
    [
        ([ONES(10.0, 30.0)], [FIFO(20.0, 60.0)], {
            "first": "ones", "second": "fifo", "jobs": 2, "simulations": 1, "first_mean_s": 20.0,
            "second_mean_s": 40.0, "difference_s": -20.0, "ratio": 0.5,
            "ratio_ci": Interval(0.5, 0.5),  # the same for every job
            "difference_ci_s": Interval(-30.0, -10.0)}),
        ([ONES(10.0, seed=1), ONES(100.0, seed=2)],
         [FIFO(300.0, seed=2), FIFO(30.0, seed=1), FIFO(9.0, seed=3)],
         {"simulations": 2, "first_mean_s": 55.0, "second_mean_s": 165.0, "ratio_ci": Interval(1 / 3, 1 / 3),
          "difference_ci_s": Interval(-200.0, -20.0)}),  # seeds are drawn, not only jobs
        ([uncounted(10.0, None, 5.0)], [uncounted(20.0, 7.0, 6.0)], {"jobs": 1, "left_out": 1, "first_mean_s": 10.0}),
        ([ONES(1.0, 2.0, 3.0, 4.0)], [FIFO(2.0, 4.0, 6.0, 8.0)],
         {"two_sided_p": 0.125, "less_p": 0.0625, "greater_p": 1.0}),
        ([ONES(5.0, 7.0)], [FIFO(5.0, 7.0)], {
            "changed": 0, "difference_s": 0.0, "ratio": 1.0, "two_sided_p": 1.0, "less_p": 1.0, "greater_p": 1.0,
            "difference_ci_s": Interval(0.0, 0.0)}),
        ([ONES(1.0, 5.0, 5.0)], [FIFO(2.0, 5.0, 5.0)], {"jobs": 3, "changed": 1, "less_p": 0.5}),
    ],
    ids=[
        "the difference is of pairs of jobs", "seeds are paired in any order",
        "jobs that did not finish under both policies are left out",
        "the tests of Wilcoxon are exact for few jobs", "equal results do not differ",
        "equal pairs do not count in the tests",
    ],
)  # fmt: skip
def test_policies_are_compared_by_pairs_of_jobs(
    ours: list[SimulationResult], theirs: list[SimulationResult], figures: dict[str, object]
) -> None:
    found = compare(ours, theirs)

    assert {name: getattr(found, name) for name in figures} == figures


# --- comparison


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


def rival(name: str, jct: float | None = 100.0, alone_s: float = 10.0, wanted: int = 4, **changes: object) -> JobResult:  # fmt: skip
    return job_result(name, jct, alone_s=alone_s, wanted=wanted, **changes)


@pytest.mark.parametrize(
    ("jobs", "rho"),
    [
        ([rival("a", 150.0, 100.0, 2)], {"a": 1.5}),
        ([rival(name, 100.0, 50.0, 4) for name in "ab"], {"a": 1.0, "b": 1.0}),
        ([rival(name, 100.0, 80.0, 1) for name in "abcd"], dict.fromkeys("abcd", 1.25)),
        # beside each other for half of their lives: 1.5 jobs on average
        ([rival("a", 100.0, 50.0), rival("b", 100.0, 100.0, at=50.0)], {"a": 100 / 75, "b": 100 / 150}),
        ([rival("warm", counted=False), rival("open", None), rival("gone", state="cancelled"),
          rival("bad", state="failed"), rival("a")], {"a": 2.0}),
    ],
    ids=[
        "alone in the cluster", "half of the time each", "a larger share than wanted is no help",
        "contention is the mean over the life of a job",
        "jobs that are not counted or do not end contend and have no fairness",
    ],
)  # fmt: skip
def test_fairness_compares_with_the_time_in_a_share_of_the_cluster(
    jobs: list[JobResult], rho: dict[str, float]
) -> None:
    assert finish_time_fairness(result(*jobs)) == pytest.approx(rho)


def test_jobs_without_a_time_alone_have_no_figures() -> None:
    for empty in (result(), result(job_result("a", 100.0)), result(job_result("a", None))):
        assert set(fairness_figures(empty).values()) == {None}


def test_the_figures_are_mean_maximum_and_share_above_one() -> None:
    alone_s = {"a": 100.0, "b": 50.0, "c": 25.0, "d": 200.0}
    jobs = [job_result(name, 100.0, alone_s=each) for name, each in alone_s.items()]

    assert fairness_figures(result(*jobs)) == {
        "ftf_mean": (1.0 + 2.0 + 4.0 + 0.5) / 4, "ftf_worst": 4.0, "ftf_unfair_share": 0.5,
    }  # fmt: skip


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


NOTHING = {"start_forecasts": 0, "start_error_median": None, "start_coverage": None}


def told(name: str, at: float, interval: tuple[float, float], started: float | None) -> JobResult:
    """A job that was told at second 100 when it would start."""
    said = StartForecast(Seconds(100.0), Seconds(at), *map(Seconds, interval))
    return job_result(
        name, 500.0, forecast=said, started_at=None if started is None else Seconds(started)
    )


def test_errors_are_shares_of_the_real_wait_and_intervals_are_counted() -> None:
    found = result(
        told("a", 150.0, (120.0, 200.0), started=200.0),  # 50 of 100 s, just within
        told("b", 140.0, (110.0, 150.0), started=120.0),  # 40 of 20 s, within
        told("c", 110.0, (105.0, 120.0), started=140.0),  # 10 of 40 s, not within
        told("d", 170.0, (165.0, 180.0), started=160.0),  # 70 of 60 s, not within
    )

    assert forecast_figures(found) == {
        "start_forecasts": 4, "start_error_median": (0.5 + 0.75) / 2, "start_coverage": 0.5,
    }  # fmt: skip


def test_jobs_that_started_as_they_were_told_or_never_say_nothing() -> None:
    uncounted = told("d", 150.0, (120.0, 200.0), started=200.0)
    assert forecast_figures(result()) == NOTHING
    assert (
        forecast_figures(
            result(
                told("a", 150.0, (120.0, 200.0), started=100.0),
                told("b", 150.0, (120.0, 200.0), started=None), job_result("c", 50.0),
                job_result("w", 50.0, forecast=uncounted.forecast, counted=False),
            )
        ) == NOTHING
    )  # fmt: skip
