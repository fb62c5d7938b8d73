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


@pytest.mark.parametrize(
    ("noise", "then", "spec", "limit"),
    [
        ((None, None, None), [], {}, BATCH),
        ((1e6,), [], {}, BATCH),
        ((1e6, 1e6), [], {}, 10_000 // 10),
        ((1e6, 1e6), [(1000, 1e6)], {}, 100),
        ((640.0, 640.0), [(10_000, 64.0)] * 6, {}, BATCH),
        ((1e6, 1e6), [(500, 1e6)], {}, BATCH),
        ((1e6, 1e6), [], {"max_local_batch": None, "slots": (1, 3)}, 3 * BATCH),
        ((1e6, 1e6), [], {"max_batch_size": "keep"}, BATCH),
        ((1e6, 1e6), [], {"max_batch_size": BATCH}, BATCH),
        ((1.0, 1.0), [], {"max_batch_size": 4096}, 4096),
    ],
    ids=[
        "no noise scale is known", "one epoch is not enough to believe it", "a large one opens the batch",
        "a small data set keeps ten steps in an epoch", "the limit falls again with the noise scale",
        "a data set of a few batches keeps the first", "no slot gets more than its user said that fits",
        "a batch that is to be kept", "a batch that is stated", "a stated limit holds whatever was measured",
    ],
)  # fmt: skip
def test_a_batch_may_grow_as_far_as_its_noise_scale_and_its_user_allow(
    noise: tuple[float | None, ...], then: list[tuple[int, float]], spec: dict[str, Any], limit: int
) -> None:
    controller = one_that_trains(*noise, **spec)
    for epoch, (samples, scale) in enumerate(then, len(noise) + 1):
        controller.tell(N1, epoch_end(A, epoch, epoch_samples=samples, noise_scale=scale))

    assert batch_limit(controller.job(A)) == limit


@pytest.mark.parametrize(
    ("phi", "limit"), [(1.0, 64), (64.0, 64), (640.0, 128), (6400.0, 724), (None, 64)]
)
def test_a_batch_ends_where_a_sample_is_worth_nine_tenths(phi: float | None, limit: int) -> None:
    assert noise_limit(64, phi) == limit
    assert phi is None or (phi + 64) / (phi + limit) >= 0.9


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
