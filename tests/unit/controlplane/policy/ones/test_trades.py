"""Who trades places in a schedule, who steps aside for that, and what it costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from controlplane.policy.api import JobView
from controlplane.policy.ones.evolution import (
    Candidate,
    laid_out,
    present,
    score,
    traded,
    with_places_exchanged,
)
from controlplane.policy.ones.placement import PlacementHints
from controlplane.policy.ones.problem import NO_TRADES, Problem, Trades, YieldMode, trades_between
from controlplane.policy.options import OnesOptions
from schemas.ids import JobId, SlotId
from tests.support.builders import S0, S1, T0, T1, A, B, job_view
from tests.support.sizes import examples
from tests.support.views import pace, problem_of, problems, row_of, surrounded, view_of

FREE = -1
SLOW_FOR_A = [(2.0, 1.0), (1.0, 1.0)]


def cheapest_last(row: int, *_: int) -> tuple[YieldMode, float]:
    return YieldMode.PAUSE, -row


def between(before: list[int], after: list[int]) -> Trades:
    return trades_between(np.array(before), np.array(after), 0, cheapest_last)


def on(job: JobId, *slots: SlotId, **changes: Any) -> JobView:
    """1 or 2 slots, a batch of 64, hours to go."""
    given = {"epoch": 1, "family": "f", "stop_samples": 1_000_000, "slots": (1, 2)}
    held = dict.fromkeys(slots, 64 // len(slots))
    return job_view(job, **{**given, "running_on": held, **changes})


def two_types(*jobs: Any, **options: Any) -> Problem:
    """A is on the slow GPU, and B, which would not mind it, on the fast one."""
    jobs = jobs or (on(A, S0), on(B, T0))
    view = view_of(row_of(*[len(jobs[0].running_on)] * 2), *jobs)
    events = pace("f", 100.0, 180.0)
    problem = problem_of(view, events=events, options=OnesOptions(**options))
    return surrounded(problem, types=(0, 1), slow=SLOW_FOR_A)


def nodes(problem: Problem, found: Candidate) -> list[list[int]]:
    return [problem.node_of[list(found.slots(row))].tolist() for row in problem.rows]


# --- who trades with whom


def test_two_that_take_each_others_slots_trade_places_and_the_cheaper_one_steps_aside() -> None:
    assert between([0, 1], [1, 0]) == Trades(((0, 1),), {1: YieldMode.PAUSE})


def test_a_circle_of_three_needs_one_that_steps_aside_and_two_circles_two() -> None:
    assert between([0, 1, 2], [1, 2, 0]) == Trades(((0, 1, 2),), {2: YieldMode.PAUSE})
    both = Trades(((0, 1), (2, 3)), {3: YieldMode.PAUSE, 1: YieldMode.PAUSE})
    assert between([0, 1, 2, 3], [1, 0, 3, 2]) == both


def test_a_line_behind_a_free_slot_or_behind_one_that_stops_is_no_circle() -> None:
    assert between([0, 1, FREE], [FREE, 0, 1]) == NO_TRADES
    assert between([0, 1], [1, FREE]) == NO_TRADES
    assert between([0, 1, 1], [0, 0, 1]) == NO_TRADES


def test_one_that_starts_where_somebody_leaves_is_in_no_circle() -> None:
    assert between([0, FREE], [1, 0]) == NO_TRADES


def test_who_can_go_on_meanwhile_steps_aside_before_one_that_has_to_pause() -> None:
    problem = two_types(on(A, S0, S1), on(B, T0, T1, start_s=0.1))
    keeps_one = score(problem, problem.present, np.array([0, 1, 1, 0]))
    all_of_it = score(problem, problem.present, np.array([1, 1, 0, 0]))

    assert problem.trades(keeps_one.owner).yields == {1: YieldMode.DETOUR}
    assert problem.trades(all_of_it.owner).yields == {1: YieldMode.PAUSE}


# --- what it costs


def test_one_that_pauses_pays_for_a_start_the_other_one_for_a_move_and_both_for_being_held() -> (
    None
):
    problem = two_types(on(A, S0), on(B, T0, start_s=200.0))

    found = score(problem, problem.present, np.array([1, 0]))

    shares = found.value / problem.value[problem.rows, problem.present]
    paid = shares ** (1.0 / problem.speedup_exponent)
    dear, (held, cheap) = problem.job_rows[1].restart_factor, problem.move_factor
    assert dear < cheap
    assert problem.trades(found.owner).yields == {0: YieldMode.PAUSE}
    assert paid.tolist() == pytest.approx([problem.job_rows[0].restart_factor * held, cheap**2])


def test_places_are_traded_only_where_that_pays() -> None:
    soon_over = {"stop_samples": 3000, "samples_done": 1000, "start_s": 60.0}
    long_ones, short_ones = two_types(), two_types(on(A, S0, **soon_over), on(B, T0, **soon_over))

    found = [with_places_exchanged(each, present(each)) for each in (long_ones, short_ones)]

    assert nodes(long_ones, found[0]) == [[1], [0]]
    assert nodes(short_ones, found[1]) == [[0], [1]]


def test_nobody_trades_places_where_that_is_switched_off() -> None:
    problem = two_types(swaps=False)

    assert with_places_exchanged(problem, present(problem)).key == present(problem).key
    assert traded(problem, present(problem), default_rng(0)) is None
    assert (
        laid_out(problem, present(problem), problem.present, PlacementHints(traders=(0, 1))) is None
    )


def test_for_better_neighbours_nobody_looks_for_a_trade() -> None:
    problem = surrounded(two_types(), costs=[[0.0, 1.0], [1.0, 0.0]])

    assert problem.places_matter
    assert with_places_exchanged(problem, present(problem)).key == present(problem).key
    assert traded(problem, present(problem), default_rng(0)) is None


def test_jobs_that_share_out_their_slots_keep_those_of_nodes_where_both_stay() -> None:
    problem = two_types(on(A, S0, T1), on(B, T0, S1))

    found = laid_out(problem, present(problem), problem.present, PlacementHints(traders=(0, 1)))

    assert found is not None
    assert [found.slots(row) for row in (0, 1)] == [(2, 3), (0, 1)]
    kept = problem.owner == found.owner
    assert kept.tolist() == [False, True, False, True]


# --- whatever the problem


@settings(max_examples=examples(60), deadline=None)
@given(problem=problems(), seed=st.integers(0, 1000))
def test_a_trade_keeps_sizes_moves_only_its_own_jobs_and_an_exchange_is_never_worse(
    problem: Problem, seed: int
) -> None:
    parent, rng = present(problem), default_rng(seed)
    hints = traded(problem, parent, rng)
    found = laid_out(problem, parent, parent.levels, hints) if hints else None
    if hints is not None and found is not None:
        assert all(problem.free_to_move[row] for row in hints.traders)
        before, after = parent.by_row(), found.by_row()
        assert [len(places) for places in before] == [len(places) for places in after]
        others = set(problem.rows.tolist()) - set(hints.traders)
        assert all(before[row] == after[row] for row in others)
        yields = problem.trades(found.owner).yields
        assert set(yields) <= set(hints.traders)
    assert with_places_exchanged(problem, parent).fitness >= parent.fitness
