"""Plans of baselines over time: who runs when, on how many slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policy.api import JobEnded, JobView
from controlplane.policy.baselines.gittins import ServiceHistory
from controlplane.policy.baselines.optimus import LengthEstimates
from controlplane.policy.registry import make
from schemas.errors import SettingsError
from schemas.ids import JobId, Seconds
from tests.support.builders import S0, S1, A, B, C, job_view
from tests.support.sizes import examples
from tests.support.views import InstantCluster, ToldOracle, epoch_seen, row_of, view_of
from tests.unit.controlplane.policy.tables import Step, cases, follow, then

D = JobId("d-4")
LIMITS = {"limits": [100.0, 300.0]}
IN_ROUNDS = "waits: sizes are chosen again in the next round"


def gang(job: JobId, at: float, size: int = 1, **changes: Any) -> JobView:
    return job_view(job, at, slots=(size, size), **changes)


def elastic(job: JobId, at: float = 0.0, most: int = 8, **changes: Any) -> JobView:
    return job_view(job, at, slots=(1, most), **changes)


@cases(
    "nodes, options, trace",
    a_surplus_slot_stays_with_its_job=((3,), {}, [  # A is older, but returns from a failure
        then(1.0, elastic(B, 1.0)),
        *(then(now, *news, slots={A: ["n1/2"], B: ["n1/0", "n1/1"]})
          for now, news in ((2.0, [elastic(A)]), (3.0, []))),
    ]),
    slots_of_an_ended_job_are_added_to_those_of_the_others=((2, 2), {}, [
        then(1.0, elastic(A), elastic(B, 1.0), slots={A: ["n1/0", "n1/1"], B: ["n2/0", "n2/1"]}),
        then(2.0, A, slots={B: ["n2/0", "n2/1", "n1/0", "n1/1"]}),
    ]),
    without_turns_a_job_waits_for_older_ones_to_end=((2,), {}, [
        then(2.0, gang(A, 0.0), gang(B, 1.0), gang(C, 2.0), sizes={A: 1, B: 1}),
        then(9000.0, sizes={A: 1, B: 1}, wakes=None),
    ]),
    # |  t  | run | queue of waiting jobs           | next turn ends |
    # |-----|-----|---------------------------------|----------------|
    # |   0 | A B | C (since 0), D (since 0)        | 100            |
    # | 100 | C D | A (since 100), B (since 100)    | 200            |
    # | 150 | C   | D ended; A starts               | 200            |
    # | 200 | A B | C (since 200)                   | 250            |
    # | 250 | B C | A (since 250)                   | 300            |
    turns_agree_with_a_trace_by_hand=((2,), {"quantum_s": 100.0}, [
        then(0.0, *(gang(job, at) for at, job in enumerate((A, B, C, D))), sizes={A: 1, B: 1}, wakes=100.0),
        then(100.0, sizes={C: 1, D: 1}, wakes=200.0),
        then(150.0, D, sizes={C: 1, A: 1}, wakes=200.0),
        then(200.0, sizes={A: 1, B: 1}, wakes=250.0),
        then(250.0, sizes={C: 1, B: 1}, wakes=300.0),
    ]),
)  # fmt: skip
def test_fair(nodes: tuple[int, ...], options: dict[str, Any], trace: list[Step]) -> None:
    it = InstantCluster(make("fair", options), row_of(*nodes))

    follow(it, *trace)

    assert not any(plan.restart for plan in it.plans)


@cases(
    "slots, options, trace",
    # |  t | event                 | served then   | queues (1 / 2 / 3) | run     | next limit     |
    # |----|-----------------------|---------------|--------------------|---------|----------------|
    # |  0 | A wants 4             | A 0           | A / - / -          | A       | 0 + 100/4 = 25 |
    # | 10 | B wants 2             | A 40          | A B / - / -        | A       | 10 + 60/4 = 25 |
    # | 25 | A reaches 100         | A 100, B 0    | B / A / -          | B       | 25 + 100/2 = 75|
    # | 30 | C wants 2             | B 10          | B C / A / -        | B C     | 30 + 90/2 = 75 |
    # | 75 | B reaches 100         | B 100, C 90   | C / A B / -        | C B     | 75 + 10/2 = 80 |
    # | 80 | C reaches 100         | B 110, C 100  | - / A B C / -      | A       | 80 + 200/4=130 |
    # |130 | A reaches 300         | A 300         | - / B C / A        | B C     | 130 + 190/2    |
    trace_by_hand=(4, {}, [
        then(0.0, gang(A, 0.0, 4), sizes={A: 4}, wakes=25.0),
        then(10.0, gang(B, 10.0, 2), sizes={A: 4}, wakes=25.0),
        then(25.0, sizes={B: 2}, wakes=75.0),
        then(30.0, gang(C, 30.0, 2), sizes={B: 2, C: 2}, wakes=75.0),
        then(75.0, sizes={B: 2, C: 2}, wakes=80.0),
        then(80.0, sizes={A: 4}, wakes=130.0),
        then(130.0, sizes={B: 2, C: 2}, wakes=225.0),
    ]),
    smaller_jobs_overtake_a_job_that_does_not_fit=(4, {}, [
        then(2.0, gang(A, 0.0, 3), gang(B, 1.0, 2), gang(C, 2.0), sizes={A: 3, C: 1}),
    ]),
    # B reached its limit before A did, between two plans.
    jobs_that_fall_in_the_same_plan_keep_their_order=(3, {}, [
        then(0.0, gang(A, 0.0), gang(B, 0.0, 2)), then(200.0),
        then(200.0, gang(C, 200.0), sizes={C: 1, A: 1}),
    ]),
    jobs_of_the_second_queue_are_served_in_the_order_of_falling=(3, {}, [  # B at 50, A at 100
        then(0.0, gang(A, 0.0), gang(B, 0.0, 2)), then(50.0), then(100.0),
        then(100.0, gang(C, 100.0), sizes={C: 1, B: 2}),
    ]),
    # A ran 25 s until it fell, and is promoted when it has waited for 2 x 25 s.
    a_job_that_waited_too_long_returns_to_the_first_queue=(4, {"promote_after": 2.0}, [
        then(0.0, gang(A, 0.0, 4)), then(25.0, gang(B, 20.0), sizes={B: 1}, wakes=75.0),
        then(75.0, sizes={A: 4}, wakes=100.0),  # A has another 100 slot seconds until it falls
    ]),
)  # fmt: skip
def test_tiresias(slots: int, options: dict[str, Any], trace: list[Step]) -> None:
    follow(InstantCluster(make("tiresias", LIMITS | options), row_of(slots)), *trace)


def test_tiresias_counts_service_before_a_restart_of_the_controller() -> None:
    view = view_of(
        row_of(2), gang(A, 0.0, 2, slot_s=250.0), gang(B, 1.0, slot_s=120.0), gang(C, 2.0)
    )

    plan = make("tiresias", LIMITS).plan(view, Seconds(5.0))

    assert plan.local_batch == {C: {S0: 64}, B: {S1: 64}}
    assert plan.reasons[A].text == (
        "waits: in queue 2 after 250 slot seconds; needs 2 slots, those before it leave 0 of 2"
    )
    assert plan.reasons[A].numbers == {
        "slots_now": 0.0, "slots_then": 0.0, "queue": 2.0, "served": 250.0, "needs": 2.0, "left": 0.0,
    }  # fmt: skip


def test_under_tiresias_a_job_on_a_node_that_is_not_up_keeps_its_slots() -> None:
    slots = row_of(2, 2)
    first = slots[0]
    slots[0] = type(first)(slot=first.slot, node=first.node, kind="cpu", usable=False, up=False)
    view = view_of(slots, gang(A, 1.0, running_on={S0: 64}, slot_s=250.0), gang(B, 0.0, 4))

    plan = make("tiresias", LIMITS).plan(view, Seconds(5.0))

    assert plan.local_batch == {A: {S0: 64}}
    assert plan.reasons[B].numbers["left"] == 3.0


@cases(
    "past, slots, trace",
    without_a_history_the_least_attained_service_goes_first=([50.0, 50.0], 2, [
        then(2.0, gang(A, 0.0, 2, slot_s=150.0), gang(B, 1.0, slot_s=90.0), gang(C, 2.0), sizes={B: 1, C: 1}),
    ]),
    # Past jobs took 250 or 950 slot seconds: at 200 an end is near or far.
    a_job_that_probably_ends_soon_goes_before_a_new_one=([250.0, 250.0, 950.0], 1, [
        then(2.0, gang(A, 1.0, slot_s=200.0), gang(B, 0.0), sizes={A: 1}),
    ]),
    # Jobs end before 100 or at 1000: A has two slots and ends its quantum at 50.
    ranks_change_at_the_end_of_a_quantum=([80.0, 80.0, 1000.0], 2, [
        then(0.0, gang(A, 0.0, 2), wakes=50.0), then(49.0, gang(B, 10.0, 2), sizes={A: 2}),
        then(50.0, sizes={B: 2}, wakes=100.0),
    ]),
)  # fmt: skip
def test_gittins(past: list[float], slots: int, trace: list[Step]) -> None:
    policy = make("gittins", {"quantum": 100.0, "least_history": 3})
    for number, service in enumerate(past):
        name = JobId(f"x-{number}")
        ended = JobEnded(job=name, family="", samples_done=1, succeeded=True, slot_s=service)
        policy.observe(ended, Seconds(0.0))

    follow(InstantCluster(policy, row_of(slots)), *trace)


def test_srtf_agrees_with_a_trace_by_hand() -> None:
    """Four slots; n slots are n times as fast.

    |  t | event           | left (s)        | run |
    |----|-----------------|-----------------|-----|
    |  0 | A: 400 on 4     | A 100           | A   |
    | 10 | B: 100 on 2     | A 90, B 50      | B   |
    | 20 | C: 120 on 2     | A 90, B 40, C 60| B C |
    | 60 | B ends          | A 90, C 20      | C   |
    | 80 | C ends          | A 90            | A   |
    """
    oracle = ToldOracle({A: 400.0, B: 100.0, C: 120.0})
    it = InstantCluster(make("srtf", {}, oracle), row_of(4))
    for left, step in (
        ({}, then(0.0, gang(A, 0.0, 4), sizes={A: 4})),
        ({A: 360.0}, then(10.0, gang(B, 10.0, 2), sizes={B: 2})),
        ({B: 80.0}, then(20.0, gang(C, 20.0, 2), sizes={B: 2, C: 2})),
        ({C: 40.0}, then(60.0, B, sizes={C: 2})),
        ({}, then(80.0, C, sizes={A: 4})),
    ):
        oracle.steps |= left
        follow(it, step)


def test_under_srtf_smaller_jobs_fill_the_remaining_slots() -> None:
    it = InstantCluster(make("srtf", {}, ToldOracle({A: 30.0, B: 40.0, C: 90.0})), row_of(4))
    why = "waits: 20 s left; needs 2 slots, those before it leave 0 of 4"
    jobs = (gang(A, 0.0, 3), gang(B, 1.0, 2), gang(C, 2.0, 1))

    follow(it, then(2.0, *jobs, sizes={A: 3, C: 1}, why={B: why}))


def test_a_cluster_without_an_oracle_refuses_srtf() -> None:
    with pytest.raises(SettingsError, match="needs to know how long jobs will last"):
        make("srtf")


STEPS_LEFT = {A: 80.0, B: 80.0, C: 80.0}
PAPER = {"starts": "rounds", "age_share": 0.0}
AT_ONCE = {"interval_s": 0.0}


@cases(
    "steps_left, nodes, options, trace",
    # Six slots; a step takes 1/n s; A has 120 steps left, B 60, C 12.
    # | slot | A saves      | B saves     | C saves    | goes to |
    # |------|--------------|-------------|------------|---------|
    # | 1-3  |              |             |            | A, B, C |
    # | 4    | 120/2 = 60   | 60/2 = 30   | 12/2 = 6   | A       |
    # | 5    | 120/6 = 20   | 30          | 6          | B       |
    # | 6    | 20           | 60/6 = 10   | 6          | A       |
    # Placed in ascending order of size, each on the emptiest node: C, B, A.
    a_round_by_hand=({A: 120.0, B: 60.0, C: 12.0}, (4, 2), {}, [
        then(0.0, elastic(A), elastic(B), elastic(C),
             slots={C: ["n1/0"], B: ["n1/1", "n1/2"], A: ["n2/0", "n2/1", "n1/3"]}),
    ]),
    the_first_of_equal_gains=({A: 50.0, B: 50.0}, (3,), {}, [
        then(0.0, elastic(A), elastic(B), sizes={A: 2, B: 1}),
    ]),
    no_steps_left=({A: 0.0, B: 0.0}, (4,), {}, [
        then(0.0, elastic(A), elastic(B), sizes={A: 1, B: 1}),
    ]),
    no_more_than_its_most=({A: 50.0}, (8,), {}, [then(0.0, elastic(A, most=3), sizes={A: 3})]),
    no_more_than_its_batch=({A: 50.0}, (8,), {}, [then(0.0, elastic(A, batch_size=3), sizes={A: 3})]),
    no_more_than_the_option=({A: 50.0}, (8,), {"most": 3}, [then(0.0, elastic(A), sizes={A: 3})]),
    as_in_the_paper_a_new_job_waits_for_the_next_round=(STEPS_LEFT, (4,), PAPER, [
        then(0.0, elastic(A), elastic(C), sizes={A: 2, C: 2}),
        then(50.0, elastic(B, 50.0), sizes={A: 2, C: 2}, wakes=600.0, why={B: IN_ROUNDS}),
        then(100.0, A, sizes={C: 2}),
        then(600.0, sizes={C: 2, B: 2}),
    ]),
    # A has what it may have. B comes at 50, when A is 50 s old: 25 s on average.
    a_new_job_starts_on_idle_slots_and_grows_in_the_next_round=(STEPS_LEFT, (4,), {"moves": "elastic"}, [
        then(0.0, elastic(A, most=1)), then(50.0),
        then(51.0, elastic(B, 50.0), sizes={A: 1, B: 1}, wakes=75.0), then(75.0, sizes={A: 1, B: 3}),
    ]),
    an_empty_cluster_does_not_wait_for_the_next_round=(STEPS_LEFT, (4,), {}, [
        then(0.0, elastic(A)), then(50.0, A, elastic(B, 50.0), sizes={B: 4}),
    ]),
    elastic_moves_restart_no_job=(STEPS_LEFT, (4,), {**AT_ONCE, "moves": "elastic"}, [
        then(0.0, elastic(A)), then(50.0, elastic(B, 50.0), slots={A: ["n1/0", "n1/1"], B: ["n1/2", "n1/3"]}),
    ]),
)  # fmt: skip
def test_optimus(
    steps_left: Any, nodes: tuple[int, ...], options: dict[str, Any], trace: list[Step]
) -> None:
    policy = make("optimus", {"remaining": "oracle", **options}, ToldOracle(steps_left))
    it = InstantCluster(policy, row_of(*nodes))

    follow(it, *trace)

    assert not any(plan.restart for plan in it.plans)


def test_under_optimus_a_changed_size_restarts_a_job() -> None:
    policy = make("optimus", {"remaining": "oracle", **AT_ONCE}, ToldOracle(STEPS_LEFT))
    it = InstantCluster(policy, row_of(4))

    follow(it, then(0.0, elastic(A)), then(50.0, elastic(B, 50.0), sizes={A: 2, B: 2}))

    stops, starts = it.plans[-3:-1]
    assert (stops.restart, starts.restart) == ((A,), ())
    assert {name: len(slots) for name, slots in stops.local_batch.items()} == {A: 2, B: 2}
    assert stops.local_batch == starts.local_batch
    assert stops.reasons[A].code == "restart"


# --- the index of gittins


SIZE = st.floats(1.0, 1e5)


def history_of(past: Sequence[float], kept: int = 100) -> ServiceHistory:
    history = ServiceHistory(kept)
    for service in past:
        history.add(service)
    return history


@pytest.mark.parametrize(
    ("attained", "index"),
    [
        (0.0, (2 / 4) / ((50 + 90 + 100 + 100) / 4)),
        (100.0, (1 / 2) / ((50 + 100) / 2)),
        (150.0, 0.0),
        (300.0, (1 / 1) / (100 / 1)),
        (400.0, 0.0),
    ],
)
def test_the_index_of_four_jobs_agrees_with_a_calculation_by_hand(
    attained: float, index: float
) -> None:
    """They took 50, 90, 150 and 400 slot seconds; the quantum is 100."""
    assert history_of([400, 50, 150, 90]).index(attained, 100.0) == pytest.approx(index)


@settings(max_examples=examples(200), deadline=None)
@given(
    past=st.lists(SIZE, min_size=1, max_size=30),
    attained=st.floats(0.0, 1e5),
    quantum=st.floats(1.0, 1e5),
    kept=st.integers(1, 30),
)
def test_the_index_agrees_with_its_definition(
    past: list[float], attained: float, quantum: float, kept: int
) -> None:
    recent = past[-kept:]
    longer = [service for service in recent if service > attained]
    ends = sum(service <= attained + quantum for service in longer)
    takes = sum(min(service - attained, quantum) for service in longer)

    index = history_of(past, kept).index(attained, quantum)

    assert index == pytest.approx(ends / takes if ends else 0.0, rel=1e-6, abs=1e-9)


# --- optimus without an oracle


def test_slots_stay_reserved_for_a_job_that_is_stopping() -> None:
    """B is stopping and resumes with two slots: A may not have them, although they are free."""
    policy = make("optimus", {"remaining": "oracle"}, ToldOracle(STEPS_LEFT))
    slots = row_of(4)
    policy.plan(view_of(slots, elastic(A), elastic(B)), Seconds(0.0))
    parking = elastic(B, movable=False)

    plan = policy.plan(view_of(slots[:3], elastic(A), parking), Seconds(0.5))

    assert plan.local_batch == {}
    assert plan.reasons[A].text == "waits: its 2 slots are not free yet"


def test_a_job_that_gains_nothing_from_slots_keeps_its_minimum() -> None:
    """B's family is no faster on four slots; A's is twice as fast on two."""
    policy = make("optimus")
    for slots in (1, 2, 4):
        policy.observe(epoch_seen(B, family="f", slots=slots), Seconds(1.0))
        linear = epoch_seen(A, family="g", slots=slots, samples_per_s=100.0 * slots)
        policy.observe(linear, Seconds(1.0))
    it = InstantCluster(policy, row_of(4))
    it.submit(
        elastic(A, family="g", stop_samples=10_000), elastic(B, family="f", stop_samples=10_000)
    )

    assert it.sizes(2.0) == {A: 3, B: 1}


def test_the_loss_curve_gives_the_remaining_steps() -> None:
    """Loss 1/k falls by 1/(k + 1) of itself: by less than 0.095 from epoch 10 on, 6 to go."""
    estimates = LengthEstimates(0.095)
    for k in range(1, 5):
        estimates.observe(epoch_seen(A, epoch=k, train_loss=1.0 / k))
    job = elastic(A, epoch=4, epoch_samples=640, samples_done=2560)

    assert estimates.remaining_steps(job) == 60.0


def test_relatives_or_a_stated_length_give_the_remaining_steps() -> None:
    estimates = LengthEstimates(0.01)
    for number, done in enumerate((6400, 12_800)):
        ended = JobEnded(job=JobId(f"x-{number}"), family="f", samples_done=done, succeeded=True)
        estimates.observe(ended)

    assert estimates.remaining_steps(elastic(A, family="f", samples_done=640)) == 140.0
    stated = elastic(A, stop_samples=6400, samples_done=640)
    assert LengthEstimates(0.01).remaining_steps(stated) == 90.0
