"""Who slows whom down, and by how much."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.sim.models.interference import (
    DistributedInterference,
    PairwiseInterference,
    parse_interference,
)
from controlplane.sim.simulator_errors import TraceError
from schemas.ids import JobId
from tests.support.simulated import N0, N1, A, B, C

SPREAD = {A, B}


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("none", ("none", 0.0)),
        ("pollux:0.25", ("pollux", 0.25)),
        ("pairwise:0.1", ("pairwise", 0.1)),
        ("pollux:0", ("none", 0.0)),
        ("pairwise", ("none", 0.0)),
    ],
)
def test_a_kind_and_a_share(text: str, meant: tuple[str, float]) -> None:
    assert parse_interference(text) == meant


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gavel:0.1",
        "pollux:1",
        "pollux:-0.1",
        "pollux:nan",
        "pollux:inf",
        "pollux:a",
        "pollux:0.1:2",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(TraceError) as raised:
        parse_interference(text)

    assert repr(text) in str(raised.value)
    assert "pollux:SHARE" in str(raised.value)


@given(st.text(max_size=20))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        kind, share = parse_interference(text)
    except TraceError:
        return
    assert kind in {"none", "pollux", "pairwise"}
    assert 0.0 <= share < 1.0


def test_spread_jobs_slow_each_other_down_once_however_many_meet() -> None:
    rule = DistributedInterference(0.25, SPREAD.__contains__)

    assert rule.remaining_speed(A, {N0: [A, B], N1: [A, B]}) == 0.75
    assert rule.remaining_speed(A, {N0: [A], N1: [A, B]}) == 0.75


def test_jobs_on_one_node_neither_suffer_nor_harm() -> None:
    rule = DistributedInterference(0.25, SPREAD.__contains__)

    assert rule.remaining_speed(A, {N0: [A, C], N1: [A]}) == 1.0
    assert rule.remaining_speed(C, {N0: [A, B, C]}) == 1.0


def family(name: JobId) -> str:
    return str(name)[0]


def test_the_worst_neighbour_counts_and_a_lonely_job_keeps_its_speed() -> None:
    rule = PairwiseInterference(0.3, 1, family)
    one, other = rule.remaining_speed(A, {N0: [A, B]}), rule.remaining_speed(A, {N0: [A, C]})

    assert rule.remaining_speed(A, {N0: [A, B], N1: [A, C]}) == min(one, other)
    assert rule.remaining_speed(A, {N0: [A]}) == 1.0


def test_a_pair_of_families_has_one_loss_whoever_asks_first() -> None:
    rule, late = PairwiseInterference(0.3, 1, family), PairwiseInterference(0.3, 1, family)
    late.remaining_speed(C, {N0: [A, B, C]})

    assert rule.remaining_speed(A, {N0: [A, B]}) == late.remaining_speed(A, {N0: [B, A]})
    assert rule.remaining_speed(A, {N0: [A, B]}) != rule.remaining_speed(B, {N0: [A, B]})
    assert rule.remaining_speed(A, {N0: [A, B]}) != PairwiseInterference(
        0.3, 2, family
    ).remaining_speed(A, {N0: [A, B]})


@given(st.floats(0.0, 0.99), st.integers(0, 99))
def test_a_job_keeps_a_share_of_its_speed(mean: float, seed: int) -> None:
    kept = PairwiseInterference(mean, seed, family).remaining_speed(A, {N0: [A, B, C]})

    assert max(0.1, 1.0 - 2.0 * mean) - 1e-9 <= kept <= 1.0


def test_losses_have_the_mean_that_was_asked_for() -> None:
    losses = [
        1.0 - PairwiseInterference(0.25, seed, family).remaining_speed(A, {N0: [A, B]})
        for seed in range(400)
    ]

    assert sum(losses) / len(losses) == pytest.approx(0.25, abs=0.03)
