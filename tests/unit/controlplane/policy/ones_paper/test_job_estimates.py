"""R under each reading of scale-up, scale-down and resume."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policy.ones_paper.job_estimates import after_epoch, arrival_rate
from controlplane.policy.options import ScaleDown
from controlplane.policy.search.observed_jobs import LimitBounds, resumed
from schemas.ids import Seconds

BOUNDS = LimitBounds(first=64, least=64, most=1024)
LAMBDA = 1 / 30.0


def after(limit: int, reading: ScaleDown, ran_s: float, *, contended: bool = True) -> int:
    return after_epoch(
        limit, BOUNDS, reading, ran_s=ran_s, arrivals_per_s=LAMBDA, contended=contended
    )


@pytest.mark.parametrize(
    ("reading", "limits"),
    [
        # sigma T = 0, 2/3, 1, 5/3, 8/3, 10: the divisor is 1, 2, 2, 3, 4, 11
        ("literal", [256, 256, 256, 171, 128, 64]),
        ("contended", [512, 512, 512, 171, 128, 128]),
        ("composed", [512, 512, 512, 342, 256, 128]),
        ("authors", [256] * 6),
        ("off", [512] * 6),
    ],
)
def test_each_reading_has_its_limit_after_an_epoch(reading: ScaleDown, limits: list[int]) -> None:
    found = [after(256, reading, ran_s) for ran_s in (0.0, 20.0, 30.0, 50.0, 80.0, 300.0)]

    assert found == limits


def test_a_limit_grows_up_to_that_of_the_user() -> None:
    assert after(256, "contended", 300.0, contended=False) == 512
    assert [after(limit, "off", 0.0) for limit in (600, 1024)] == [1024, 1024]


@given(
    reading=st.sampled_from(["literal", "contended", "composed", "authors", "off"]),
    limit=st.integers(64, 1024),
    ran_s=st.floats(0.0, 1e7),
    rate=st.floats(0.0, 100.0),
    contended=st.booleans(),
)
def test_a_limit_stays_within_its_bounds_and_at_most_doubles_or_halves(
    reading: ScaleDown,
    limit: int,
    ran_s: float,
    rate: float,
    contended: bool,  # noqa: FBT001
) -> None:
    new = after_epoch(limit, BOUNDS, reading, ran_s=ran_s, arrivals_per_s=rate, contended=contended)

    assert 64 <= new <= min(1024, 2 * limit)
    assert new <= limit or reading != "literal"
    assert new >= limit / 2 or reading in {"literal", "authors"}
    assert new == min(2 * limit, 1024) or rate or reading in {"literal", "authors"}


def test_a_rejected_job_keeps_half_of_its_limit_down_to_the_floor() -> None:
    to_first = [resumed(limit, BOUNDS) for limit in (512, 128, 101, 64)]
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
    assert arrival_rate([Seconds(at) for at in submitted_at]) == per_s
