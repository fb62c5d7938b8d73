"""How far a policy may raise a batch that its user left to the cluster."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.core.model.job import batch_limit, noise_limit
from controlplane.core.model.job_phases import Phase
from controlplane.core.plan_check import Verdict, check
from schemas.ids import Seconds
from tests.support.builders import (
    BATCH,
    N1,
    S0,
    S1,
    A,
    epoch_end,
    exited,
    formed,
    proposal,
    raised,
    resized,
)
from tests.support.controller import Controller, cluster_of, training

OPEN: dict[str, Any] = {"max_batch_size": None, "max_local_batch": 4 * BATCH}


def one_that_trains(*noise: float | None, **spec: Any) -> Controller:
    """A job of 10,000 samples on one slot, with an epoch for each of `noise`."""
    controller = training(cluster_of(n1=2), S0, **{**OPEN, **spec})
    for epoch, scale in enumerate(noise, 1):
        controller.tell(N1, epoch_end(A, epoch, epoch_samples=10_000, noise_scale=scale))
    return controller


def test_the_batch_is_kept_while_no_noise_scale_is_known() -> None:
    controller = one_that_trains(None, None, None)

    assert batch_limit(controller.job(A)) == BATCH


def test_one_epoch_is_not_enough_to_believe_a_noise_scale() -> None:
    controller = one_that_trains(1e6)

    assert batch_limit(controller.job(A)) == BATCH


def test_a_large_noise_scale_opens_the_batch_up_to_what_fits_the_slots() -> None:
    controller = one_that_trains(1e6, 1e6)

    assert batch_limit(controller.job(A)) == 10_000 // 10


@pytest.mark.parametrize(
    ("phi", "limit"), [(1.0, 64), (64.0, 64), (640.0, 128), (6400.0, 724), (None, 64)]
)
def test_a_batch_ends_where_a_sample_is_worth_nine_tenths(phi: float | None, limit: int) -> None:
    assert noise_limit(64, phi) == limit
    assert phi is None or (phi + 64) / (phi + limit) >= 0.9


def test_a_small_data_set_keeps_ten_steps_in_an_epoch() -> None:
    controller = one_that_trains(1e6, 1e6)
    controller.tell(N1, epoch_end(A, 3, epoch_samples=1000, noise_scale=1e6))

    assert batch_limit(controller.job(A)) == 100


def test_the_limit_falls_again_when_the_noise_scale_does() -> None:
    controller = one_that_trains(640.0, 640.0)
    for epoch in range(3, 9):
        controller.tell(N1, epoch_end(A, epoch, epoch_samples=10_000, noise_scale=64.0))

    assert batch_limit(controller.job(A)) == BATCH


def test_a_data_set_of_a_few_batches_keeps_the_first_batch() -> None:
    controller = one_that_trains(1e6, 1e6)
    controller.tell(N1, epoch_end(A, 3, epoch_samples=500, noise_scale=1e6))

    assert batch_limit(controller.job(A)) == BATCH


def test_no_slot_gets_more_than_its_user_said_that_fits() -> None:
    controller = one_that_trains(1e6, 1e6, max_local_batch=None, slots=(1, 3))

    assert batch_limit(controller.job(A)) == 3 * BATCH


@pytest.mark.parametrize("stated", ["keep", BATCH])
def test_a_batch_that_is_to_be_kept_is_kept(stated: object) -> None:
    controller = one_that_trains(1e6, 1e6, max_batch_size=stated)

    assert batch_limit(controller.job(A)) == BATCH


def test_a_stated_limit_holds_whatever_was_measured() -> None:
    controller = one_that_trains(1.0, 1.0, max_batch_size=4096)

    assert batch_limit(controller.job(A)) == 4096


def test_policies_see_the_limit_of_the_moment_and_are_held_to_it() -> None:
    controller = one_that_trains(640.0, 640.0)
    assert controller.view().jobs[A].batch_limit == 2 * BATCH

    plan = proposal({A: {S0: BATCH, S1: BATCH + 1}}, based_on=controller.state.version).plan

    refused = {A: "the global batch exceeds its limit"}
    assert check(plan, controller.state, Seconds(controller.now)) == Verdict(refused=refused)


# --- memory


def out_of_memory(controller: Controller, error: str = "torch.OutOfMemoryError: CUDA") -> None:
    """Its only worker says so, and ends."""
    controller.tell(N1, raised(A, index=9, error=error, where="train.py:7"))
    controller.tell(N1, exited(A, code=1))


def one_with_a_large_batch(**spec: Any) -> Controller:
    """A job that trains with four times its first batch on one slot."""
    controller = training(cluster_of(n1=2), S0, **{"max_local_batch": 4 * BATCH, **spec})
    controller.place({A: {S0: 4 * BATCH}})
    controller.tell(N1, formed(A, group=2, index=3))
    return controller


def test_a_share_that_does_not_fit_is_halved_and_tried_again_without_a_retry() -> None:
    controller = one_with_a_large_batch()
    assert controller.job(A).size.batch == 4 * BATCH

    out_of_memory(controller)

    job = controller.job(A)
    assert (job.phase, job.attempts.failures) == (Phase.PAUSED, 0)
    assert job.reason.endswith("retrying with at most 128 samples per slot")
    assert controller.view().jobs[A].local_limit == 2 * BATCH


def test_a_first_batch_that_does_not_fit_is_a_failure_of_the_script() -> None:
    controller = training(cluster_of(n1=1), S0)

    out_of_memory(controller)

    assert controller.job(A).phase is Phase.FAILED


def test_a_pass_that_does_not_fit_is_a_failure_of_the_script_whatever_the_share() -> None:
    controller = training(cluster_of(n1=1), S0, max_local_batch=BATCH // 4)
    controller.take(resized(A, batch=4 * BATCH))
    controller.tell(N1, formed(A, group=2, index=3))
    assert controller.job(A).size.batch == 4 * BATCH

    out_of_memory(controller)

    assert controller.job(A).phase is Phase.FAILED


def test_another_error_with_a_large_batch_is_a_failure_of_the_script() -> None:
    controller = one_with_a_large_batch()

    out_of_memory(controller, error="ValueError: no")

    assert controller.job(A).phase is Phase.FAILED
