"""The learning rate follows the batch."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.state.learning_rates import LrRamp, LrScaling, lr_factor

FACTORS = st.floats(1e-3, 1e3)


@pytest.mark.parametrize(
    ("rule", "base", "factor"),
    [("linear", 16, 4.0), ("sqrt", 16, 2.0), ("none", 16, 1.0), ("linear", 0, 1.0)],
)
def test_the_target_follows_the_rule_from_the_base_batch(
    rule: LrScaling, base: int, factor: float
) -> None:
    assert lr_factor(rule, 64, base) == factor


@given(FACTORS, FACTORS, st.integers(0, 1000), st.integers(1, 50))
def test_a_ramp_falls_at_once_and_doubles_in_its_steps(
    begin: float, to: float, since: int, doubling: int
) -> None:
    ramp = LrRamp(begin, to, since, doubling)
    last = since + doubling * 21  # 2 ** 20 is more than the range of factors
    values = [ramp.at(step) for step in range(since, last + 1)]

    assert values[-1] == to
    if to <= begin:
        assert set(values) == {to}
    else:
        assert values[0] == begin
        assert all(a <= b for a, b in itertools.pairwise(values))
        for early, late in zip(values, values[doubling:], strict=False):
            assert late <= 2 * early * (1 + 1e-12)


@given(FACTORS, FACTORS, st.integers(0, 100), st.integers(0, 30))
def test_a_new_target_starts_at_the_current_factor(
    to: float, then: float, step: int, doubling: int
) -> None:
    ramp = LrRamp(1.0, to, 0, doubling)
    after = ramp.towards(then, step)

    if then >= ramp.at(step) and doubling and then != to:
        assert after.at(step) == ramp.at(step)
    elif then < ramp.at(step):
        assert after.at(step) == then
    assert after.at(step + 2000) == then
    assert after.towards(then, step + 1) is after


def test_without_a_ramp_the_rate_jumps_as_in_the_paper() -> None:
    assert LrRamp(1.0, 16.0, since=5, doubling=0).at(5) == 16.0
