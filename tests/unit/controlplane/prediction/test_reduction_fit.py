"""Computing and network, each learnt from its own times."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.prediction.throughput import (
    OVERLAPS,
    Sample,
    SpeedModel,
    can_separate,
    fit,
    fit_by_search,
    fit_separately,
)
from tests.support.sizes import examples

COMPUTE, NEAR, FAR = (0.02, 0.001), (0.01, 0.002), (0.05, 0.004)
CERTAIN = 1e9  # measurements: priors are nothing against these
SIZES = [(1, 1), (1, 2), (1, 4), (2, 8), (4, 16)]  # nodes, slots
BATCHES = (8, 32, 128)


def measured(
    nodes: int, slots: int, batch: float, *, overlap: float = 1.5, weight: float = CERTAIN
) -> Sample:
    """A pass as a worker tells of it: what is left of the network beside computing is its wait."""
    alone = COMPUTE[0] + COMPUTE[1] * batch
    first, hop = NEAR if nodes == 1 else FAR
    talk = first + hop * (slots - 2) if slots > 1 else 0.0
    pass_s = (alone**overlap + talk**overlap) ** (1.0 / overlap)
    return Sample(nodes, slots, batch, pass_s, weight, pass_s - alone)


def everywhere(overlap: float = 1.5, weight: float = CERTAIN) -> list[Sample]:
    return [
        measured(*size, batch, overlap=overlap, weight=weight)
        for size, batch in itertools.product(SIZES, BATCHES)
    ]


def seconds(model: SpeedModel, nodes: int, slots: int, batch: float) -> float:
    found = model.step_s(np.array([nodes]), np.array([slots]), np.array([float(batch)]))
    return float(found[0])


# --- what was measured


@pytest.mark.parametrize("overlap", [1.0, 1.5, 2.0])
def test_what_steps_without_noise_are_made_of_is_found_again(overlap: float) -> None:
    model = fit(everywhere(overlap), 32)

    assert model.overlap == overlap
    assert model.compute == pytest.approx(COMPUTE, rel=1e-4)
    assert model.near == pytest.approx(NEAR, rel=1e-3)
    assert model.far == pytest.approx(FAR, rel=1e-3)
    assert list(model.correction.values()) == pytest.approx([1.0] * len(SIZES), abs=1e-4)


@pytest.mark.parametrize("overlap", OVERLAPS[OVERLAPS > 2.0].tolist())
def test_a_network_that_is_nearly_hidden_is_found_as_far_as_it_matters(overlap: float) -> None:
    model = fit(everywhere(overlap), 32)

    assert model.compute == pytest.approx(COMPUTE, rel=1e-3)
    for nodes, slots, batch in [(1, 3, 64), (2, 6, 64), (4, 16, 8)]:
        true = measured(nodes, slots, batch, overlap=overlap).step_s
        assert seconds(model, nodes, slots, batch) == pytest.approx(true, rel=0.01)


def test_an_overlap_between_those_that_are_tried_leaves_little_to_correct() -> None:
    model = fit(everywhere(overlap=1.6), 32)

    assert list(model.correction.values()) == pytest.approx([1.0] * len(SIZES), abs=0.01)
    assert seconds(model, 2, 6, 64) == pytest.approx(
        measured(2, 6, 64, overlap=1.6).step_s, rel=0.02
    )


def test_waiting_is_told_from_computing_where_times_of_steps_cannot_tell() -> None:
    """Two slots with one batch: 0.1 s, of which half was waiting."""
    told = [Sample(1, 2, 32, 0.1, 10.0, sync_s=0.05)]

    model, blind = fit(told, 32), fit([replace(told[0], sync_s=None)], 32)

    assert seconds(model, 1, 1, 32) == pytest.approx(0.05, rel=0.01)
    assert seconds(blind, 1, 1, 32) > 0.08, "believed to wait for a tenth"
    assert seconds(model, 1, 2, 32) == pytest.approx(0.1, rel=1e-6)


def test_a_few_noisy_measurements_come_close() -> None:
    """5% off, each whole report by itself, as the simulator has it."""
    rng = np.random.default_rng(7)
    noisy = [
        replace(sample, step_s=sample.step_s * off, sync_s=(sample.sync_s or 0.0) * off)
        for sample in everywhere(weight=3.0)
        for off in [math.exp(0.05 * rng.standard_normal())]
    ]

    model = fit(noisy, 32)

    for size in ((1, 3), (2, 6), (3, 12)):
        assert seconds(model, *size, 64) == pytest.approx(measured(*size, 64).step_s, rel=0.1)


# --- what was not


def test_a_lone_worker_says_nothing_of_the_network() -> None:
    """The prior of a speed-up stands in for it, as it does without any times of waiting."""
    alone = [measured(1, 1, batch, weight=10.0) for batch in BATCHES]

    model = fit(alone, 32)

    assert (model.near, model.far) == (None, None)
    assert model == fit([replace(sample, sync_s=None) for sample in alone], 32)


def test_one_size_of_several_slots_leaves_the_belief_that_a_further_slot_costs_little() -> None:
    model = fit([s for s in everywhere() if s.slots <= 2], 32)

    assert model.near is not None
    assert model.near[1] == pytest.approx(0.01 * model.near[0], rel=0.01)


def test_a_network_that_was_never_used_is_believed_to_be_a_little_dearer_across_nodes() -> None:
    near = fit_separately([s for s in everywhere() if s.nodes == 1])
    far = fit_separately([s for s in everywhere() if s.nodes > 1])

    assert near.far == pytest.approx(tuple(1.1 * each for each in NEAR), rel=1e-3)
    assert far.near == pytest.approx(tuple(each / 1.1 for each in FAR), rel=1e-3)


def test_where_one_measurement_of_several_slots_does_not_tell_all_are_fitted_as_before() -> None:
    mixed = everywhere(weight=10.0)
    mixed[-1] = replace(mixed[-1], sync_s=None)

    assert not can_separate(mixed)
    assert replace(fit(mixed, 32), correction={}) == fit_by_search(mixed)


def test_a_lone_workers_silence_about_waiting_is_no_hindrance() -> None:
    silent = [replace(s, sync_s=None) if s.slots == 1 else s for s in everywhere()]

    assert can_separate(silent)
    assert fit(silent, 32) == fit(everywhere(), 32)


# --- whatever is told


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_worker_that_never_waits_or_always_does_is_met_where_it_was_measured(
    share: float,
) -> None:
    steps = [replace(s, sync_s=share * s.step_s) for s in everywhere(weight=10.0)]

    model = fit([s for s in steps if s.local_batch == 32], 32)

    for size in SIZES:
        assert seconds(model, *size, 32) == pytest.approx(measured(*size, 32).step_s, rel=1e-6)


@pytest.mark.parametrize("sync_s", [math.nan, math.inf, -1.0, 0.2], ids=str)
def test_a_wait_that_nobody_can_have_had_counts_as_not_told(sync_s: float) -> None:
    wrong = [Sample(1, 1, 32, 0.1), Sample(1, 2, 32, 0.1, sync_s=sync_s)]

    assert fit(wrong, 32) == fit([replace(s, sync_s=None) for s in wrong], 32)


any_sample = st.builds(
    Sample,
    nodes=st.integers(1, 4),
    slots=st.integers(1, 16),
    local_batch=st.integers(1, 100_000).map(float),
    step_s=st.floats(1e-5, 1e4),
    weight=st.floats(1.0, 10.0),
)
telling = st.builds(
    lambda sample, share: replace(sample, sync_s=share * sample.step_s),
    any_sample,
    st.floats(0.0, 1.0),
)


@settings(max_examples=examples(200), deadline=None)
@given(samples=st.lists(telling, min_size=1, max_size=8), first=st.integers(1, 4096))
def test_whatever_is_told_no_coefficient_is_negative_and_more_never_takes_less(
    samples: list[Sample], first: int
) -> None:
    model = fit(samples, first)

    for pair in (model.compute, model.near, model.far):
        assert pair is None or min(pair) >= 0.0
    plain = replace(model, correction={})
    slots, batches = (axis.ravel() for axis in np.meshgrid([2, 3, 8, 64], [1.0, 7.0, 4096.0]))
    for nodes in (1, 2):
        step_s = plain.step_s(np.full(slots.shape, nodes), slots, batches).reshape(3, 4)
        assert np.isfinite(step_s).all()
        assert (step_s > 0.0).all()
        assert (np.diff(step_s, axis=0) >= -1e-9 * step_s[1:]).all(), "with the batch"
        if model.near is not None:
            assert (np.diff(step_s, axis=1) >= -1e-9 * step_s[:, 1:]).all(), "with slots"
