"""What jobs cost each other on one node."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator, default_rng

from controlplane.policy.ones.problem import InterferenceModel
from controlplane.prediction import FloatArray, IntArray
from tests.support.sizes import examples

NODES, FAMILIES = 3, 2
# Of family 0 and 1; the odd classes are jobs over several nodes.
THETA = np.array(
    [[0.1, 0.0, 0.3, 0.4], [0.0, 0.0, 0.5, 0.0], [0.2, 0.7, 0.0, 0.0], [0.0, 0.6, 0.0, 0.0]]
)


def three(fixed: FloatArray | None = None) -> InterferenceModel:
    """Jobs 0 and 1 of family 0, job 2 of family 1, on two nodes."""
    none = np.zeros((2, 4))
    return InterferenceModel(THETA, np.array([0, 0, 1]), none if fixed is None else fixed)


def kept(where: InterferenceModel, *pairs: tuple[int, int], jobs: int = 3) -> list[float]:
    """Shares of speed if jobs are on these nodes, (job, node)."""
    rows, nodes = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    found = where.kept(rows, nodes, np.bincount(rows, minlength=jobs))
    return [float(share) for share in found]


def test_one_that_has_a_node_to_itself_keeps_its_speed() -> None:
    assert kept(three(), (0, 0), (2, 1)) == [1.0, 1.0, 1.0]
    assert kept(three()) == [1.0, 1.0, 1.0]


def test_jobs_slow_each_other_down_by_what_was_learnt_of_their_families() -> None:
    assert kept(three(), (0, 0), (2, 0)) == pytest.approx([np.exp(-0.3), 1.0, np.exp(-0.2)])
    assert kept(three(), (0, 0), (1, 0)) == pytest.approx([np.exp(-0.1), np.exp(-0.1), 1.0])


def test_of_several_neighbours_the_worst_counts() -> None:
    found = kept(three(), (0, 0), (1, 0), (2, 0))

    assert found == pytest.approx([np.exp(-0.3), np.exp(-0.3), np.exp(-0.2)])


def test_a_job_over_several_nodes_is_another_neighbour_and_the_worst_of_its_nodes_counts() -> None:
    spread = kept(three(), (0, 0), (0, 1), (2, 1))

    assert spread == pytest.approx([np.exp(-0.5), 1.0, np.exp(-0.7)])


def test_a_job_that_nobody_may_move_is_a_neighbour_as_well() -> None:
    fixed = np.zeros((2, 4))
    fixed[1, 3] = 1.0  # of family 1, over several nodes

    assert kept(three(fixed), (0, 0), (1, 1)) == pytest.approx([1.0, np.exp(-0.4), 1.0])


def test_a_node_is_disliked_for_both_sides_of_what_neighbours_would_cost() -> None:
    there = np.array([1, 2]), np.array([0, 1])

    assert three().node_costs(0, *there).tolist() == pytest.approx([0.1 + 0.1, 0.3 + 0.2])
    assert three().node_costs(2, *there).tolist() == pytest.approx([0.2 + 0.3, 0.0])


def test_nobody_dislikes_where_it_is_because_of_itself() -> None:
    assert three().node_costs(1, np.array([1]), np.array([0])).tolist() == [0.0, 0.0]


# --- whatever the schedule


def naive(where: InterferenceModel, on: list[set[int]]) -> list[float]:
    """One job after the other, as the docstring says it."""
    shares = []
    for job, nodes in enumerate(on):
        mine = 2 * where.family[job] + (len(nodes) > 1)
        costs = [0.0]
        for node in nodes:
            costs += [where.log_slowdowns[mine, c] for c in np.flatnonzero(where.fixed[node])]
            costs += [
                where.log_slowdowns[mine, 2 * where.family[other] + (len(theirs) > 1)]
                for other, theirs in enumerate(on)
                if other != job and node in theirs
            ]
        shares.append(float(np.exp(-max(costs))))
    return shares


def drawn(rng: Generator) -> tuple[InterferenceModel, list[set[int]]]:
    jobs = int(rng.integers(1, 6))
    where = InterferenceModel(
        log_slowdowns=rng.random((2 * FAMILIES, 2 * FAMILIES)),
        family=rng.integers(0, FAMILIES, jobs),
        fixed=(rng.random((NODES, 2 * FAMILIES)) < 0.2).astype(np.float64),
    )
    return where, [set(np.flatnonzero(rng.random(NODES) < 0.4).tolist()) for _ in range(jobs)]


def pairs_of(on: list[set[int]]) -> tuple[IntArray, IntArray, IntArray]:
    pairs = [(job, node) for job, nodes in enumerate(on) for node in sorted(nodes)]
    rows, nodes = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return rows, nodes, np.bincount(rows, minlength=len(on))


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 10_000))
def test_all_jobs_at_once_keep_what_each_by_itself_does(seed: int) -> None:
    where, on = drawn(default_rng(seed))

    found = where.kept(*pairs_of(on))

    assert found.tolist() == pytest.approx(naive(where, on))


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_node_where_nobody_is_is_not_disliked(seed: int) -> None:
    where, on = drawn(default_rng(seed))
    on[0] = set()
    rows, nodes, _ = pairs_of(on)

    found = where.node_costs(0, rows, nodes)

    empty = [not any(node in there for there in on) for node in range(NODES)]
    nobody = np.array(empty) & ~where.fixed.any(axis=1)
    assert (found >= 0.0).all()
    assert (found[nobody] == 0.0).all()
