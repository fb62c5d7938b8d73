"""What users are told of a job that lacks something which the policy needs."""

from __future__ import annotations

import math

import pytest

from controlplane.policy.registry import POLICIES, job_notes

NO_UTILITY = (
    "no utility stated: oasis accepts it, promises it no end, and gives it what promised jobs leave; "
    "`utility` in the job file says what its end is worth"
)


def test_a_policy_that_needs_nothing_has_nothing_to_say() -> None:
    assert job_notes("fifo", POLICIES["fifo"].needs, utility_stated=False) == ()


def test_a_job_without_utility_is_told_what_it_counts() -> None:
    assert job_notes("oasis", ("utility",), utility_stated=False) == (NO_UTILITY,)
    assert job_notes("oasis", ("utility",), utility_stated=True) == ()


@pytest.mark.parametrize(
    ("epochs", "train_loss", "begins"),
    [
        (
            0,
            None,
            "slaq shares slots by training losses: it has at least a fair share until it reports some",
        ),
        (1, None, "no loss in 1 epoch: under slaq"),
        (7, None, "no loss in 7 epochs: under slaq"),
        (3, math.nan, "its loss is nan: under slaq"),
        (0, math.inf, "its loss is inf: under slaq"),
    ],
)
def test_a_job_whose_losses_say_nothing_is_told_of_its_fair_share(
    epochs: int, train_loss: float | None, begins: str
) -> None:
    (note,) = job_notes(
        "slaq", ("losses",), utility_stated=False, epochs=epochs, train_loss=train_loss
    )

    assert note.startswith(begins)
    assert "fair share" in note


@pytest.mark.parametrize("epochs", [0, 3])
def test_a_loss_of_telemetry_or_of_an_epoch_is_all_that_is_needed(epochs: int) -> None:
    notes = job_notes("slaq", ("losses",), utility_stated=False, epochs=epochs, train_loss=0.0)

    assert notes == ()


def test_notes_come_in_the_order_of_the_needs() -> None:
    notes = job_notes("oasis", ("losses", "utility"), utility_stated=False)

    assert [note.split()[0] for note in notes] == ["oasis", "no"]
