"""Slots go where the loss is expected to fall most."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from typing import Any

import msgspec
import pytest

from controlplane.policy.api import EpochSeen, JobView, Policy, StepsSeen
from controlplane.policy.registry import make
from schemas.errors import SettingsError
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import A, B, C, job_view
from tests.support.views import InstantCluster, row_of

NAN = float("nan")


def elastic(job: JobId, most: int = 8, **changes: Any) -> JobView:
    return job_view(job, 0.0, **{"slots": (1, most), "family": str(job), "epoch": 8} | changes)


def epoch(job: JobId, number: int, loss: float | None, slots: int = 1) -> EpochSeen:
    """Epochs of 1000 samples; 100 samples/s and slot."""
    return EpochSeen(
        job=job,
        family=str(job),
        slots=slots,
        nodes=1,
        global_batch=64,
        samples_per_s=100.0 * slots,
        whole=True,
        epoch=number,
        samples_done=1000 * number,
        train_loss=loss,
    )


def told(
    losses: dict[JobId, Callable[[int], float | None]], many: int = 8, **options: Any
) -> Policy:
    """A policy that has heard of so many epochs of each job; the last at 100."""
    policy = make("slaq", options)
    for job, loss in losses.items():
        for k in range(1, many + 1):
            policy.observe(epoch(job, k, loss(k)), Seconds(100.0))
    return policy


def cluster(policy: Policy, *jobs: JobView, slots: int = 8) -> InstantCluster:
    it = InstantCluster(policy, row_of(slots))
    it.submit(*jobs)
    return it


def sizes(placed: dict[JobId, list[SlotId]]) -> dict[JobId, int]:
    return {name: len(slots) for name, slots in placed.items()}


def falls(k: int) -> float:
    return 10.0 / k


def has_converged(k: int) -> float:
    return 1.0 + 0.2**k


def test_slots_go_to_the_job_whose_loss_falls_and_the_converged_one_keeps_its_least() -> None:
    it = cluster(told({A: has_converged, B: falls}), elastic(A), elastic(B))

    assert sizes(it.at(100.0)) == {A: 1, B: 7}


def test_a_reason_speaks_of_the_loss_and_of_whom_else_a_slot_would_serve() -> None:
    it = cluster(told({A: has_converged, B: falls}), elastic(A), elastic(B))
    it.at(100.0)

    reason = it.plans[0].reasons[B]

    assert reason.text.startswith(
        "resumes on 7 slots: the next 10 s are expected to lower its loss by 4"
    )
    assert reason.text.endswith("by one more slot a-1 would gain 15%")
    assert reason.numbers["predicted_loss"] == pytest.approx(10.0 / 14.5, rel=0.05)
    assert it.plans[0].predicted_loss[B] == reason.numbers["predicted_loss"]
    assert {"loss", "limit", "share_of_rest", "gain", "rival_gain"} <= reason.numbers.keys()


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda _: None, "it has reported no loss"),
        (lambda _: NAN, "it has reported no loss"),
        (lambda k: 1.0 if k < 3 else None, "2 of its losses are known, a curve needs 3"),
        (lambda _: 1.0, "its loss has not fallen"),
        (lambda k: 1.0 * k, "its loss has not fallen"),
        (lambda k: 10.0**k, "its loss has not fallen"),
        (lambda k: (5.0, 4.0, *range(5, 11))[k - 1], "its loss does not fall"),
        (lambda k: (9, 8, 7, 2, 2, 7, 8, 8)[k - 1], "its losses follow no curve"),
    ],
)
def test_a_job_whose_losses_tell_no_curve_has_its_fair_share_and_is_told_why(
    loss: Callable[[int], float | None], said: str
) -> None:
    it = cluster(told({A: loss, B: falls}), elastic(A), elastic(B))

    assert sizes(it.at(100.0)) == {A: 4, B: 4}
    assert it.plans[0].reasons[A].text == (
        f"resumes on 4 slots: its share of 8 slots among 2, since {said}"
    )


def test_a_new_job_has_more_than_its_share_until_it_has_a_curve() -> None:
    """Twice four of twelve slots, of which the others keep their leasts."""
    it = cluster(
        told({B: falls, C: falls}), elastic(A, 9, epoch=0), elastic(B), elastic(C), slots=12
    )

    assert sizes(it.at(100.0))[A] == 8


def test_what_jobs_with_curves_cannot_use_goes_to_those_without() -> None:
    it = cluster(told({B: falls}), elastic(A), elastic(B, most=2))

    assert sizes(it.at(100.0)) == {A: 6, B: 2}


def test_a_job_with_long_epochs_is_known_by_its_telemetry() -> None:
    """Not one epoch is over: the loss falls as exp(-x), so its mean so far as (1 - exp(-x)) / x."""
    policy = told({B: has_converged})
    for k in range(1, 12):
        x = 0.1 * k
        policy.observe(
            StepsSeen(job=A, family=str(A), group=1, slots=1, nodes=1, global_batch=64, step=k,
                      samples_done=1000 * k, samples_per_s=100.0, train_loss=10.0 * (1.0 - exp(-x)) / x),
            Seconds(100.0),
        )  # fmt: skip
    it = cluster(policy, elastic(A), elastic(B))

    assert sizes(it.at(100.0)) == {A: 7, B: 1}


def test_nobody_gains_beyond_the_end_that_was_stated() -> None:
    """After 8 of 9 epochs another 10 s on one slot are the end of A."""
    it = cluster(
        told({A: falls, B: falls}), elastic(A, stop_samples=9000), elastic(B, samples_done=8000)
    )

    assert sizes(it.at(100.0)) == {A: 1, B: 7}


def test_a_size_holds_for_a_scheduling_epoch_unless_others_need_the_room() -> None:
    it = cluster(told({A: has_converged, B: falls, C: falls}), elastic(B))
    it.at(100.0)
    it.submit(elastic(A))
    assert sizes(it.at(100.0)) == {A: 1, B: 7}

    it.submit(elastic(C))
    it.at(102.0)
    held = sizes(it.at(105.0))

    assert held[A] == 1
    assert it.plans[-1].wake_at == 115.0
    assert abs(held[B] - held[C]) <= 1


def test_where_not_all_can_have_a_slot_they_take_turns() -> None:
    it = cluster(told({}, quantum_s=60.0), elastic(A), elastic(B), slots=1)

    had = [set(it.at(now)) for now in (0.0, 30.0, 60.0, 90.0, 120.0)]

    assert had == [{A}, {A}, {B}, {B}, {A}]
    assert it.plans[0].reasons[B].text == (
        "waits: needs 1 slot, jobs whose turn it is leave no room for it"
    )


def test_without_use_for_the_loss_slots_serve_speed() -> None:
    it = cluster(told({A: has_converged, B: has_converged}, many=30), elastic(A), elastic(B))

    assert sizes(it.at(100.0)) == {A: 4, B: 4}


def test_a_floor_of_efficiency_bounds_what_a_job_gets() -> None:
    """Two slots are 1.8 times as fast as one, four 2.2 times: 0.9 and 0.55 a slot."""
    policy = told({A: falls}, efficiency_floor=0.8)
    for slots, speed in ((2, 180.0), (4, 220.0)):
        measured = msgspec.structs.replace(epoch(A, 8, None, slots), samples_per_s=speed)
        policy.observe(measured, Seconds(100.0))
    it = cluster(policy, elastic(A))

    assert sizes(it.at(100.0)) == {A: 2}


def test_for_quality_the_job_that_is_nearly_there_comes_first() -> None:
    """Both are to lose 90% of what they can: A will have in a few epochs, B in a hundred."""
    losses = {A: lambda k: 10.0 * 0.8**k, B: lambda k: 10.0 * 0.99**k}
    jobs = (elastic(A), elastic(B))

    soon = sizes(cluster(told(losses, target="quality"), *jobs).at(100.0))
    much = sizes(cluster(told(losses), *jobs).at(100.0))

    assert (soon[A], much[A]) == (3, 1)


def test_free_slots_are_given_at_once() -> None:
    it = cluster(told({A: falls, B: falls}), elastic(A), elastic(B))
    it.at(100.0)
    it.end(A)

    assert sizes(it.at(101.0)) == {B: 8}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"interval_s": 0.0}, "interval_s: 0.0 is below 0.5; raise it"),
        ({"interval_s": NAN}, "interval_s: nan is not finite"),
        ({"quality": 1.0}, "quality: 1.0 is above 0.999; lower it"),
        ({"decay": 1.5}, "decay: 1.5 is above 1.0; lower it"),
        ({"history": 2}, "history: 2 is below 3; raise it"),
        ({"margin": -0.1}, "margin: -0.1 is below 0.0; raise it"),
        ({"efficiency_floor": 2.0}, "efficiency_floor: 2.0 is above 1.0; lower it"),
        ({"most": 0}, "most: 0 is below 1; raise it"),
        ({"normalise": "largest"}, r"\$\.normalise"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        make("slaq", options)
