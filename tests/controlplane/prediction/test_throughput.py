"""How long a step takes, as it was measured and where it was not."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.prediction.throughput import FAR, Sample, SpeedModel, fit

ONE_NODE, TWO_NODES = 1, 2


def at(model: SpeedModel, nodes: int, slots: int, local_batch: float) -> float:
    """Seconds of a step at one size."""
    step = model.step_s(np.array([nodes]), np.array([slots]), np.array([local_batch]))
    return float(step[0])


def measured(
    nodes: int, slots: int, batch: float, compute: tuple[float, float], wire: tuple[float, float]
) -> Sample:
    """A step that computes and then talks, without noise and without overlap; with much weight."""
    alone = compute[0] + compute[1] * batch
    talk = wire[0] + wire[1] * (slots - 2) if slots > 1 else 0.0
    return Sample(nodes, slots, batch, alone + talk, weight=1e6)


COMPUTE, NEAR, WIDE = (0.02, 0.001), (0.01, 0.002), (0.05, 0.004)
NOISELESS = [
    *(measured(ONE_NODE, 1, batch, COMPUTE, NEAR) for batch in (8, 32, 128)),
    *(measured(ONE_NODE, slots, 32, COMPUTE, NEAR) for slots in (2, 3, 4)),
    *(measured(TWO_NODES, slots, 32, COMPUTE, WIDE) for slots in (4, 6, 8)),
]


# --- what was measured


def test_a_fit_recovers_the_coefficients_of_steps_without_noise() -> None:
    model = fit(NOISELESS, 32)

    assert model.known
    assert model.overlap == 1.0
    assert model.compute == pytest.approx(COMPUTE, rel=1e-3)
    assert model.near == pytest.approx(NEAR, rel=1e-2)
    assert model.far == pytest.approx(WIDE, rel=1e-2)
    assert list(model.correction.values()) == pytest.approx([1.0] * 7, rel=1e-3)


def test_a_fit_foretells_sizes_that_were_not_measured() -> None:
    model = fit(NOISELESS, 32)

    assert at(model, ONE_NODE, 1, 64) == pytest.approx(0.084, rel=1e-3)
    assert at(model, ONE_NODE, 5, 64) == pytest.approx(0.084 + 0.016, rel=1e-2)
    assert at(model, TWO_NODES, 12, 8) == pytest.approx(0.028 + 0.09, rel=1e-2)


def test_overlap_of_computing_and_talking_is_found() -> None:
    wire = (0.06, 0.01)
    steps = [
        Sample(ONE_NODE, slots, batch, math.hypot(alone, wire[0] + wire[1] * (slots - 2)), 1e6)
        for slots, batch in itertools.product((2, 3, 4), (8, 32, 128))
        for alone in [COMPUTE[0] + COMPUTE[1] * batch]
    ]
    alone = [measured(ONE_NODE, 1, batch, COMPUTE, wire) for batch in (8, 32, 128)]

    model = fit([*alone, *steps], 32)

    assert model.overlap == 2.0
    assert model.near == pytest.approx(wire, rel=1e-2)


def test_the_model_is_exact_on_average_at_a_size_that_was_measured() -> None:
    odd = [
        Sample(ONE_NODE, 1, 32, 0.1),
        Sample(ONE_NODE, 2, 32, 0.31),
        Sample(ONE_NODE, 4, 32, 0.19),
        Sample(TWO_NODES, 4, 32, 0.2),
    ]

    model = fit(odd, 32)

    assert [at(model, s.nodes, s.slots, s.local_batch) for s in odd] == pytest.approx(
        [s.step_s for s in odd]
    )


def test_two_measurements_at_one_size_are_met_in_their_geometric_mean() -> None:
    model = fit([Sample(ONE_NODE, 1, 32, 0.1), Sample(ONE_NODE, 1, 32, 0.4)], 32)

    assert at(model, ONE_NODE, 1, 32) == pytest.approx(0.2)


def test_one_measured_batch_leaves_the_belief_that_a_part_of_a_step_does_not_depend_on_it() -> None:
    model = fit([Sample(ONE_NODE, 1, 32, 0.1)], 32)

    assert model.compute[0] == pytest.approx(0.03, rel=0.01)
    assert model.compute[1] * 32 == pytest.approx(0.07, rel=0.01)


def test_a_step_that_gets_shorter_with_the_batch_leaves_no_negative_coefficient() -> None:
    model = fit([Sample(ONE_NODE, 1, 8, 0.2, 1e6), Sample(ONE_NODE, 1, 64, 0.1, 1e6)], 32)

    assert model.compute[1] == 0.0
    assert model.compute[0] > 0.0


# --- what was not


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 16])
def test_without_measurements_the_speed_up_is_that_of_the_prior(slots: int) -> None:
    model = fit([], 32)

    assert not model.known
    assert at(model, ONE_NODE, 1, 32) == pytest.approx(1.0)
    speed_up = slots * at(model, ONE_NODE, 1, 32) / at(model, ONE_NODE, slots, 32)
    assert speed_up == pytest.approx(slots**0.9)


def test_steps_on_several_slots_alone_tell_of_one_by_the_prior() -> None:
    model = fit([Sample(ONE_NODE, 4, 32, 0.1)], 32)

    assert at(model, ONE_NODE, 1, 32) == pytest.approx(0.1 * 4**-0.1)


def test_several_nodes_take_a_tenth_longer_until_they_were_measured() -> None:
    model = fit([s for s in NOISELESS if s.nodes == 1], 32)

    within, across = at(model, ONE_NODE, 3, 32), at(model, TWO_NODES, 3, 32)
    assert across == pytest.approx(FAR * fit(NOISELESS, 32).step_s(
        np.array([1]), np.array([3]), np.array([32.0]))[0], rel=1e-3)  # fmt: skip
    assert across > within


# --- whatever was measured


any_sample = st.builds(
    Sample,
    nodes=st.integers(1, 4),
    slots=st.integers(1, 16),
    local_batch=st.integers(1, 100_000).map(float),
    step_s=st.floats(1e-5, 1e4),
    weight=st.floats(1.0, 10.0),
)
SIZES = [
    (nodes, slots, batch)
    for nodes, slots, batch in itertools.product((1, 2, 4), (1, 2, 3, 8, 64), (1.0, 7.0, 4096.0))
    if nodes <= slots
]
NODES, SLOTS, BATCHES = map(np.array, zip(*SIZES, strict=True))


@settings(max_examples=150, deadline=None)
@given(samples=st.lists(any_sample, max_size=8), first=st.integers(1, 4096))
def test_a_step_takes_a_positive_and_finite_time(samples: list[Sample], first: int) -> None:
    step_s = fit(samples, first).step_s(NODES, SLOTS, BATCHES)

    assert step_s.shape == NODES.shape
    assert np.isfinite(step_s).all()
    assert (step_s > 0).all()


@settings(max_examples=100, deadline=None)
@given(samples=st.lists(any_sample, max_size=8), first=st.integers(1, 4096))
def test_no_coefficient_is_negative(samples: list[Sample], first: int) -> None:
    model = fit(samples, first)

    for pair in (model.compute, model.near, model.far):
        assert pair is None or min(pair) >= 0.0


@settings(max_examples=100, deadline=None)
@given(samples=st.lists(any_sample, max_size=8))
def test_several_nodes_are_never_faster_than_one_but_for_what_was_measured(
    samples: list[Sample],
) -> None:
    model = fit(samples, 32)
    several = SLOTS > 1
    near = SpeedModel(model.compute, model.near, model.far, model.overlap)
    slots, batches = SLOTS[several], BATCHES[several]

    one = near.step_s(np.ones_like(slots), slots, batches)
    two = near.step_s(np.full_like(slots, 2), slots, batches)

    assert (two >= FAR * one * (1.0 - 1e-9)).all()


def test_steps_across_nodes_alone_leave_one_node_the_faster_place() -> None:
    model = fit([Sample(TWO_NODES, 2, 32.0, 0.1)], 32)

    assert at(model, TWO_NODES, 2, 32.0) == pytest.approx(0.1)
    assert at(model, ONE_NODE, 2, 32.0) == pytest.approx(0.1 / FAR)
