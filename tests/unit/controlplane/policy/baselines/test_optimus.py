"""Policy `optimus`."""

from __future__ import annotations

from typing import Any

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
