"""Step times, measured and predicted, passes, and the value of a sample."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from controlplane.prediction.step_times import (
    MAX_WEIGHT,
    Size,
    StepModel,
    StepSample,
    StepTimes,
    fit_steps,
)
from controlplane.prediction.throughput import (
    PassLimits,
    Sample,
    SeenPasses,
    SpeedModel,
    _Fitted,
    fit,
    statistical_efficiency,
)
from elastic.sample_stream import passes as dealt
from tests.support.sizes import examples

ONE_NODE, TWO_NODES = 1, 2
OFTEN = 10.0  # the most that policies let a mean weigh


def at(model: SpeedModel, nodes: int, slots: int, local_batch: float) -> float:
    """Seconds of a step at one size."""
    step = model.step_s(np.array([nodes]), np.array([slots]), np.array([local_batch]))
    return float(step[0])


def measured(
    nodes: int, slots: int, batch: float, compute: tuple[float, float], wire: tuple[float, float]
) -> Sample:
    """A step that computes and then talks, without noise and without overlap; often seen."""
    alone = compute[0] + compute[1] * batch
    talk = wire[0] + wire[1] * (slots - 2) if slots > 1 else 0.0
    return Sample(nodes, slots, batch, alone + talk, weight=OFTEN)


COMPUTE, NEAR, WIDE = (0.02, 0.001), (0.01, 0.002), (0.05, 0.004)
NOISELESS = [
    *(measured(ONE_NODE, 1, batch, COMPUTE, NEAR) for batch in (8, 32, 128)),
    *(measured(ONE_NODE, slots, batch, COMPUTE, NEAR) for slots in (2, 3, 4) for batch in (8, 128)),
    *(
        measured(TWO_NODES, slots, batch, COMPUTE, WIDE)
        for slots in (4, 6, 8)
        for batch in (8, 128)
    ),
]


# --- what was measured


def test_a_fit_recovers_the_coefficients_of_exact_steps() -> None:
    model = fit(NOISELESS, 32)

    assert model.known
    assert model.compute == pytest.approx(COMPUTE, rel=0.05)
    assert model.near is not None
    assert model.far is not None
    assert model.near[0] < 0.5 * model.far[0]
    assert model.near[1] < model.far[1] == pytest.approx(WIDE[1], rel=0.05)
    assert 1.0 <= model.overlap < 1.3
    assert list(model.correction.values()) == pytest.approx([1.0] * 7, abs=0.03)


def test_a_fit_predicts_unmeasured_sizes() -> None:
    model = fit(NOISELESS, 32)

    assert at(model, ONE_NODE, 1, 64) == pytest.approx(0.084, rel=0.02)
    assert at(model, ONE_NODE, 5, 64) == pytest.approx(0.084 + 0.016, rel=0.03)
    assert at(model, TWO_NODES, 12, 8) == pytest.approx(0.028 + 0.09, rel=0.02)


def test_a_fit_recovers_the_overlap() -> None:
    wire = (0.06, 0.01)
    steps = [
        Sample(ONE_NODE, slots, batch, math.hypot(alone, wire[0] + wire[1] * (slots - 2)), OFTEN)
        for slots, batch in itertools.product((2, 3, 4), (8, 32, 128))
        for alone in [COMPUTE[0] + COMPUTE[1] * batch]
    ]
    alone = [measured(ONE_NODE, 1, batch, COMPUTE, wire) for batch in (8, 32, 128)]

    model = fit([*alone, *steps], 32)

    assert model.overlap == pytest.approx(2.0, rel=0.05)
    assert model.near == pytest.approx(wire, rel=0.15)


def test_the_model_is_exact_at_measured_sizes() -> None:
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


def test_measurements_at_one_size_count_by_their_geometric_mean() -> None:
    model = fit([Sample(ONE_NODE, 1, 32, 0.1), Sample(ONE_NODE, 1, 32, 0.4)], 32)

    assert at(model, ONE_NODE, 1, 32) == pytest.approx(0.2)


def test_one_measured_batch_leaves_the_prior_share_that_does_not_depend_on_the_batch() -> None:
    model = fit([Sample(ONE_NODE, 1, 32, 0.1)], 32)

    assert (model.compute[0], model.compute[1] * 32) == pytest.approx((0.03, 0.07), rel=0.01)


def test_steps_that_shorten_with_the_batch_have_no_negative_coefficient() -> None:
    model = fit([Sample(ONE_NODE, 1, 8, 0.2, 1e6), Sample(ONE_NODE, 1, 64, 0.1, 1e6)], 32)

    assert model.compute[1] == 0.0
    assert model.compute[0] > 0.0


# --- what was not


def test_a_size_next_to_a_slow_one_is_as_slow() -> None:
    """What no form foretells at 4 slots holds at 3 and 5 as well."""
    several = [measured(ONE_NODE, slots, 32, COMPUTE, NEAR) for slots in (1, 2, 8)]
    slow = Sample(ONE_NODE, 4, 32, 10 * several[1].step_s, weight=OFTEN)

    model = fit([*several, slow], 32)

    off = model.correction[ONE_NODE, 4]
    assert off > 2.0
    for slots in (3, 5):
        plain = at(replace(model, correction={}), ONE_NODE, slots, 32)
        assert at(model, ONE_NODE, slots, 32) == pytest.approx(off * plain)


def test_a_size_next_to_a_fast_one_follows_the_form() -> None:
    fast = Sample(ONE_NODE, 2, 32, 0.5 * NOISELESS[1].step_s, weight=OFTEN)
    model = fit([NOISELESS[1], fast, *(s for s in NOISELESS if s.slots == 4)], 32)

    plain = replace(model, correction={})
    assert model.correction[ONE_NODE, 2] < 1.0
    assert at(model, ONE_NODE, 3, 32) == pytest.approx(at(plain, ONE_NODE, 3, 32))


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 16])
def test_the_speed_up_without_measurements_is_the_prior(slots: int) -> None:
    model = fit([], 32)

    assert not model.known
    assert at(model, ONE_NODE, 1, 32) == pytest.approx(1.0)
    speed_up = slots * at(model, ONE_NODE, 1, 32) / at(model, ONE_NODE, slots, 32)
    assert speed_up == pytest.approx(min(slots, 2) ** 0.9 * max(slots / 2, 1.0) ** 0.5)


def test_measurements_on_several_slots_predict_one_slot_slightly_faster() -> None:
    """As fast as without talking, which is believed to take about a tenth."""
    model = fit([Sample(ONE_NODE, 4, 32, 0.1)], 32)

    assert 0.08 < at(model, ONE_NODE, 1, 32) < 0.1
    assert at(model, ONE_NODE, 1, 32) < at(model, ONE_NODE, 2, 32) < 0.1


def test_unmeasured_communication_across_nodes_is_slower() -> None:
    """Three slots: 0.052 s of computing and 0.012 s of talk, believed to be about twice that."""
    model = fit([s for s in NOISELESS if s.nodes == 1], 32)

    assert at(model, ONE_NODE, 3, 32) == pytest.approx(0.064, rel=0.03)
    assert 0.052 + 1.5 * 0.012 < at(model, TWO_NODES, 3, 32) < 0.052 + 3 * 0.012


def test_measurements_across_nodes_predict_one_node_faster() -> None:
    model = fit([Sample(TWO_NODES, 2, 32.0, 0.1)], 32)

    assert at(model, TWO_NODES, 2, 32.0) == pytest.approx(0.1)
    assert 0.08 < at(model, ONE_NODE, 2, 32.0) < 0.099


def test_a_few_measurements_outweigh_the_priors() -> None:
    """Talk takes ten times as long as computing; believed is a tenth of a step."""
    slow = [Sample(ONE_NODE, slots, 32, 0.01 + 0.05 * (slots + 1), OFTEN) for slots in (2, 4)]
    model = fit([Sample(ONE_NODE, 1, 32, 0.01, OFTEN), *slow], 32)

    assert at(model, ONE_NODE, 3, 32) == pytest.approx(0.21, rel=0.1)
    assert at(model, ONE_NODE, 8, 32) == pytest.approx(0.46, rel=0.2)


@pytest.mark.parametrize("many", [0, 3, 5, len(NOISELESS)])
def test_a_fit_from_a_former_model_has_the_same_result(many: int) -> None:
    again, cold = fit(NOISELESS, 32, fit(NOISELESS[:many], 32)), fit(NOISELESS, 32)

    assert again.step_s(NODES, SLOTS, BATCHES) == pytest.approx(
        cold.step_s(NODES, SLOTS, BATCHES), rel=1e-4
    )


# --- whatever was measured


any_sample = st.builds(
    Sample, nodes=st.integers(1, 4), slots=st.integers(1, 16),
    local_batch=st.integers(1, 100_000).map(float), step_s=st.floats(1e-5, 1e4),
    weight=st.floats(1.0, 10.0),
)  # fmt: skip
wild_sample = st.builds(
    Sample, nodes=st.integers(1, 1000), slots=st.integers(1, 100_000),
    local_batch=st.floats(1e-6, 1e15), step_s=st.one_of(st.floats(), st.floats(1e-13, 1e13)),
    weight=st.one_of(st.floats(), st.floats(0.0, 1e9)),
)  # fmt: skip
SIZES = [
    (nodes, slots, batch)
    for nodes, slots, batch in itertools.product((1, 2, 4), (1, 2, 3, 8, 64), (1.0, 7.0, 4096.0))
    if nodes <= slots
]
NODES, SLOTS, BATCHES = map(np.array, zip(*SIZES, strict=True))


@settings(max_examples=examples(300), deadline=None)
@given(
    samples=st.one_of(st.lists(any_sample, max_size=8), st.lists(wild_sample, max_size=8)),
    former=st.lists(any_sample, max_size=4),
    first=st.integers(0, 4096),
)
@example(samples=[Sample(1, 2249, 1.0, 1.0, weight=1e308)], former=[], first=0)
def test_steps_are_positive_and_finite_and_no_coefficient_is_negative(
    samples: list[Sample], former: list[Sample], first: int
) -> None:
    for model in (fit(samples, first), fit(samples, first, fit(former, first))):
        step_s = model.step_s(NODES, SLOTS, BATCHES)

        assert step_s.shape == NODES.shape
        assert np.isfinite(step_s).all()
        assert (step_s > 0).all()
        for pair in (model.compute, model.near, model.far):
            assert pair is None or min(pair) >= 0.0


@settings(max_examples=examples(150), deadline=None)
@given(samples=st.lists(any_sample, min_size=1, max_size=8), former=st.lists(any_sample))
def test_a_size_measured_once_is_exact(samples: list[Sample], former: list[Sample]) -> None:
    model = fit(samples, 32, fit(former, 32))
    often = Counter((s.nodes, s.slots) for s in samples)
    once = [s for s in samples if often[s.nodes, s.slots] == 1]

    found = [at(model, s.nodes, s.slots, s.local_batch) for s in once]
    assert found == pytest.approx([s.step_s for s in once], rel=1e-6)


@settings(max_examples=examples(150), deadline=None)
@given(samples=st.lists(any_sample, max_size=8), nodes=st.integers(1, 2))
def test_several_nodes_are_never_predicted_faster_than_one(
    samples: list[Sample], nodes: int
) -> None:
    """Steps of several slots were measured either within nodes only, or only across them."""
    model = fit([replace(s, nodes=min(nodes, s.slots)) for s in samples], 32)
    plain = replace(model, correction={})
    several = SLOTS > 1
    slots, batches = SLOTS[several], BATCHES[several]

    one = plain.step_s(np.ones_like(slots), slots, batches)
    two = plain.step_s(np.full_like(slots, 2), slots, batches)

    assert (two >= one * (1.0 - 1e-9)).all()


@settings(max_examples=examples(100), deadline=None)
@given(
    samples=st.lists(any_sample, min_size=1, max_size=6),
    moved=st.lists(st.floats(-1.0, 1.0), min_size=7, max_size=7),
)
def test_the_jacobian_equals_finite_differences(samples: list[Sample], moved: list[float]) -> None:
    fitted = _Fitted(samples)
    x = fitted.prior_mean + np.array(moved)
    small = 1e-5

    numeric = [
        (fitted.residuals(x + step) - fitted.residuals(x - step)) / (2.0 * small)
        for step in small * np.eye(7)
    ]

    assert fitted.jacobian(x) == pytest.approx(np.array(numeric).T, abs=1e-4)


MODEL = SpeedModel(compute=(0.1, 0.01), near=(0.2, 0.0), known=True)


def step_s(model: SpeedModel, slots: int, local: float) -> float:
    return float(model.step_s(np.array([1]), np.array([slots]), np.array([local]))[0])


def test_a_step_is_the_sum_of_its_passes_with_one_reduction() -> None:
    model = SpeedModel(
        compute=MODEL.compute, near=MODEL.near, known=True, limits=PassLimits(several=10)
    )

    # three passes of 9, 8 and 8 samples, told as 9 each: 0.19 s of computing, and 0.2 s of talk
    assert step_s(model, 2, 25) == pytest.approx(2 * 0.19 + (0.19 + 0.2))
    assert step_s(model, 2, 10) == step_s(MODEL, 2, 10)
    assert step_s(model, 1, 25) == step_s(MODEL, 1, 25), "alone one was always enough"


def test_one_pass_is_assumed_until_several_were_measured() -> None:
    seen = SeenPasses()
    seen.add(2, 16, 1)
    before = seen.limits
    seen.add(2, 24, 2)
    seen.add(1, 64, 1)

    assert before == PassLimits()
    assert seen.limits == PassLimits(alone=math.inf, several=24.0)


@given(bound=st.integers(1, 500), shares=st.lists(st.integers(1, 4000), min_size=1, max_size=8))
def test_shares_take_as_many_passes_as_in_the_training_library(
    bound: int, shares: list[int]
) -> None:
    seen = SeenPasses()
    for share in [*shares, 2 * bound]:
        parts = dealt(share, bound)
        seen.add(2, parts[0], len(parts))

    found = seen.limits.passes(np.full(len(shares), 2), np.array(shares, dtype=np.float64))

    assert found.tolist() == [len(dealt(share, bound)) for share in shares]


def test_a_sample_has_less_value_in_a_larger_batch() -> None:
    batches = np.array([32.0, 64.0, 160.0, 672.0])

    worth = statistical_efficiency(batches, 32.0, 96.0)

    assert worth.tolist() == [1.0, 128 / 160, 0.5, 128 / 768]


def test_the_efficiency_of_a_batch_depends_on_the_noise() -> None:
    twice = np.array([64.0])

    assert statistical_efficiency(twice, 32.0, 0.0).tolist() == [0.5]
    assert statistical_efficiency(twice, 32.0, 1e12) == pytest.approx([1.0])


ONE: Size = (1, 1, 64)
TWO: Size = (1, 2, 32)


def test_a_new_size_or_a_drifting_mean_needs_a_new_fit() -> None:
    times: StepTimes[Size] = StepTimes()

    assert times.add(ONE, 0.1)
    assert not times.add(ONE, 0.11)  # the mean is 3% longer
    assert times.add(ONE, 0.2)  # 32%
    times.mark_fitted()
    assert not times.add(ONE, times.means[ONE].step_s)
    assert times.add(TWO, 0.1)


def test_a_mean_follows_the_newest_measurements_with_bounded_weight() -> None:
    times: StepTimes[Size] = StepTimes()
    for step_s in [0.1, *[0.2] * 30]:
        times.add(ONE, step_s)

    assert 0.199 < times.means[ONE].step_s < 0.2
    assert times.means[ONE].weight == MAX_WEIGHT


def test_a_bound_keeps_the_latest_sizes() -> None:
    bounded, unbounded = StepTimes[Size](kept=2), StepTimes[Size]()
    for times in (bounded, unbounded):
        for local in range(3):
            times.add((1, 1, local), 0.1)

    assert list(bounded.means) == [(1, 1, 1), (1, 1, 2)]
    assert len(unbounded.means) == 3


TRUE = StepModel((0.002, 0.05, 0.02, 0.003))
SEEN = [(slots, batch) for slots in (1, 2, 3, 4, 8) for batch in (64, 256)]


@pytest.mark.parametrize(
    ("slots", "batch", "within"), [(1, 128, 0.03), (6, 128, 0.03), (16, 256, 0.15)]
)
def test_the_model_of_optimus_predicts_unmeasured_sizes(
    slots: int, batch: int, within: float
) -> None:
    samples = [StepSample(w, b, TRUE.step_s(w, b)) for w, b in SEEN]

    # On 2 slots with batch 100: 0.002 x 50 + 0.05 + 0.02 / 2 + 0.003 x 2.
    assert TRUE.step_s(2, 100) == pytest.approx(0.166)
    assert fit_steps(samples, 64).step_s(slots, batch) == pytest.approx(
        TRUE.step_s(slots, batch), rel=within
    )


def test_a_job_that_slots_slow_down_is_not_predicted_to_gain() -> None:
    samples = [StepSample(slots, 64, 0.1 * slots) for slots in (1, 2, 4)]
    model = fit_steps(samples, 64)

    assert model.step_s(3, 64) < model.step_s(4, 64) < model.step_s(5, 64)


@pytest.mark.parametrize("samples", [[], [StepSample(2, 128, 0.6)]])
def test_unmeasured_sizes_speed_up_slightly_below_proportion(samples: list[StepSample]) -> None:
    model = fit_steps(samples, 64)

    for slots in (1, 2, 4, 8):
        assert 1.6 < model.step_s(slots, 64) / model.step_s(2 * slots, 64) < 2.0


def test_coefficients_are_never_negative() -> None:
    samples = [StepSample(1, 64, 0.5), StepSample(2, 64, 0.1), StepSample(4, 256, 0.9)]

    assert min(fit_steps(samples, 64).coefficients) >= 0.0
