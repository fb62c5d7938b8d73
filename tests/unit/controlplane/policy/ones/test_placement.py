"""Layout of schedules on slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from controlplane.policy.api import JobView, SlotView
from controlplane.policy.ones.evolution import (
    Candidate,
)
from controlplane.policy.ones.placement import NO_HINTS, PlacementHints, lay_out
from controlplane.policy.ones.problem import (
    CLOSED,
    Problem,
    exchanges_slots,
)
from controlplane.policy.options import OnesOptions
from controlplane.prediction import IntArray
from schemas.ids import JobId, SlotId
from tests.support.builders import S0, S1, T0, T1, A, B, changed_job, job_view, slot_view
from tests.support.sizes import examples
from tests.support.views import pace, problem_of, problems, row_of, some_levels, surrounded, view_of

N, P, Q = ([SlotId(f"n{node}/{index}") for index in range(4)] for node in (1, 2, 3))
WHOLE = settings(max_examples=examples(40), deadline=None)
seeds = st.integers(0, 1000)


def a_job(job: JobId, *on: SlotId, **changes: Any) -> JobView:
    """A warm job of 1 to 8 slots."""
    view = job_view(job, slots=(1, 8), epoch=1, running_on=dict.fromkeys(on, 8))
    return changed_job(view, **changes)


def placed(
    problem: Problem, hints: PlacementHints = NO_HINTS, **slots: int
) -> dict[JobId, tuple[SlotId, ...]] | None:
    """Where jobs go if those that are named get so many slots; None if there are not enough."""
    names = [job_row.job.job for job_row in problem.job_rows]
    levels = problem.present.copy()
    for letter, many in slots.items():
        row = next(row for row, name in enumerate(names) if name.startswith(letter))
        levels[row] = problem.sizes[row].tolist().index(many) if many else 0
    owner = lay_out(problem, problem.owner, problem.present, levels, hints)
    if owner is None:
        return None
    return {
        name: tuple(problem.slots[slot] for slot in np.flatnonzero(owner == row))
        for row, name in enumerate(names)
    }


def nodes_of(problem: Problem, owner: IntArray, row: int) -> set[int]:
    return set(problem.node_of[owner == row].tolist())


# --- jobs that grow, shrink and start

LEAVING = msgspec.structs.replace(slot_view(N[0], usable=False), leaving=True)


@pytest.mark.parametrize(
    ("slots", "jobs", "sizes", "expected"),
    [
        (row_of(4, 4), [a_job(A, P[0])], {"a": 2}, {A: (P[0], P[1])}),
        (row_of(1, 4), [a_job(A, N[0])], {"a": 2}, {A: (P[0], P[1])}),
        (row_of(1, 4), [a_job(A, N[0], batch_size=2, batch_limit=2)], {"a": 2}, {A: (N[0], P[0])}),
        (
            row_of(3, 3), [a_job(A, N[0], N[1]), a_job(B, P[0], movable=False)], {"a": 4},
            {A: (N[0], N[1], N[2], P[1])},
        ),
        (row_of(4, 4), [a_job(A, N[0], P[0], P[1], N[1], P[2])], {"a": 3}, {A: (P[0], P[1], P[2])}),
        (
            row_of(4, 4), [a_job(A, N[0], P[0], P[1], N[1], P[2])], {"a": 4},
            {A: (N[0], P[0], P[1], P[2])},
        ),
        (row_of(4, 2, 1), [a_job(A)], {"a": 1}, {A: (Q[0],)}),
        (row_of(2, 3), [a_job(A, least=4)], {"a": 4}, {A: (N[0], P[0], P[1], P[2])}),
        (
            row_of(2, 3), [a_job(A, N[0]), a_job(B)], {"a": 2, "b": 1},
            {A: (P[0], P[1]), B: (N[1],)},
        ),
        (
            row_of(2, 2), [a_job(A, N[0]), a_job(B)], {"a": 2, "b": 1},
            {A: (N[0], N[1]), B: (P[0],)},
        ),
        (
            row_of(2, 3), [a_job(A), a_job(B, least=2)], {"a": 1, "b": 2},
            {A: (P[0],), B: (N[0], N[1])},
        ),
        (
            row_of(3), [a_job(A, N[0], N[1], N[2]), a_job(B)], {"a": 2, "b": 1},
            {A: (N[0], N[1]), B: (N[2],)},
        ),
        ([LEAVING, slot_view(N[1])], [a_job(A)], {"a": 1}, {A: (N[1],)}),
        ([LEAVING, slot_view(P[0]), slot_view(P[1])], [a_job(A)], {"a": 1}, {A: (P[0],)}),
        (row_of(1), [a_job(A), a_job(B)], {"a": 1, "b": 1}, None),
    ],
    ids=[
        "a growing job takes slots on its node",
        "a job that outgrows its node moves to a node with room",
        "too few samples for both places: it stays on its node",
        "no node has room: the rest is on another node",
        "a shrinking job keeps the node with most of its slots",
        "a shrinking job keeps whole nodes first",
        "a small job goes to the fullest node",
        "a job larger than any node starts with the emptiest",
        "a start precedes growth",
        "a job of a whole node precedes other jobs",
        "a larger start precedes a smaller one",
        "freed slots are available to other jobs",
        "free slots of a node precede leaving ones",
        "a start prefers a free slot on another node to a leaving one",
        "too few slots",
    ],
)  # fmt: skip
def test_changed_jobs_are_laid_out_closely(
    slots: list[SlotView],
    jobs: list[JobView],
    sizes: dict[str, int],
    expected: dict[JobId, tuple[SlotId, ...]] | None,
) -> None:
    assert placed(problem_of(view_of(slots, *jobs)), **sizes) == expected


# --- jobs that move


@pytest.mark.parametrize(
    ("nodes", "jobs", "jitter", "expected"),
    [
        ((2, 4), [a_job(A, N[0], P[0]), a_job(B, N[1])], None, {A: (P[0], P[1]), B: (N[1],)}),
        ((2, 2), [a_job(A, N[0], N[1])], None, {A: (N[0], N[1])}),
        ((2, 2, 2), [a_job(A, N[0], N[1])], [0.2, 0.1, 0.0], {A: (Q[0], Q[1])}),
    ],
    ids=["brought together, keeps a slot", "no better place", "node of least cost"],
)
def test_a_moving_job_goes_to_few_nodes_of_least_cost(
    nodes: tuple[int, ...],
    jobs: list[JobView],
    jitter: list[float] | None,
    expected: dict[JobId, tuple[SlotId, ...]],
) -> None:
    problem = problem_of(view_of(row_of(*nodes), *jobs))
    costs = None if jitter is None else np.array(jitter)

    assert placed(problem, PlacementHints(movers=(0,), jitter=costs)) == expected


def test_a_job_goes_to_its_fast_gpus_although_another_node_fits_better() -> None:
    problem = problem_of(view_of(row_of(2, 1), a_job(A)))

    slower = surrounded(problem, types=(0, 1), slow=[(1.0, 2.0)])

    assert placed(problem, a=1) == {A: (P[0],)}
    assert placed(slower, a=1) == {A: (N[0],)}


# --- whatever the problem


def laid(problem: Problem, levels: IntArray, hints: PlacementHints = NO_HINTS) -> IntArray:
    owner = lay_out(problem, problem.owner, problem.present, levels, hints)
    assert owner is not None
    return owner


def any_wishes(problem: Problem, seed: int) -> PlacementHints:
    rng = default_rng(seed)
    movers = np.flatnonzero(problem.free_to_move & (rng.random(len(problem.job_rows)) < 0.5))
    jitter = rng.normal(0.0, 0.2, len(problem.slots_on)) if rng.random() < 0.5 else None
    return PlacementHints(tuple(movers.tolist()), jitter=jitter)


@WHOLE
@given(problem=problems(), seed=seeds)
def test_every_job_gets_its_size_and_closed_slots_stay_closed(problem: Problem, seed: int) -> None:
    """From the schedule in force, and from there to the next."""
    hints = any_wishes(problem, seed)
    first = some_levels(problem, seed)
    owner = laid(problem, first, hints)
    levels = some_levels(problem, seed + 1)

    further = lay_out(problem, owner, first, levels, hints)

    assert further is not None
    for found, wanted in ((owner, first), (further, levels)):
        assert ((found == CLOSED) == (problem.owner == CLOSED)).all()
        assert found.max(initial=-1) < len(levels)
        sizes = np.bincount(found[found >= 0], minlength=len(levels))
        assert sizes.tolist() == problem.sizes[problem.rows, wanted].tolist()


@WHOLE
@given(problem=problems(), seed=seeds)
def test_unchanged_jobs_stay_and_shrinking_jobs_keep_own_slots(problem: Problem, seed: int) -> None:
    levels = some_levels(problem, seed)

    owner = laid(problem, levels)

    for row in np.flatnonzero(levels == problem.present).tolist():
        assert (owner == row).tolist() == (problem.owner == row).tolist()
    for row in np.flatnonzero(levels < problem.present).tolist():
        assert (problem.owner[owner == row] == row).all()


@WHOLE
@given(problem=problems(), seed=seeds)
def test_a_growing_job_uses_its_nodes_first_or_moves_to_fewer(problem: Problem, seed: int) -> None:
    for row in np.flatnonzero(problem.present).tolist():
        levels = problem.present.copy()
        levels[row] = some_levels(problem, seed)[row]
        more = problem.sizes[row, levels[row]] - problem.sizes[row, problem.present[row]]
        if not 0 < more <= (problem.owner == -1).sum():
            continue

        owner = laid(problem, levels)

        mine, now = nodes_of(problem, problem.owner, row), nodes_of(problem, owner, row)
        if (owner[problem.owner == row] == row).all():
            free = set(problem.node_of[owner == -1].tolist())
            assert now == mine or not mine & free
        else:
            rooms = {node: (problem.owner[problem.slots_on[node]] == -1).sum() for node in mine}
            assert len(now) < len(mine) or sum(rooms.values()) < more
            assert problem.free_to_move[row]


@WHOLE
@given(problem=problems(), seed=seeds)
def test_a_shrinking_job_keeps_the_fewest_nodes(problem: Problem, seed: int) -> None:
    levels = some_levels(problem, seed)

    owner = laid(problem, levels)

    for row, job_row in enumerate(problem.job_rows):
        many = np.bincount(problem.node_of[list(job_row.now)].astype(int), minlength=1)
        size = int((owner == row).sum())
        if 0 < size < len(job_row.now):
            fewest = int(np.searchsorted(np.cumsum(np.sort(many)[::-1]), size)) + 1
            assert len(nodes_of(problem, owner, row)) == fewest


@WHOLE
@given(taken=st.lists(st.booleans(), min_size=12, max_size=12), wide=st.integers(1, 3))
def test_a_start_of_whole_nodes_gets_free_nodes(taken: Sequence[bool], wide: int) -> None:
    slots = row_of(4, 4, 4)
    others = [
        a_job(JobId(f"x-{place}"), slot.slot, movable=False)
        for place, (slot, busy) in enumerate(zip(slots, taken, strict=True))
        if busy
    ]
    problem = problem_of(view_of(slots, a_job(A, least=4 * wide, most=12), *others))
    whole = sum(not any(taken[4 * node : 4 * node + 4]) for node in range(3))
    if whole < wide:
        return

    owner = laid(problem, np.array([1]))

    assert len(nodes_of(problem, owner, 0)) == wide


@WHOLE
@given(problem=problems(), seed=seeds)
def test_a_moving_job_keeps_its_size_on_no_more_nodes(problem: Problem, seed: int) -> None:
    movers = np.flatnonzero(problem.free_to_move)
    if not len(movers) or problem.places_matter:
        return
    row = int(movers[seed % len(movers)])

    owner = laid(problem, problem.present, PlacementHints(movers=(row,)))

    assert (owner == row).sum() == (problem.owner == row).sum()
    before, after = nodes_of(problem, problem.owner, row), nodes_of(problem, owner, row)
    assert len(after) <= len(before)
    others = (problem.owner >= 0) & (problem.owner != row)
    assert (owner[others] == problem.owner[others]).all()


FREE = -1
SLOW_FOR_A = [(2.0, 1.0), (1.0, 1.0)]


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


# --- exchanges


@pytest.mark.parametrize(
    ("before", "after", "exchanges"),
    [
        ([0, 1], [1, 0], True),
        ([0, 1, 2], [1, 2, 0], True),
        ([0, 1, FREE], [FREE, 0, 1], False),
        ([0, 1], [1, FREE], False),
        ([0, 1, 1], [0, 0, 1], False),
        ([0, FREE], [1, 0], False),
    ],
    ids=["pair", "three", "free slot", "a job stops", "a job shrinks", "a job starts"],
)
def test_jobs_that_take_each_others_slots_in_a_circle_exchange_them(
    *, before: list[int], after: list[int], exchanges: bool
) -> None:
    assert exchanges_slots(np.array(before), np.array(after)) is exchanges


def test_a_layout_in_which_jobs_exchange_slots_is_barred() -> None:
    problem = two_types(on(A, S0, S1), on(B, T0, T1))

    assert problem.has_barred_move(np.array([1, 1, 0, 0]))
    assert not problem.has_barred_move(problem.owner)
