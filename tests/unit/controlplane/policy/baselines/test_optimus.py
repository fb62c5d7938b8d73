"""Policy `optimus`."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.policy.api import JobEnded, JobView, Policy
from controlplane.policy.baselines.optimus import LengthEstimates
from controlplane.policy.registry import make
from schemas.ids import JobId, Seconds
from tests.support.builders import A, B, C, job_view
from tests.support.views import InstantCluster, ToldOracle, epoch_seen, row_of, view_of


def elastic(job: JobId, at: float = 0.0, most: int = 8, **changes: Any) -> JobView:
    return job_view(job, at, slots=(1, most), **changes)


def knowing(steps: dict[JobId, float], **options: Any) -> Policy:
    return make("optimus", {"remaining": "oracle", **options}, ToldOracle(steps))


def test_a_round_agrees_with_a_calculation_by_hand() -> None:
    """Six slots; a step takes 1/n s; A has 120 steps left, B 60, C 12.

    | slot | A saves      | B saves     | C saves    | goes to |
    |------|--------------|-------------|------------|---------|
    | 1-3  |              |             |            | A, B, C |
    | 4    | 120/2 = 60   | 60/2 = 30   | 12/2 = 6   | A       |
    | 5    | 120/6 = 20   | 30          | 6          | B       |
    | 6    | 20           | 60/6 = 10   | 6          | A       |

    Placed in ascending order of size, each on the emptiest node: C, B, A.
    """
    it = InstantCluster(knowing({A: 120.0, B: 60.0, C: 12.0}), row_of(4, 2))
    it.submit(elastic(A), elastic(B), elastic(C))

    assert it.at(0.0) == {C: ["n1/0"], B: ["n1/1", "n1/2"], A: ["n2/0", "n2/1", "n1/3"]}


@pytest.mark.parametrize(
    ("steps", "slots", "given"),
    [({A: 50.0, B: 50.0}, 3, {A: 2, B: 1}), ({A: 0.0, B: 0.0}, 4, {A: 1, B: 1})],
    ids=["the first of equal gains", "no steps left"],
)
def test_slots_go_by_gain_then_by_arrival(
    steps: dict[JobId, float], slots: int, given: dict[JobId, int]
) -> None:
    it = InstantCluster(knowing(steps), row_of(slots))
    it.submit(elastic(A), elastic(B))

    assert it.sizes(0.0) == given


@pytest.mark.parametrize(
    ("job", "options"),
    [(elastic(A, most=3), {}), (elastic(A, batch_size=3), {}), (elastic(A), {"most": 3})],
    ids=["its most", "its batch", "the option"],
)
def test_a_job_gets_no_more_slots_than_it_may_have_or_use(
    job: JobView, options: dict[str, Any]
) -> None:
    it = InstantCluster(knowing({A: 50.0}, **options), row_of(8))
    it.submit(job)

    assert it.sizes(0.0) == {A: 3}


PAPER = {"starts": "rounds", "age_share": 0.0}


def test_as_in_the_paper_a_new_job_waits_for_the_next_round() -> None:
    """A ends at 100, B comes at 50; the round is at 600: four slots for B, C keeps its place."""
    it = InstantCluster(knowing({A: 80.0, B: 80.0, C: 80.0}, **PAPER), row_of(4))
    it.submit(elastic(A), elastic(C))
    assert it.sizes(0.0) == {A: 2, C: 2}

    it.submit(elastic(B, at=50.0))
    assert it.sizes(50.0) == {A: 2, C: 2}
    assert it.plans[-1].wake_at == 600.0
    assert it.plans[-1].reasons[B].text == "waits: sizes are chosen again in the next round"
    it.end(A)
    assert it.sizes(100.0) == {C: 2}
    assert it.sizes(600.0) == {C: 2, B: 2}


def test_a_new_job_starts_on_idle_slots_and_grows_in_the_next_round() -> None:
    """A has what it may have. B comes at 50, when A is 50 s old: 25 s on average."""
    it = InstantCluster(knowing({A: 80.0, B: 80.0}, moves="elastic"), row_of(4))
    it.submit(elastic(A, most=1))
    it.at(0.0)
    it.at(50.0)
    it.submit(elastic(B, at=50.0))

    assert it.sizes(51.0) == {A: 1, B: 1}
    assert it.plans[-1].wake_at == 75.0
    assert it.sizes(75.0) == {A: 1, B: 3}


def test_an_empty_cluster_does_not_wait_for_the_next_round() -> None:
    it = InstantCluster(knowing({A: 80.0, B: 80.0}), row_of(4))
    it.submit(elastic(A))
    it.at(0.0)
    it.end(A)
    it.submit(elastic(B, at=50.0))

    assert it.sizes(50.0) == {B: 4}


def test_a_changed_size_restarts_a_job_unless_moves_are_elastic() -> None:
    it = InstantCluster(knowing({A: 80.0, B: 80.0}, interval_s=0.0), row_of(4))
    it.submit(elastic(A))
    it.at(0.0)
    it.submit(elastic(B, at=50.0))

    it.at(50.0)

    stops, starts = it.plans[-3:-1]
    assert stops.restart == (A,)
    assert {name: len(slots) for name, slots in stops.local_batch.items()} == {A: 2, B: 2}
    assert stops.local_batch == starts.local_batch
    assert starts.restart == ()
    assert stops.reasons[A].code == "restart"
    it = InstantCluster(knowing({A: 80.0, B: 80.0}, interval_s=0.0, moves="elastic"), row_of(4))
    it.submit(elastic(A))
    it.at(0.0)
    it.submit(elastic(B, at=50.0))
    assert it.at(50.0) == {A: ["n1/0", "n1/1"], B: ["n1/2", "n1/3"]}
    assert all(not plan.restart for plan in it.plans)


def test_slots_stay_reserved_for_a_job_that_is_stopping() -> None:
    """B is stopping and resumes with two slots: A may not have them, although they are free."""
    policy = knowing({A: 80.0, B: 80.0, C: 80.0})
    slots = row_of(4)
    policy.plan(view_of(slots, elastic(A), elastic(B)), Seconds(0.0))
    parking = elastic(B, movable=False)

    plan = policy.plan(view_of(slots[:3], elastic(A), parking), Seconds(0.5))

    assert plan.local_batch == {}
    assert plan.reasons[A].text == "waits: its 2 slots are not free yet"


# --- without an oracle


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
