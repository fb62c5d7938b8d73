"""What a job lacks for the policy of its cluster, as long as that matters; slots that it lacks."""

from __future__ import annotations

import math

import pytest

from controlplane.core.inputs import DrainRequested
from controlplane.service.api.replies import PolicyNotes, size_notes
from tests.support.builders import N1, N2, A, epoch_end, exited, job_spec
from tests.support.controller import cluster_of, running, starting

UNTIL = "slaq shares slots by training losses: it has at least a fair share until it reports some"


def test_a_policy_without_needs_makes_no_notes() -> None:
    assert PolicyNotes("fifo").of_spec(job_spec()) == ()
    assert PolicyNotes("fifo").of(running(epochs=2).job(A)) == ()


def test_a_job_gets_equal_notes_before_and_after_submission() -> None:
    assert PolicyNotes("slaq").of_spec(job_spec()) == (UNTIL,)
    assert PolicyNotes("slaq").of(starting().job(A)) == (UNTIL,)


@pytest.mark.parametrize(
    ("loss", "begins"), [(None, "no loss in 1 epoch: "), (math.nan, "its loss is nan: "), (0.5, "")]
)
def test_the_first_epoch_decides_the_note_about_losses(loss: float | None, begins: str) -> None:
    controller = running()
    controller.tell(N1, epoch_end(A, 1, train_loss=loss))

    notes = PolicyNotes("slaq").of(controller.job(A))

    assert [note.startswith(begins) for note in notes] == [True] * bool(begins)


def test_a_loss_in_telemetry_prevents_the_note() -> None:
    assert PolicyNotes("slaq").of(starting().job(A), train_loss=0.5) == ()


def test_an_ended_job_gets_no_note() -> None:
    controller = starting()
    controller.tell(N1, exited(A, code=0))

    assert controller.job(A).ended
    assert PolicyNotes("slaq").of(controller.job(A)) == ()


@pytest.mark.parametrize("least", [1, 3])
def test_a_job_that_the_cluster_can_hold_gets_no_note_about_its_slots(least: int) -> None:
    assert size_notes(cluster_of(n1=2, n2=1).state, job_spec(slots=(least, 8))) == ()


def test_slots_of_nodes_that_are_lost_or_drained_do_not_count() -> None:
    controller = cluster_of(n1=2, n2=4, n3=1)
    controller.lose(N2)
    controller.take(DrainRequested(node=N1, user="ann", reason="new kernel", within_s=None))

    (note,) = size_notes(controller.state, job_spec(slots=3))

    assert note.startswith("it needs 3 slots, the cluster has 1: it waits until nodes join")
