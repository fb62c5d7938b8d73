"""What came of promised speed-ups corrects the next promises of the family."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from controlplane.policy.api import EpochSeen, GainSeen, PolicyEvent
from controlplane.policy.ones.job_estimates import (
    MAX_FACTOR,
    MIN_FACTOR,
    Estimates,
    GainCorrections,
)
from controlplane.policy.ones.job_rows import SizeTable, size_table
from controlplane.policy.options import OnesOptions
from schemas.ids import Seconds
from tests.support.builders import A, B, job_view

MEASURED = [(1, 1), (1, 2)]


def gain(predicted: float, realised: float, correction: float | None = 1.0) -> GainSeen:
    return GainSeen(
        job=A, family="f", predicted=predicted, realised=realised, correction=correction
    )


def knowing(*events: GainSeen) -> GainCorrections:
    corrections = GainCorrections()
    for event in events:
        corrections.observe(event)
    return corrections


def test_a_family_without_a_past_is_believed() -> None:
    assert knowing().factor("f") == 1.0


def test_one_promise_that_was_twice_what_came_takes_most_of_that_from_the_next() -> None:
    learnt = knowing(gain(2.0, 1.0))

    assert learnt.factor("f") == pytest.approx(0.5 ** (1 / 1.5))
    assert learnt.factor("g") == 1.0, "of another family nothing is known"


def test_promises_that_were_corrected_already_are_held_against_the_model_and_not_themselves() -> (
    None
):
    once = knowing(gain(2.0, 1.0)).factor("f")

    again = knowing(gain(2.0, 1.0), *[gain(2.0 * once, 1.0, once)] * 20)

    assert again.factor("f") == pytest.approx(0.5, rel=0.05)


def test_what_was_said_of_sizes_that_were_measured_counts_for_nothing() -> None:
    assert knowing(gain(2.0, 1.0, None)).factor("f") == 1.0


def test_a_correction_is_bounded() -> None:
    assert knowing(*[gain(10.0, 0.1)] * 50).factor("f") == MIN_FACTOR
    assert knowing(*[gain(0.1, 10.0)] * 50).factor("f") == MAX_FACTOR


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan")])
def test_what_nobody_can_have_measured_counts_for_nothing(wrong: float) -> None:
    learnt = knowing(gain(wrong, 1.0), gain(1.0, wrong), gain(1.0, 1.0, wrong))

    assert learnt.factor("f") == 1.0


def test_only_sizes_beyond_those_that_were_measured_are_corrected() -> None:
    learnt, nodes, slots = knowing(gain(2.0, 1.0)), np.array([1, 1, 1, 2]), np.array([1, 2, 4, 2])
    known, factor = np.nan, learnt.factor("f")

    np.testing.assert_equal(
        learnt.corrections("f", MEASURED, nodes, slots), [known, known, factor, factor]
    )
    np.testing.assert_equal(learnt.corrections("f", [], nodes, slots), [known] * 4)


# --- the next job of the family


def measured(slots: int, step_s: float) -> EpochSeen:
    return EpochSeen(
        job=B, family="f", slots=slots, nodes=1, global_batch=64, samples_per_s=64 / step_s,
        whole=True,
    )  # fmt: skip


def promised(*events: PolicyEvent, **options: Any) -> SizeTable:
    """What one, two and four slots of one node promise the next job of a family."""
    chosen = OnesOptions(**options)
    estimates = Estimates(chosen)
    for event in (measured(1, 0.1), measured(2, 0.06), *events):
        estimates.observe(event, Seconds(1.0))
    job = job_view(A, slots=(1, 4), family="f", batch_limit=64, local_limit=64)
    sizes = np.array([1, 2, 4])
    return size_table(job, estimates, chosen, sizes, np.ones_like(sizes), keep_batch=False)


def test_a_prediction_that_was_off_by_two_is_corrected_for_the_next_job_of_the_family() -> None:
    before, after = promised(), promised(gain(2.0, 1.0))

    factor = 0.5 ** (1 / 1.5)
    assert (after.speeds / before.speeds).tolist() == pytest.approx([1.0, 1.0, factor])
    assert (after.gains / before.gains).tolist() == pytest.approx([1.0, 1.0, factor])
    np.testing.assert_allclose(after.corrections, [np.nan, np.nan, factor])


def test_a_size_that_was_measured_meanwhile_is_believed_as_measured() -> None:
    after = promised(gain(2.0, 1.0), measured(4, 0.05))

    assert after.speeds.tolist() == pytest.approx([640.0, 64 / 0.06, 1280.0])


def test_the_correction_can_be_switched_off() -> None:
    off = promised(gain(2.0, 1.0), gain_correction=False)

    assert off.speeds.tolist() == promised().speeds.tolist()
