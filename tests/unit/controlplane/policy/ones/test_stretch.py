"""Option `max_stretch`: dues of jobs, plans with them, and the load average."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policy.api import ClusterView, JobView, Plan, PolicyEvent
from controlplane.policy.ones.evolution import score
from controlplane.policy.ones.greedy import filled, used
from controlplane.policy.ones.policy import Ones
from controlplane.policy.ones.problem import FREE, FairnessFloors, Problem
from controlplane.policy.ones.problem_builder import LoadAverage
from controlplane.policy.options import OnesOptions
from controlplane.policy.registry import make
from controlplane.sim.cluster import NodeGroup
from controlplane.sim.results import JobResult
from schemas.errors import SettingsError
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import S0, A, B, C, job_view
from tests.support.simulations import FREE as NO_COSTS
from tests.support.simulations import ToyModel, job, simulated_run
from tests.support.sizes import examples
from tests.support.views import LINEAR, planned, problem_of, row_of, view_of, views_and_events
from tests.unit.controlplane.policy.tables import cases

NOW = Seconds(1000.0)


def a_job(name: JobId, since: float, samples: int, *on: SlotId, **changes: Any) -> JobView:
    """Warm, submitted so many seconds ago, with so many samples to go at 100/s for each slot."""
    held = dict.fromkeys(on, 64 // len(on)) if on else {}
    view = job_view(
        name, at=NOW - since, slots=(1, 4), family="f", epoch=1, start_s=0.0, running_on=held,
        stop_samples=samples,
    )  # fmt: skip
    return msgspec.structs.replace(view, **changes)


def posed(*jobs: JobView, slots: int = 1, limit: float = 2.0) -> Problem:
    options = OnesOptions(max_stretch=limit)
    return problem_of(view_of(row_of(slots), *jobs), events=LINEAR, options=options, now=NOW)


def dues_of(*jobs: JobView, slots: int = 1, limit: float = 2.0) -> FairnessFloors:
    found = posed(*jobs, slots=slots, limit=limit).floors
    assert found is not None
    return found


# --- who is due what


@cases(
    "jobs, slots, expected, at_best",
    # of one slot and two jobs each has half: 100 s of work take 200 s
    two_jobs=([a_job(A, 0, 10_000), a_job(B, 100, 10_000)], 1, [1.0, 1.5], [100 / 200, 200 / 200]),
    # 100 s alone on the slot it wants
    a_share_is_at_most_the_wanted_size=([a_job(A, 300, 10_000)], 4, [4.0], None),
    finished_work=([a_job(A, 200, 20_000, samples_done=10_000)], 1, [(200 + 100) / 200], None),
)
def test_the_stretch_is_the_total_time_over_that_with_a_share(
    jobs: list[JobView], slots: int, expected: list[float], at_best: list[float] | None
) -> None:
    found = dues_of(*jobs, slots=slots)

    assert found.expected.tolist() == pytest.approx(expected)
    if at_best is not None:
        assert found.at_best.tolist() == pytest.approx(at_best)
        assert found.level.tolist() == [0, 0]


def test_a_job_near_the_limit_is_due_its_share() -> None:
    late = [a_job(name, 700, 40_000, wanted=4) for name in (A, B)]  # two slots of four each

    found = dues_of(*late, slots=4, limit=4.0)

    assert found.expected.tolist() == pytest.approx([(700 + 200) / 200] * 2)
    assert found.level.tolist() == [2, 2]
    assert (found.penalty > 0).tolist() == [[True, True, False, False, False]] * 2


def test_no_job_is_due_slots_without_a_limit() -> None:
    problem = posed(a_job(A, 9000, 100), limit=0.0)

    assert problem.floors is None
    assert problem.worth is problem.value


# --- that they get it


@cases(
    "jobs, limit, levels",
    without_a_limit_the_more_valuable_job=([a_job(A, 800, 40_000), a_job(B, 0, 1000)], 0.0, [0, 1]),
    a_due_job=([a_job(A, 800, 40_000), a_job(B, 0, 1000)], 2.0, [1, 0]),
    the_job_furthest_behind=([a_job(A, 500, 10_000), a_job(B, 900, 10_000)], 2.0, [0, 1]),
)
def test_the_only_slot_goes_to_the_due_job_that_is_furthest_behind(
    jobs: list[JobView], limit: float, levels: list[int]
) -> None:
    assert filled(posed(*jobs, limit=limit), np.array([0, 0])).tolist() == levels


def test_a_candidate_that_misses_dues_is_less_fit() -> None:
    problem = posed(a_job(A, 800, 40_000), a_job(B, 0, 1000))

    due, other = (
        score(problem, np.array(levels), np.array([row]))
        for levels, row in (([1, 0], 0), ([0, 1], 1))
    )

    assert due.fitness > other.fitness
    nobody = score(problem, np.array([0, 0]), np.array([FREE]))
    assert other.fitness > nobody.fitness


def answered(view: ClusterView, **options: Any) -> Plan:
    policy = Ones(OnesOptions(**options))
    for at, event in LINEAR:
        policy.observe(event, Seconds(at))
    return policy.plan(view, NOW)


def test_a_due_job_takes_the_slot_of_another_job() -> None:
    view = view_of(row_of(1), a_job(A, 10, 2000, S0), a_job(B, 900, 40_000))

    plan = answered(view, max_stretch=2.0)

    assert set(answered(view).local_batch) == {A}
    assert set(plan.local_batch) == {B}
    text = "required by max_stretch 2 (expected: 2.1 x the time of its fair share)"
    assert plan.reasons[B].text.endswith(text)
    assert plan.reasons[B].numbers["max_stretch"] == 2.0
    assert plan.reasons[B].numbers["stretch"] == pytest.approx(2.125)


def test_a_reason_states_a_limit_that_cannot_be_kept() -> None:
    view = view_of(row_of(1), a_job(A, 5000, 10_000), a_job(B, 9000, 10_000))

    plan = answered(view, max_stretch=2.0)

    said = "; max_stretch 2 cannot be kept, it takes {} x the time of its fair share or more"
    assert plan.reasons[B].text.endswith(said.format("45.5"))
    assert plan.reasons[A].text.endswith(said.format("25.5"))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.5, "0.5 is below 1: not all can be faster than their share; give 1 or more"),
        (-1.0, "-1.0 is below 0.0; raise it"),
        (float("nan"), "nan is not finite; give a number"),
    ],
)
def test_an_invalid_limit_is_refused(value: float, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        OnesOptions(max_stretch=value)

    assert f"{caught.value}; {caught.value.hint}".startswith(f"policy.options.max_stretch: {said}")


# --- whatever comes


@settings(max_examples=examples(60), deadline=None)
@given(case=views_and_events, limit=st.sampled_from([1.0, 2.0, 8.0]))
def test_schedules_with_dues_fit(
    case: tuple[ClusterView, Sequence[PolicyEvent]], limit: float
) -> None:
    view, events = case
    options = OnesOptions(max_stretch=limit)
    problem = problem_of(view, events=[(1.0, event) for event in events], options=options)

    levels = filled(problem, problem.lowest)

    assert used(problem, levels) <= problem.capacity
    assert problem.allowed[problem.rows, levels].all()
    if problem.floors is not None:
        assert np.isfinite(problem.floors.penalty).all()
        assert (problem.floors.penalty >= 0.0).all()


@settings(max_examples=examples(40), deadline=None)
@given(case=views_and_events)
def test_a_limit_far_away_changes_no_plan(case: tuple[ClusterView, Sequence[PolicyEvent]]) -> None:
    view, events = case

    off = planned("ones", view, events)
    far = planned("ones", view, events, options={"max_stretch": 1e9})

    assert far.local_batch == off.local_batch


def lived_through(gap_s: float, short: int, limit: float) -> dict[str, JobResult]:
    """A long job on one slot, and a stream of short ones that would keep it busy for ever."""
    stream = [
        job(f"short-{n}", at=1.0 + n * gap_s, workload="short", samples=short) for n in range(40)
    ]
    run = simulated_run(
        make("ones", {"max_stretch": limit}), job("long-0", workload="long", samples=4000),
        *stream, nodes=(NodeGroup(count=1, slots=1),),
        model=ToyModel(costs=NO_COSTS, epochs=1, most=1), telemetry_s=5.0,
    )  # fmt: skip
    return run.run(20_000.0).jobs


@settings(max_examples=examples(6), deadline=None)
@given(gap_s=st.floats(10.0, 60.0), short=st.integers(100, 600), limit=st.sampled_from([1.5, 3.0]))
def test_no_job_starves_under_a_limit(gap_s: float, short: int, limit: float) -> None:
    jobs = lived_through(gap_s, short, limit)

    assert {each.state for each in jobs.values()} == {"succeeded"}


# --- contention


ARRIVALS = [(0.0, (A,)), (10.0, (A, B)), (20.0, (A, B, C)), (40.0, (A, C))]
ENDS = [(100.0, (A, B)), (200.0, (A,)), (300.0, (A,))]


@cases(
    "seen, job, mean",
    since_the_submission=(ARRIVALS, job_view(A), (10 + 20 + 60) / 40),
    since_a_later_submission=(ARRIVALS, job_view(C, at=20.0), 3.0),
    before_the_first_view_as_in_it=(ENDS, job_view(A), (200 + 200 + 100) / 300),
    a_repeated_update_changes_nothing=([(0.0, (A, B)), *[(10.0, (A, B))] * 2], job_view(A), 2.0),
)
def test_the_load_is_the_mean_number_of_jobs_since_the_submission(
    seen: list[tuple[float, tuple[JobId, ...]]], job: JobView, mean: float
) -> None:
    contention = LoadAverage()
    for at, names in seen:
        contention.update({name: job_view(name) for name in names}, Seconds(at))

    assert contention.mean(job) == pytest.approx(mean)
