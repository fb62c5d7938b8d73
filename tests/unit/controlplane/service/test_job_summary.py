"""A line of `ones ps`: what the latest plan says of a job, beside what the core does."""

from __future__ import annotations

import pytest

from controlplane.policy.api import Reason
from controlplane.service.api.replies import job_summary, waiting_reason
from controlplane.service.worker_telemetry import TelemetryTable
from schemas.ids import Seconds
from tests.support.builders import N1, A, exited, paused, resized, resumed
from tests.support.controller import Controller, cluster_of, running

PAUSED = "paused: needs 1 slot, jobs whose turn it is leave no room for it, at step 307"


def predicted(controller: Controller) -> float | None:
    """What a list of jobs says of A, if the latest plan predicts 0.25."""
    now = Seconds(controller.now)
    return job_summary(
        controller.job(A), None, TelemetryTable(), now, predicted_loss=0.25
    ).predicted_loss


def test_only_a_job_on_slots_shows_a_prediction() -> None:
    controller = running(epochs=2)

    on_slots = predicted(controller)
    controller.tell(N1, exited(A, code=0))

    assert (on_slots, predicted(controller)) == (0.25, None)


@pytest.mark.parametrize(
    ("waits", "said"),
    [
        ("waits: needs 1 slot, jobs whose turn it is leave no room for it", PAUSED),
        ("waits for 2 slots, 0 free", f"{PAUSED}; waits for 2 slots, 0 free"),
    ],
)
def test_the_reason_of_a_waiting_job_is_not_repeated(waits: str, said: str) -> None:
    assert waiting_reason(PAUSED, Reason("wait", waits)) == said


def test_an_override_hides_the_reason_of_an_older_plan() -> None:
    controller = cluster_of()
    controller.submit("a")
    stale = Reason("wait", "expected to start in 58 s")

    def told() -> str:
        return job_summary(
            controller.job(A), stale, TelemetryTable(), Seconds(controller.now)
        ).reason

    said = [told()]
    for order in (paused(A), resized(A, 1), resumed(A, auto=True)):
        controller.take(order)
        said.append(told())

    assert said == [
        "expected to start in 58 s",
        "paused by ann",
        "resumed by ann; waits: ann asked for 1 slot, 0 are free",
        "expected to start in 58 s",
    ]


def test_the_reason_shows_the_wait_before_a_retry() -> None:
    controller = running(retries=1)
    controller.tell(N1, exited(A, code=3))

    told = [
        job_summary(controller.job(A), None, TelemetryTable(), Seconds(controller.now + s)).reason
        for s in (0.0, 1.0)
    ]

    failed = "its script ended: exit code 3"
    assert told == [f"{failed}; tried again in 1 s, 1 left", f"{failed}; tried again, 1 left"]
