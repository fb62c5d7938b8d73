"""R, in every reading of the paper."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policy.search.batch_limits import LimitBounds, ScaleDown, after_epoch, resumed

WIDE = LimitBounds(1, 1, 1_000_000)
MINUTE = 1 / 60  # lambda of one job a minute
READINGS: tuple[ScaleDown, ...] = ("off", "literal", "contended", "composed")


def limit_after(
    limit: int,
    reading: ScaleDown,
    bounds: LimitBounds = WIDE,
    *,
    ran_s: float = 0.0,
    arrivals_per_s: float = MINUTE,
    contended: bool = True,
) -> int:
    return after_epoch(
        limit,
        bounds,
        reading,
        ran_s=ran_s,
        arrivals_per_s=arrivals_per_s,
        contended=contended,
    )


@pytest.mark.parametrize(
    ("reading", "ran_s", "limit"),
    [
        # the divisor ceil(lambda T + 1) is 1 at 0 s, 2 up to a minute, 3 up to two, 11 at ten
        ("off", 0.0, 200),
        ("off", 600.0, 200),
        ("literal", 0.0, 100),
        ("literal", 30.0, 100),
        ("literal", 90.0, 67),
        ("literal", 150.0, 50),
        ("literal", 600.0, 19),
        ("composed", 0.0, 200),
        ("composed", 30.0, 200),
        ("composed", 90.0, 134),
        ("composed", 150.0, 100),
        ("composed", 210.0, 80),
        ("composed", 600.0, 50),
        ("contended", 30.0, 200),
        ("contended", 60.0, 200),
        ("contended", 90.0, 67),
        ("contended", 600.0, 50),
    ],
)
def test_the_limit_after_an_epoch_while_others_wait(
    reading: ScaleDown, ran_s: float, limit: int
) -> None:
    assert limit_after(100, reading, ran_s=ran_s) == limit


@pytest.mark.parametrize("ran_s", [0.0, 90.0, 600.0])
def test_in_the_contended_reading_a_limit_grows_while_nobody_waits(ran_s: float) -> None:
    assert limit_after(100, "contended", ran_s=ran_s, contended=False) == 200


def test_the_literal_reading_never_lets_a_limit_grow_once_the_job_ran() -> None:
    limits = [limit_after(100, "literal", ran_s=ran_s, arrivals_per_s=1e-6) for ran_s in (1.0, 9.0)]

    assert limits == [100, 100]


@pytest.mark.parametrize("reading", ["off", "contended", "composed"])
def test_without_arrivals_every_reading_but_the_literal_one_doubles(reading: ScaleDown) -> None:
    assert limit_after(100, reading, ran_s=600.0, arrivals_per_s=0.0) == 200


def test_a_limit_is_doubled_up_to_what_the_user_allows() -> None:
    bounds = LimitBounds(32, 32, 100)

    assert [limit_after(limit, "off", bounds) for limit in (32, 64, 100)] == [64, 100, 100]


def test_a_job_that_is_left_out_keeps_half_its_limit_but_not_less_than_it_began_with() -> None:
    assert [resumed(limit, LimitBounds(32, 32, 1000)) for limit in (200, 101, 40)] == [100, 50, 32]


@st.composite
def epochs(draw: st.DrawFn) -> tuple[int, LimitBounds, dict[str, Any]]:
    """A limit, its bounds, and the circumstances of an epoch."""
    first, more = draw(st.integers(1, 1000)), draw(st.integers(0, 10_000))
    how = {
        "ran_s": draw(st.floats(0, 1e7)),
        "arrivals_per_s": draw(st.floats(0, 100)),
        "reading": draw(st.sampled_from(READINGS)),
        "contended": draw(st.booleans()),
    }
    return draw(st.integers(first, first + more)), LimitBounds(first, first, first + more), how


@given(epoch=epochs())
def test_a_limit_stays_within_its_bounds_and_moves_by_at_most_two_unless_literal(
    epoch: tuple[int, LimitBounds, dict[str, Any]],
) -> None:
    limit, bounds, how = epoch

    after = after_epoch(limit, bounds, **how)

    assert bounds.first <= after <= bounds.most
    assert after <= 2 * limit
    assert how["reading"] == "literal" or limit / 2 <= after
