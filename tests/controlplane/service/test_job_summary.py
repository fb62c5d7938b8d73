"""A line of `ones ps`: what the latest plan says of a job, beside what the core does."""

from __future__ import annotations

import pytest

from controlplane.policy.api import Reason
from controlplane.service.client_api.replies import job_summary, why_it_waits
from controlplane.service.worker_telemetry import TelemetryTable
from schemas.ids import Seconds
from tests.support.builders import N1, A, exited
from tests.support.controller import Controller, running

PAUSED = "paused: needs 1 slot, jobs whose turn it is leave no room for it, at step 307"


def predicted(controller: Controller) -> float | None:
    """What a list of jobs says of A, if the latest plan predicts 0.25."""
    now = Seconds(controller.now)
    return job_summary(
        controller.job(A), None, TelemetryTable(), now, predicted_loss=0.25
    ).predicted_loss


def test_a_prediction_is_told_of_a_job_on_slots_and_of_no_other() -> None:
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
def test_why_a_job_waits_is_said_once(waits: str, said: str) -> None:
    assert why_it_waits(PAUSED, Reason("wait", waits)) == said
