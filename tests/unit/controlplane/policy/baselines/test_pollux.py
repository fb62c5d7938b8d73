"""Policy `pollux`: its objective, its search, and its rounds."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.random import default_rng

from controlplane.policy.api import JobView, Policy
from controlplane.policy.baselines.pollux_search import (
    AllocationProblem,
    AllocationSearch,
    power_mean,
    ranked,
    repaired,
)
from controlplane.policy.registry import make
from schemas.epochs import StepTimes
from schemas.ids import JobId, Seconds, node_of
from tests.support.builders import S0, S1, T0, T1, A, B, C, job_view
from tests.support.views import InstantCluster, row_of, steps_seen, view_of

LINEAR = np.arange(9) / 4.0  # speed-up by slots, relative to a fair share of four


def problem(jobs: int = 2, nodes: int = 2, **changes: Any) -> AllocationProblem:
    """Jobs that gain by every slot, and half as much on several nodes; nodes of four slots."""
    usual = {
        "speedups": np.tile(np.stack([LINEAR, LINEAR / 2]), (jobs, 1, 1)),
        "present": np.zeros((jobs, nodes), dtype=np.int16),
        "most": np.full(jobs, 8),
        "least": np.zeros(jobs, dtype=np.int64),
        "kept": np.ones(jobs),
        "slots": np.full(nodes, 4),
        "all_slots": np.full(nodes, 4),
        "shared": np.zeros(nodes, dtype=np.int64),
    }
    return AllocationProblem(**{**usual, **changes})


def states(*rows: list[list[int]]) -> Any:
    return np.array(rows, dtype=np.int16)


# --- objective


def test_the_objective_agrees_with_a_calculation_by_hand() -> None:
    """A fair share of two nodes is half of the slots, i.e. a speed-up of 1/4.

    One node each: harmonic mean of 1/4 and 1/4; both nodes are in use, with speed-ups of 1 and 1.
    Both on node 0: speed-ups 3/4 and 1/4, a quarter of them counts. Alone on both nodes: the other
    job has no speed-up.
    """
    each, together, alone = [[4, 0], [0, 4]], [[3, 0], [1, 0]], [[4, 4], [0, 0]]

    losses = problem().losses(states(each, together, alone))

    means = [0.251, 2 / (1 / 0.1885 + 1 / 0.0635), 2 / (1 / 0.251 + 1 / 0.001)]
    assert losses[:, 0] == pytest.approx([-mean for mean in means])
    assert losses[:, 1] == pytest.approx([-2 / 8, -1 / 4, -1 / 8])


def test_a_changed_placement_keeps_a_part_of_its_speed_up() -> None:
    here = problem(present=states([[4, 0], [0, 4]])[0], kept=np.array([0.5, 0.0]))

    losses = here.losses(states([[4, 0], [0, 4]], [[3, 0], [0, 4]], [[4, 0], [4, 0]]))

    spent = [0.251, 2 / (1 / (0.75 / 4 / 2 + 0.001) + 1 / 0.251), 2 / (1 / 0.251 + 1 / 0.001)]
    assert losses[:, 0] == pytest.approx([-mean for mean in spent])
    assert losses[0, 1] == -0.25  # the utility is that after the restarts


@pytest.mark.parametrize(("power", "mean"), [(-1.0, 1.6), (0.0, 2.0), (1.0, 2.5)])
def test_the_power_mean_of_one_and_four(power: float, mean: float) -> None:
    assert power_mean(np.array([[1.0, 4.0]]), power) == pytest.approx([mean])


# --- search


@pytest.mark.parametrize(
    ("before", "changes", "after"),
    [
        ([[4, 0], [0, 4]], {}, [[4, 0], [0, 4]]),
        ([[2, 1], [1, 2]], {}, [[2, 1], [0, 0]]),
        ([[2, 1], [1, 0]], {}, [[2, 1], [1, 0]]),
        ([[1, 1], [1, 0]], {"shared": np.array([0, 1])}, [[1, 0], [1, 0]]),
        ([[3, 0], [3, 0]], {}, [[3, 0], [1, 0]]),
        ([[3, 0], [0, 1]], {"most": np.array([2, 2])}, [[2, 0], [0, 1]]),
        ([[3, 0], [3, 0]], {"least": np.array([1, 2])}, [[3, 0], [0, 0]]),
        ([[4, 0], [0, 1]], {"slots": np.array([4, 0])}, [[4, 0], [0, 0]]),
    ],
    ids=[
        "valid", "two jobs over both nodes", "one job over both nodes",
        "a node shared with a job that must stay", "too many workers on a node",
        "too many of a job", "below the least", "a node without slots",
    ],
)  # fmt: skip
def test_an_invalid_state_is_repaired(
    before: list[list[int]], changes: dict[str, Any], after: list[list[int]]
) -> None:
    assert repaired(states(before), problem(**changes), default_rng(0))[0].tolist() == after


def test_a_job_above_its_most_slots_loses_workers_on_random_nodes() -> None:
    many = states(*([[[2, 2]]] * 50))

    found = repaired(many, problem(jobs=1, most=np.array([3])), default_rng(0))

    assert {tuple(state[0].tolist()) for state in found} == {(1, 2), (2, 1)}


def test_candidates_are_ranked_by_domination_and_crowding() -> None:
    losses = np.array([[0.0, 4.0], [1.0, 1.0], [4.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 1.0]])

    ranks, crowding = ranked(losses)

    assert ranks.tolist() == [0, 0, 0, 0, 1, 1]
    assert crowding.tolist() == [1e14, 2.0, 1e14, 0.0, 1e14, 1e14]


@pytest.mark.parametrize("seed", range(3))
def test_the_search_finds_the_best_of_all_states(seed: int) -> None:
    drawn = default_rng(seed)
    gains = np.sort(drawn.random((3, 2, 5)), axis=2)
    gains[:, :, 0] = 0.0
    small = problem(
        jobs=3, speedups=gains, most=np.array([4, 2, 3]), slots=np.full(2, 2),
        all_slots=np.full(2, 2), present=states([[1, 0], [0, 1], [0, 0]])[0],
        kept=np.array([0.5, 0.9, 1.0]),
    )  # fmt: skip
    every = np.array(list(itertools.product(range(3), repeat=6)), dtype=np.int16)
    every = every.reshape(-1, 3, 2)
    valid = every[(repaired(every, small, default_rng(0)) == every).all(axis=(1, 2))]

    search = AllocationSearch(small, small.present[None], default_rng(seed))
    search.evolve(30)

    assert small.losses(search.best[None])[0, 0] == small.losses(valid)[:, 0].min()


# --- the policy by example


def elastic(job: JobId, at: float = 0.0, **changes: Any) -> JobView:
    known = {"slots": (1, 8), "batch_limit": 512, "local_limit": 512, **changes}
    return job_view(job, at, **known)


def pollux(**options: Any) -> Policy:
    return make("pollux", {"generations": 20, **options})


def measured(policy: Policy, job: JobId, slots: int, **changes: Any) -> None:
    """Report passes of a job that is n times as fast on n slots of any nodes."""
    for nodes, local in itertools.product((1, 2)[:slots], (64, 128)):
        usual = {"noise_scale": 1e9, "step_times": StepTimes(0.1 + 0.001 * local, 0.0, local, 1)}
        seen = {"slots": slots, "nodes": nodes, "global_batch": slots * local, **usual}
        policy.observe(steps_seen(job, **{**seen, **changes}), Seconds(0.0))


def test_a_job_at_most_doubles_the_slots_on_which_it_was_measured() -> None:
    policy = pollux()
    it = InstantCluster(policy, row_of(4, 4))
    it.submit(elastic(A, -1000.0))
    grown = []
    for now in range(0, 300, 60):
        grown.append(it.sizes(now)[A])
        measured(policy, A, grown[-1])

    assert grown == [1, 2, 4, 8, 8]


def test_two_jobs_that_gain_alike_get_a_node_each() -> None:
    policy = pollux(growth=8.0)
    it = InstantCluster(policy, row_of(4, 4))
    it.submit(elastic(A, -600.0), elastic(B, -600.0))
    for job in (A, B):
        measured(policy, job, 1)

    placed = it.at(0.0)

    assert {len(slots) for slots in placed.values()} == {4}
    assert [len({node_of(slot) for slot in slots}) for slots in placed.values()] == [1, 1]


def test_a_young_job_keeps_its_size_for_a_small_gain() -> None:
    """On two slots of four; two more make it 2 x as fast, and cost it T / (T + 30)."""

    def grown(age: float) -> int:
        policy = pollux()
        measured(policy, A, 2)
        job = elastic(A, -age, running_on={S0: 128, S1: 128})
        return len(policy.plan(view_of(row_of(4), job), Seconds(0.0)).local_batch[A])

    assert (grown(20.0), grown(600.0)) == (2, 4)


def test_jobs_that_arrive_between_rounds_start_in_the_next_round() -> None:
    it = InstantCluster(pollux(), row_of(4))
    it.submit(elastic(A, -600.0))
    it.at(0.0)
    it.submit(elastic(B, 10.0))

    assert (list(it.at(10.0)), it.plans[-1].wake_at) == ([A], 60.0)
    assert it.plans[-1].reasons[B].text == "waits: placements are chosen again in the next round"
    assert set(it.at(60.0)) == {A, B}


def test_a_lost_node_begins_a_round() -> None:
    policy = pollux()
    measured(policy, A, 4)
    it = InstantCluster(policy, row_of(4, 4))
    it.submit(elastic(A, -600.0))
    assert it.sizes(0.0) == {A: 8}

    it.slots = row_of(4)
    it.jobs[A] = elastic(A, -600.0)

    assert it.sizes(10.0) == {A: 4}


def test_batches_follow_the_noise_between_rounds() -> None:
    policy = pollux()
    measured(policy, A, 1, noise_scale=0.01)
    job = elastic(A, running_on={S0: 64})
    view = view_of(row_of(2), job)

    quiet = policy.batches(view, Seconds(30.0))
    measured(policy, A, 1, noise_scale=1e9)

    assert quiet.local_batch == {}
    assert policy.batches(view, Seconds(30.0)).local_batch == {A: {S0: 512}}


@pytest.mark.parametrize(("batch", "restart"), [(2, (A,)), (3, ())])
def test_a_job_restarts_if_it_has_no_sample_for_each_old_and_new_slot(
    batch: int, restart: tuple[JobId, ...]
) -> None:
    """On two nodes it is far slower than on the second one alone; the union has three slots."""
    policy = pollux()
    for nodes, seconds in ((1, 0.1), (2, 100.0)):
        seen = {"slots": 2, "nodes": nodes, "step_times": StepTimes(seconds, seconds / 2, 1, 1)}
        policy.observe(steps_seen(A, **seen), Seconds(0.0))
    limits = {"batch_size": 2, "batch_limit": batch, "slots": (2, 2)}
    job = elastic(A, -6000.0, running_on={S0: 1, T0: 1}, **limits)
    stuck = job_view(C, movable=False, running_on={S1: 64})

    plan = policy.plan(view_of(row_of(2, 2), job, stuck), Seconds(0.0))

    assert plan.local_batch[A].keys() == {T0, T1}
    assert plan.restart == restart
