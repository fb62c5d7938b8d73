"""What a job lacks for the policy of its cluster, as long as that matters."""

from __future__ import annotations

import math

import pytest

from controlplane.service.client_api.policy_notes import PolicyNotes
from tests.support.builders import N1, A, epoch_end, exited, job_spec
from tests.support.controller import running, starting

UNTIL = "slaq shares slots by training losses: it has at least a fair share until it reports some"


def test_a_policy_without_needs_has_nothing_to_say_of_any_job() -> None:
    assert PolicyNotes("fifo").of_spec(job_spec()) == ()
    assert PolicyNotes("fifo").of(running(epochs=2).job(A)) == ()


def test_a_job_that_has_not_begun_is_told_the_same_before_and_after_it_is_submitted() -> None:
    assert PolicyNotes("slaq").of_spec(job_spec()) == (UNTIL,)
    assert PolicyNotes("slaq").of(starting().job(A)) == (UNTIL,)


@pytest.mark.parametrize(
    ("loss", "begins"), [(None, "no loss in 1 epoch: "), (math.nan, "its loss is nan: "), (0.5, "")]
)
def test_an_epoch_settles_whether_there_are_losses(loss: float | None, begins: str) -> None:
    controller = running()
    controller.tell(N1, epoch_end(A, 1, train_loss=loss))

    notes = PolicyNotes("slaq").of(controller.job(A))

    assert [note.startswith(begins) for note in notes] == [True] * bool(begins)


def test_what_telemetry_says_counts_before_an_epoch_has_ended() -> None:
    assert PolicyNotes("slaq").of(starting().job(A), train_loss=0.5) == ()


def test_a_job_that_has_ended_lacks_nothing() -> None:
    controller = starting()
    controller.tell(N1, exited(A, code=0))

    assert controller.job(A).ended
    assert PolicyNotes("slaq").of(controller.job(A)) == ()
