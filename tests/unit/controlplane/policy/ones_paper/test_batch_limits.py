"""R under each reading of scale-up, scale-down and resume."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policy.ones_paper.job_estimates import ArrivalRate
from controlplane.policy.search.batch_limits import LimitBounds, ScaleDown, after_epoch, resumed
from schemas.ids import Seconds

BOUNDS = LimitBounds(first=64, least=64, most=1024)
LAMBDA = 1 / 30.0


def after(limit: int, reading: ScaleDown, ran_s: float, *, contended: bool = True) -> int:
    return after_epoch(
        limit, BOUNDS, reading, ran_s=ran_s, arrivals_per_s=LAMBDA, contended=contended
    )


@pytest.mark.parametrize(
    ("reading", "after_20_s", "after_50_s", "after_80_s", "after_300_s"),
    [
        # sigma T = 2/3, 5/3, 8/3, 10: the divisor is 2, 3, 4, 11
        ("literal", 256, 171, 128, 64),
        ("contended", 512, 171, 128, 128),
        ("composed", 512, 342, 256, 128),
        ("authors", 256, 256, 256, 256),
        ("off", 512, 512, 512, 512),
    ],
)
def test_r_after_an_epoch_of_a_job_with_r_256(
    reading: ScaleDown, after_20_s: int, after_50_s: int, after_80_s: int, after_300_s: int
) -> None:
    found = [after(256, reading, ran_s) for ran_s in (20.0, 50.0, 80.0, 300.0)]

    assert found == [after_20_s, after_50_s, after_80_s, after_300_s]


def test_without_anybody_who_waits_the_contended_reading_only_doubles() -> None:
    assert after(256, "contended", 300.0, contended=False) == 512


@given(limit=st.integers(64, 1024), ran_s=st.floats(1e-3, 1e4))
def test_read_literally_r_never_grows(limit: int, ran_s: float) -> None:
    assert after(limit, "literal", ran_s) <= limit


@given(
    reading=st.sampled_from(["literal", "contended", "composed", "authors", "off"]),
    limit=st.integers(64, 1024),
    ran_s=st.floats(0.0, 1e4),
    rate=st.floats(0.0, 1.0),
    contended=st.booleans(),
)
def test_no_reading_more_than_doubles_r_or_leaves_its_bounds(
    reading: ScaleDown,
    limit: int,
    ran_s: float,
    rate: float,
    contended: bool,  # noqa: FBT001
) -> None:
    new = after_epoch(limit, BOUNDS, reading, ran_s=ran_s, arrivals_per_s=rate, contended=contended)

    assert 64 <= new <= min(1024, 2 * limit)


def test_a_job_that_is_rejected_asks_for_half_of_it_down_to_its_floor() -> None:
    to_first = [resumed(limit, BOUNDS) for limit in (512, 128, 100, 64)]
    to_one = [resumed(limit, LimitBounds(first=64, least=1, most=1024)) for limit in (512, 64, 1)]

    assert to_first == [256, 64, 64, 64]
    assert to_one == [256, 32, 1]


@pytest.mark.parametrize(
    ("submitted_at", "per_s"),
    [([], 0.0), ([3.0], 0.0), ([3.0, 3.0], 0.0), ([10.0, 0.0, 5.0], 0.2)],
    ids=["no job", "one job", "one moment", "in any order"],
)
def test_the_arrival_rate_is_the_mean_rate_of_submissions(
    submitted_at: list[float], per_s: float
) -> None:
    rate = ArrivalRate()
    for at in submitted_at:
        rate.add(Seconds(at))

    assert rate.per_s == per_s
