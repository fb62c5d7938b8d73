"""Reasons in rows of `ones ps`, and notes on what a policy or the cluster lacks for a job."""

from __future__ import annotations

import math

import pytest

from controlplane.core.inputs import DrainRequested
from controlplane.policy.api import Reason
from controlplane.service.api.replies import PolicyNotes, job_summary, size_notes, waiting_reason
from controlplane.service.worker_telemetry import TelemetryTable
from schemas.ids import Seconds
from tests.support.builders import N1, N2, A, epoch_end, exited, job_spec, paused, resized, resumed
from tests.support.controller import Controller, cluster_of, running, starting

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


def test_only_a_waiting_job_has_an_expected_start() -> None:
    numbers = {"start_s": 60.0, "start_earliest_s": 0.0, "start_latest_s": 90.0}
    waiting = cluster_of(n1=1)
    waiting.submit("a")

    starts = [
        (row.start_at, row.start_earliest, row.start_latest)
        for one in (running(), waiting)
        for row in [
            job_summary(
                one.job(A), Reason("waits", "waits", numbers), TelemetryTable(), Seconds(1000.0)
            )
        ]
    ]

    assert starts == [(None, None, None), (1060.0, 1000.0, 1090.0)]


@pytest.mark.parametrize(
    ("waits", "said"),
    [
        ("waits: needs 1 slot, jobs whose turn it is leave no room for it", PAUSED),
        ("waits for 2 slots, 0 free", f"{PAUSED}; waits for 2 slots, 0 free"),
    ],
)
def test_the_reason_of_a_waiting_job_is_not_repeated(waits: str, said: str) -> None:
    assert waiting_reason(PAUSED, Reason("wait", waits)) == said


def test_a_loss_that_is_not_finite_is_told_until_one_is_finite_again() -> None:
    controller = running(retries=1)

    def told() -> str:
        return job_summary(
            controller.job(A), None, TelemetryTable(), Seconds(controller.now)
        ).reason

    before = told()
    controller.tell(N1, epoch_end(A, 1, train_loss=None, loss_is_not_finite=True))
    bad = told()
    controller.tell(N1, epoch_end(A, 2))

    assert bad == f"the training loss of epoch 1 was NaN or infinite; {before}"
    assert told() == before


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
        "resumed by ann; waiting for slots: ann ordered 1 slot",
        "expected to start in 58 s",
    ]


def test_the_reason_shows_the_wait_before_a_retry() -> None:
    controller = running(retries=1)
    controller.tell(N1, exited(A, code=3))

    told = [
        job_summary(controller.job(A), None, TelemetryTable(), Seconds(controller.now + s)).reason
        for s in (0.0, 1.0)
    ]

    failed = "try 1 of 2 failed: the script exited with code 3"
    assert told == [f"{failed}; retrying in 1 s", f"{failed}; retrying"]


UNTIL = "slaq shares slots by training losses: it has at least a fair share until it reports some"


def test_a_policy_without_needs_makes_no_notes() -> None:
    assert PolicyNotes("fifo", ()).of_spec(job_spec()) == ()
    assert PolicyNotes("fifo", ()).of(running(epochs=2).job(A)) == ()


def test_a_job_gets_equal_notes_before_and_after_submission() -> None:
    assert PolicyNotes("slaq", ("losses",)).of_spec(job_spec()) == (UNTIL,)
    assert PolicyNotes("slaq", ("losses",)).of(starting().job(A)) == (UNTIL,)


@pytest.mark.parametrize(
    ("loss", "begins"), [(None, "no loss in 1 epoch: "), (math.nan, "its loss is nan: "), (0.5, "")]
)
def test_the_first_epoch_decides_the_note_about_losses(loss: float | None, begins: str) -> None:
    controller = running()
    controller.tell(N1, epoch_end(A, 1, train_loss=loss))

    notes = PolicyNotes("slaq", ("losses",)).of(controller.job(A))

    assert [note.startswith(begins) for note in notes] == [True] * bool(begins)


def test_a_loss_in_telemetry_prevents_the_note() -> None:
    assert PolicyNotes("slaq", ("losses",)).of(starting().job(A), train_loss=0.5) == ()


def test_an_ended_job_gets_no_note() -> None:
    controller = starting()
    controller.tell(N1, exited(A, code=0))

    assert controller.job(A).ended
    assert PolicyNotes("slaq", ("losses",)).of(controller.job(A)) == ()


@pytest.mark.parametrize("least", [1, 3])
def test_a_job_that_the_cluster_can_hold_gets_no_note_about_its_slots(least: int) -> None:
    assert size_notes(cluster_of(n1=2, n2=1).state, job_spec(slots=(least, 8))) == ()


def test_slots_of_nodes_that_are_lost_or_drained_do_not_count() -> None:
    controller = cluster_of(n1=2, n2=4, n3=1)
    controller.lose(N2)
    controller.take(DrainRequested(node=N1, user="ann", reason="new kernel", within_s=None))

    (note,) = size_notes(controller.state, job_spec(slots=3))

    assert note.startswith("it needs 3 slots, the cluster has 1: it waits until nodes join")
