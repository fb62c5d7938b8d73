"""Rounds of policy `drl`, action by action."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from controlplane.policy.learned.drl import (
    CLUSTER_INPUTS,
    JOB_INPUTS,
    DecisionInput,
    DecisionRound,
    JobTable,
    read_actor_model,
)
from tests.support.sizes import examples

MORE_A, FEWER_A, SAME_A, MORE_B, FEWER_B, SAME_B, END = range(7)


def table(have: Sequence[int], least: Sequence[int], cap: Sequence[int], room: int) -> JobTable:
    """Jobs that are as fast on any number of slots, with one step left."""
    many = len(have)
    return JobTable(
        have=np.array(have, dtype=np.int64),
        least=np.array(least, dtype=np.int64),
        cap=np.array(cap, dtype=np.int64),
        wanted=np.ones(many, dtype=np.int64),
        batch=np.full(many, 8, dtype=np.int64),
        coefficients=np.tile([0.0, 1.0, 0.0, 0.0], (many, 1)),
        steps_left=np.ones(many),
        known=np.ones(many, dtype=np.bool_),
        age_s=np.zeros(many),
        still_s=np.zeros(many),
        room=room,
    )


def played(
    jobs: JobTable, actions: Sequence[int], *, one_job: bool = False, preempt: bool = False
) -> tuple[list[int], list[list[int]]]:
    """Return the sizes after these actions, and the legal ones before each of them."""
    left, legal = list(actions), []

    def choose(moment: DecisionInput) -> int:
        legal.append(np.flatnonzero(moment.legal).tolist())
        return left.pop(0)

    sizes = DecisionRound(jobs, one_job=one_job, preempt=preempt).run(choose).tolist()
    assert not left
    return sizes, legal


@pytest.mark.parametrize(
    ("jobs", "actions", "rules", "sizes", "legal"),
    [
        (
            table([2, 0], [1, 2], [4, 3], room=5), [MORE_B, MORE_B, END], {}, [2, 3],
            [[MORE_B], [MORE_A, FEWER_A, SAME_A, MORE_B, SAME_B, END], [FEWER_A, SAME_A, END]],
        ),
        (
            table([2, 0], [1, 4], [4, 4], room=5), [SAME_A], {}, [2, 0],
            [[MORE_A, FEWER_A, SAME_A, END]],
        ),
        (
            table([3, 1], [1, 1], [4, 4], room=6), [FEWER_A, END], {"one_job": True}, [2, 1],
            [[MORE_A, FEWER_A, SAME_A, MORE_B, SAME_B, END], [FEWER_A, SAME_A, END]],
        ),
        (table([2, 0], [2, 2], [2, 2], room=2), [], {}, [2, 0], []),
        (
            table([2, 0], [2, 2], [2, 2], room=2), [FEWER_A, MORE_B], {"preempt": True}, [0, 2],
            [[FEWER_A, SAME_A, END], [MORE_B]],
        ),
    ],
    ids=[
        "a start, then slot by slot", "a settled job has no action", "one job in its direction",
        "no running job is stopped", "except with preempt",
    ],
)  # fmt: skip
def test_legal_actions_of_a_round(
    jobs: JobTable, actions: list[int], rules: dict[str, bool], sizes: Any, legal: Any
) -> None:
    assert played(jobs, actions, **rules) == (sizes, legal)


def test_a_round_begins_with_a_start_where_a_waiting_job_fits() -> None:
    jobs = table([0, 0, 0], [1, 2, 5], [4, 4, 5], room=3)

    sizes, legal = played(jobs, [MORE_B, END + 3])

    assert (sizes, legal[0]) == ([0, 2, 0], [MORE_A, MORE_B])


@st.composite
def tables(draw: st.DrawFn) -> JobTable:
    row = st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(0, 4))
    rows = draw(st.lists(row, min_size=1, max_size=6))
    least = [low for low, _, _ in rows]
    cap = [low + more for low, more, _ in rows]
    have = [min(low + more, low + grown) if grown else 0 for low, more, grown in rows]
    return table(have, least, cap, room=sum(have) + draw(st.integers(0, 6)))


@pytest.mark.parametrize("one_job", [False, True])
@settings(max_examples=examples(60), deadline=None)
@given(jobs=tables(), seed=st.integers(0, 99), preempt=st.booleans())
def test_every_round_ends_within_bounds(
    *, one_job: bool, jobs: JobTable, seed: int, preempt: bool
) -> None:
    rng, asked = default_rng(seed), []

    def choose(moment: DecisionInput) -> int:
        assert moment.jobs.shape == (len(jobs.have), JOB_INPUTS)
        assert moment.cluster.shape == (CLUSTER_INPUTS,)
        assert np.isfinite(moment.jobs).all()
        assert np.isfinite(moment.cluster).all()
        asked.append(moment)
        return int(rng.choice(np.flatnonzero(moment.legal)))

    sizes = DecisionRound(jobs, one_job=one_job, preempt=preempt).run(choose)

    assert len(asked) <= 3 * int(jobs.cap.sum()) + len(sizes) + 1
    assert sizes.sum() <= jobs.room
    assert all(
        size == 0 or least <= size <= most
        for size, least, most in zip(sizes, jobs.least, jobs.cap, strict=True)
    )
    if not preempt:
        assert all(size > 0 for size, had in zip(sizes, jobs.have, strict=True) if had)
    if one_job:
        assert (sizes != jobs.have).sum() <= 1


def test_two_models_are_shipped() -> None:
    papers, ours = read_actor_model(None), read_actor_model("shortest-first")

    assert papers.card.figures["jct_vs_heuristic"] != ours.card.figures["jct_vs_heuristic"]
    assert papers.arrays.keys() == ours.arrays.keys()
