"""The loss that a policy predicts, in what clients see."""

from __future__ import annotations

from controlplane.service.client_api.replies import job_summary
from controlplane.service.worker_telemetry import TelemetryTable
from schemas.ids import Seconds
from tests.support.builders import N1, A, exited
from tests.support.controller import Controller, running


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
