"""Slow-downs by GPU types, neighbours, their usage, and shared cores."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from controlplane.prediction.slowdowns import (
    MAX_COLOCATION_LOG,
    MAX_LOG_SLOWDOWN,
    Form,
    Observation,
    Parts,
    fit_usage_slowdowns,
    predicted_slowdown,
    prior_weights,
    separate,
    stretch,
    stretch_alone,
    usage_features,
)
from tests.support.sizes import examples

SIZES = {1: math.log(0.1), 2: math.log(0.12), 4: math.log(0.2)}
KINDS = {"fast": 0.0, "slow": 0.7, "slower": 1.1}
COMPANY = {None: 0.0, "hungry": 0.4, "meek": 0.0}


def seen(
    size: Hashable, gpu_type: str, colocation: Hashable, log_step_s: float, weight: float = 10.0
) -> Observation:
    beside = () if colocation is None else (colocation,)
    return Observation(size, gpu_type, beside, log_step_s, weight)


def everything(noise: float = 0.0) -> list[Observation]:
    """Each size on each type beside each neighbour."""
    rng = default_rng(0)
    return [
        seen(size, gpu_type, colocation, sum(parts) + noise * float(rng.standard_normal()))
        for (size, *one), (gpu_type, *two), (colocation, *three) in itertools.product(
            SIZES.items(), KINDS.items(), COMPANY.items()
        )
        for parts in [(*one, *two, *three)]
    ]


def step_s(parts: Parts, size: int, gpu_type: str, colocation: str | None = None) -> float:
    cost = parts.colocations[colocation] if colocation else 0.0
    return math.exp(parts.base[size] + parts.gpu_types[gpu_type] + cost)


# --- known parts are found


@pytest.mark.parametrize(("noise", "error"), [(0.0, 0.02), (0.05, 0.1)])
def test_steps_are_separated_into_size_type_and_neighbour(noise: float, error: float) -> None:
    parts = separate(everything(noise), {}, {})

    for gpu_type, cost in KINDS.items():
        found = parts.gpu_types[gpu_type] - parts.gpu_types["fast"]
        assert found == pytest.approx(cost, abs=error)
    for size, log_s in SIZES.items():
        assert step_s(parts, size, "fast") == pytest.approx(math.exp(log_s), rel=error)
    assert parts.colocations["hungry"] == pytest.approx(0.4, abs=error)
    assert parts.colocations["meek"] == pytest.approx(0.0, abs=error)


def test_a_size_measured_on_a_slow_type_is_predicted_for_the_fast_type() -> None:
    parts = separate(
        [seen(1, "fast", None, 0.0), seen(1, "slow", None, 0.7), seen(2, "slow", None, 0.9)], {}, {}
    )

    assert step_s(parts, 2, "fast") == pytest.approx(math.exp(0.2), rel=0.06)


def test_a_size_measured_beside_a_neighbour_is_predicted_alone() -> None:
    parts = separate(
        [seen(1, "", None, 0.0), seen(1, "", "hungry", 0.4), seen(2, "", "hungry", 0.6)], {}, {}
    )

    assert step_s(parts, 2, "") == pytest.approx(math.exp(0.2), rel=0.05)


@pytest.mark.parametrize(("log_step", "cost"), [(-0.5, 0.0), (50.0, MAX_COLOCATION_LOG)])
def test_the_cost_of_a_neighbour_is_bounded(log_step: float, cost: float) -> None:
    parts = separate([seen(1, "", None, 0.0), seen(1, "", "other", log_step)], {}, {})

    assert parts.colocations == {"other": cost}
    if not cost:
        assert parts.base == {1: pytest.approx(-0.25, abs=1e-3)}, "steps beside it count as alone"


def test_costs_of_several_neighbours_add_up() -> None:
    alone, both = seen(1, "", None, 0.0, 1e6), ("hungry", "meek")
    twins = ("hungry", "hungry")

    parts = separate(
        [alone, Observation(1, "", both, 0.5, 1e6), Observation(1, "", twins, 0.8, 1e6)], {}, {}
    )

    assert parts.colocations == pytest.approx({"hungry": 0.4, "meek": 0.1}, abs=1e-3)


def test_effects_that_cannot_be_separated_equal_their_priors() -> None:
    one_type = separate([seen(1, "slow", None, 1.0)], {"slow": 0.7, "fast": 0.0}, {})
    always_beside = separate([seen(1, "", "hungry", 1.0)], {}, {"hungry": 0.4})

    assert one_type.gpu_types == {"slow": pytest.approx(0.7, abs=1e-3)}
    assert one_type.base == {1: pytest.approx(0.3, abs=1e-3)}
    assert always_beside.colocations == {"hungry": pytest.approx(0.4, abs=1e-3)}


def test_a_prior_weighs_half_a_measurement() -> None:
    alone = seen(1, "", None, 0.0, 1e6)

    one = separate([alone, seen(1, "", "hungry", 0.6, 1.0)], {}, {"hungry": 0.0})
    many = separate([alone, seen(1, "", "hungry", 0.6, 10.0)], {}, {"hungry": 0.0})

    assert one.colocations["hungry"] == pytest.approx(0.4, abs=0.01)
    assert many.colocations["hungry"] == pytest.approx(0.6 * 10 / 10.5, abs=0.01)


def test_no_observations_have_no_parts() -> None:
    assert separate([], {"fast": 1.0}, {"hungry": 1.0}) == Parts({}, {}, {})


# --- whatever is told

observations = st.lists(
    st.builds(
        Observation,
        size=st.integers(1, 3),
        gpu_type=st.sampled_from(["", "fast", "slow"]),
        beside=st.lists(st.sampled_from(["hungry", "meek", "far"]), max_size=3).map(tuple),
        log_step_s=st.floats(-750, 750),  # of all numbers that can be written
        weight=st.floats(0, 1e9),
    ),
    max_size=12,
)
priors = st.floats(-20, 20)


@settings(max_examples=examples(200))
@given(
    told=observations,
    gpu_types=st.dictionaries(st.sampled_from(["fast", "slow"]), priors),
    colocations=st.dictionaries(st.sampled_from(["hungry", "meek"]), priors),
)
def test_every_part_is_finite_and_no_neighbour_helps(
    told: list[Observation], gpu_types: dict[str, float], colocations: dict[str, float]
) -> None:
    parts = separate(told, gpu_types, colocations)

    assert parts == separate(list(told), gpu_types, colocations)
    assert all(map(math.isfinite, (*parts.base.values(), *parts.gpu_types.values())))
    assert all(0.0 <= cost <= MAX_COLOCATION_LOG for cost in parts.colocations.values())
    assert set(parts.base) == {one.size for one in told}
    assert set(parts.gpu_types) == {one.gpu_type for one in told}
    assert set(parts.colocations) == {other for one in told for other in one.beside}


TRUE: dict[Form, tuple[float, ...]] = {
    "linear": (0.3, 0.05),
    "quadratic": (0.1, 0.0, 0.05, 0.02, 0.04),
}
EACH_FORM = pytest.mark.parametrize("form", TRUE)


@EACH_FORM
def test_usage_weights_do_not_depend_on_the_base_of_sizes(form: Form) -> None:
    rng = default_rng(1)
    uses = [(rng.uniform(0, 12), rng.uniform(0, 3e9)) for _ in range(300)]
    features = np.array([usage_features(form, *use) for use in uses])
    sizes = [f"size {number % 7}" for number in range(300)]
    bases = np.array([number % 7 - 3.0 for number in range(300)])

    found = fit_usage_slowdowns(form, sizes, features, bases + features @ TRUE[form], ridge=1e-6)

    assert found == pytest.approx(TRUE[form], abs=1e-6)


@EACH_FORM
def test_usage_weights_without_measurements_equal_the_prior(form: Form) -> None:
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
def test_a_predicted_slow_down_is_bounded(
    form: Form, weights: list[float], cores: float, sent: float
) -> None:
    known = np.array(weights[: len(TRUE[form])])

    assert 0.0 <= predicted_slowdown(form, known, cores, sent) <= MAX_LOG_SLOWDOWN
    assert predicted_slowdown(form, known, 0.0, 0.0) == 0.0


@pytest.mark.parametrize(
    ("busy", "cores", "times"), [(1, 2, 1.0), (2, 2, 1.0), (3, 2, 1.5), (8, 2, 4.0)]
)
def test_workers_beyond_the_cores_stretch_steps(busy: int, cores: int, times: float) -> None:
    assert stretch(busy, cores) == times


def test_workers_with_own_devices_share_nothing() -> None:
    assert stretch(100, math.inf) == 1.0
    assert stretch_alone(np.array([1, 8]), np.array([1, 2]), math.inf).tolist() == [1.0, 1.0]


def test_a_job_over_several_nodes_shares_the_cores_of_each() -> None:
    slots, nodes = np.array([1, 3, 4, 8, 7]), np.array([1, 1, 1, 2, 2])

    assert stretch_alone(slots, nodes, 2).tolist() == [1.0, 1.5, 2.0, 2.0, 2.0]
