"""Slow-downs as functions of what neighbours use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from controlplane.prediction.slowdowns import (
    MAX_LOG_SLOWDOWN,
    Form,
    fit_usage_slowdowns,
    predicted_slowdown,
    prior_weights,
    usage_features,
)
from tests.support.sizes import examples

TRUE: dict[Form, tuple[float, ...]] = {
    "linear": (0.3, 0.05),
    "quadratic": (0.1, 0.0, 0.05, 0.02, 0.04),
}
EACH_FORM = pytest.mark.parametrize("form", TRUE)


@EACH_FORM
def test_weights_are_found_whatever_the_steps_of_each_size_are_alone(form: Form) -> None:
    rng = default_rng(1)
    uses = [(rng.uniform(0, 12), rng.uniform(0, 3e9)) for _ in range(300)]
    features = np.array([usage_features(form, *use) for use in uses])
    sizes = [f"size {number % 7}" for number in range(300)]
    bases = np.array([number % 7 - 3.0 for number in range(300)])

    found = fit_usage_slowdowns(form, sizes, features, bases + features @ TRUE[form], ridge=1e-6)

    assert found == pytest.approx(TRUE[form], abs=1e-6)


@EACH_FORM
def test_what_was_never_measured_is_believed(form: Form) -> None:
    nothing = np.empty((0, len(TRUE[form])))
    once = np.array([usage_features(form, 8.0, 1e9)])

    for features, sizes in (
        (nothing, []),
        (once, ["a"]),
    ):  # one measurement tells of its base alone
        found = fit_usage_slowdowns(form, sizes, features, np.ones(len(sizes)), ridge=2.0)
        assert found.tolist() == prior_weights(form).tolist()


@EACH_FORM
@settings(max_examples=examples(50), deadline=None)
@given(
    weights=st.lists(st.floats(-10, 10), min_size=5, max_size=5),
    cores=st.floats(0, 1e4),
    sent=st.floats(0, 1e12),
)
def test_a_prediction_is_no_gain_and_no_catastrophe(
    form: Form, weights: list[float], cores: float, sent: float
) -> None:
    known = np.array(weights[: len(TRUE[form])])

    assert 0.0 <= predicted_slowdown(form, known, cores, sent) <= MAX_LOG_SLOWDOWN
    assert predicted_slowdown(form, known, 0.0, 0.0) == 0.0
