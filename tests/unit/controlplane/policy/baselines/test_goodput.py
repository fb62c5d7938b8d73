"""Policy `goodput`."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policy.api import JobEnded, JobView, Policy
from controlplane.policy.baselines.goodput import JobBounds, best_sizes, goodput_table, utilities
from controlplane.policy.registry import make
from controlplane.prediction.throughput import Sample, SpeedModel, fit
from schemas.ids import JobId, Seconds, node_of
from tests.support.builders import S0, S1, T0, A, B, C, job_view
from tests.support.sizes import examples
from tests.support.views import InstantCluster, epoch_seen, row_of, steps_seen, view_of

BOUNDS = JobBounds(first_batch=64, batch_limit=512, local_limit=128, most=8, widest=4)
STEP = SpeedModel(compute=(0.1, 0.001), known=True)  # seconds: 0.1 + 0.001 for each sample


def elastic(job: JobId, at: float = 0.0, **changes: Any) -> JobView:
    known = {"slots": (1, 8), "batch_limit": 512, "local_limit": 128, **changes}
    return job_view(job, at, **known)


def goodput(**options: Any) -> Policy:
    return make("goodput", options)


def perfect(policy: Policy, job: JobId) -> None:
    """Report that n slots make the job n times as fast."""
    for slots, batch in itertools.product((1, 2, 4, 8), (64, 128, 256, 512)):
        speed = batch / (0.1 + 0.001 * batch / slots)
        seen = epoch_seen(
            job, slots=slots, nodes=1 + (slots > 4), global_batch=batch, samples_per_s=speed
        )
        policy.observe(seen, Seconds(0.0))


# --- what sizes are worth


@pytest.mark.parametrize(
    ("changes", "noise", "batches"),
    [
        ({}, 1e9, [128, 256, 256, 512, 512, 512, 512, 512]),
        ({}, 0.0, [64] * 8),
        ({"local_limit": 32, "most": 4}, 1e9, [0, 64, 64, 128]),
        ({"local_limit": 1, "most": 4}, 0.0, [0] * 4),
        ({"first_batch": 2, "batch_limit": 4, "most": 6}, 0.0, [2, 2, 4, 4, 0, 0]),
    ],
    ids=["a noisy gradient", "no noise", "no batch on one slot", "no batch", "too many slots"],
)
def test_the_best_batch_at_each_size(
    changes: dict[str, int], noise: float, batches: list[int]
) -> None:
    assert goodput_table(STEP, replace(BOUNDS, **changes), noise, 1).batches.tolist() == batches


def test_goodput_on_one_slot_agrees_with_a_calculation_by_hand() -> None:
    """Batch 64: 64 / 0.164 s = 390; batch 128: 128 / 0.228 s (64 + 64) / (64 + 128) = 374.

    With a limit of 32 samples per slot two slots are the fewest: speed-ups are relative to them.
    """
    tight = goodput_table(STEP, replace(BOUNDS, local_limit=32, most=4), 1e9, 1)
    none = goodput_table(STEP, replace(BOUNDS, local_limit=1, most=4), 0.0, 1)
    fitted = fit([Sample(1, 1, 64.0, 0.164), Sample(1, 1, 128.0, 0.228)], 64)
    table = goodput_table(STEP, BOUNDS, 64.0, 1)

    assert (tight.fewest, tight.speedups[[0, 1]].tolist()) == (2, [0.0, 1.0])
    assert tight.speedups[3] == tight.goodputs[3] / tight.goodputs[1]
    assert none.speedups.tolist() == [0.0] * 4
    assert table.batches[0] == 64
    assert table.goodputs[0] == pytest.approx(64 / 0.164)
    assert goodput_table(fitted, BOUNDS, 64.0, 1).goodputs[0] == pytest.approx(64 / 0.164, rel=0.05)


@pytest.mark.parametrize(
    ("power", "value"),
    [(-1.0, [-1000.0, -1.0, -0.5]), (1.0, [0.001, 1.0, 2.0]), (0.0, [-6.9078, 0.0, 0.6931])],
)
def test_utilities_rank_like_the_power_mean(power: float, value: list[float]) -> None:
    assert utilities(np.array([0.0, 1.0, 2.0]), power) == pytest.approx(np.array(value), abs=1e-4)


@settings(max_examples=examples(150), deadline=None)
@given(
    room=st.integers(0, 8),
    gains=st.lists(st.lists(st.integers(0, 50), max_size=5), min_size=1, max_size=4),
)
def test_the_best_sizes_fit_and_are_optimal_if_further_slots_are_worth_less(
    room: int, gains: list[list[int]]
) -> None:
    falling = [
        np.cumsum([0.0, *sorted((gain + 0.5 for gain in row), reverse=True)]) for row in gains
    ]
    anything = [np.array([0.0, *row]) for row in gains]

    for value, share in ((falling, 1.0), (anything, 0.5)):
        every = itertools.product(*(range(len(row)) for row in value))
        best = max(_total(value, chosen) for chosen in every if sum(chosen) <= room)
        chosen = best_sizes(value, room)
        assert sum(chosen) <= room
        assert best + 1e-9 >= _total(value, chosen) >= share * best - 1e-9


def _total(value: list[Any], chosen: Any) -> float:
    return float(sum(row[size] for row, size in zip(value, chosen, strict=True)))


# --- by example


def test_a_job_at_most_doubles_in_each_round() -> None:
    policy = goodput(rescale_stall_s=0.0)
    perfect(policy, A)
    it = InstantCluster(policy, row_of(4, 4))
    it.submit(elastic(A, noise_scale=1e9))

    grown = [it.sizes(60.0 * number)[A] for number in range(5)]

    assert grown == [1, 2, 4, 8, 8]
    assert sum(it.jobs[A].running_on.values()) == 512
    fresh = goodput()
    perfect(fresh, A)
    start = fresh.plan(view_of(row_of(4), elastic(A, local_limit=32)), Seconds(0.0))
    assert start.local_batch == {A: {S0: 32, S1: 32}}
    assert start.reasons[A].text.endswith("expected: 1.00 x the goodput of 2 slots, with batch 64")


def test_equal_jobs_share_the_slots_with_a_new_job() -> None:
    policy = goodput(rescale_stall_s=0.0)
    it = InstantCluster(policy, row_of(4, 4))
    names = [JobId(f"j-{number}") for number in range(3)]
    for name in names:
        perfect(policy, name)
    it.submit(*(elastic(name, noise_scale=1e9) for name in names[:2]))
    for number in range(4):
        placed = it.sizes(60.0 * number)
    assert placed == dict.fromkeys(names[:2], 4)

    it.submit(elastic(names[2], 240.0, noise_scale=1e9))

    assert it.sizes(240.0)[names[2]] == 1
    assert sorted(it.sizes(300.0).values()) == [2, 3, 3]


def test_between_rounds_sizes_hold_and_new_jobs_start_on_idle_slots() -> None:
    """A round of jobs that are as old as A lasts a minute."""
    it = InstantCluster(goodput(), row_of(2))
    it.submit(elastic(A, -1000.0, slots=(1, 1)))
    it.at(0.0)
    it.submit(elastic(B, 10.0), elastic(C, 11.0))

    assert it.sizes(12.0) == {A: 1, B: 1}
    assert it.plans[-1].reasons[C].text == "waits: sizes are chosen again in the next round"
    it.end(A)
    assert it.sizes(13.0) == {B: 1, C: 1}
    it = InstantCluster(goodput(starts="rounds", age_share=0.0), row_of(4))  # as published
    it.submit(elastic(A))
    it.at(0.0)
    it.submit(elastic(B, 10.0))
    assert (it.sizes(10.0), it.plans[-1].wake_at) == ({A: 1}, 60.0)
    assert it.plans[-1].reasons[B].text == "waits: sizes are chosen again in the next round"
    assert B in it.at(60.0)


def test_rounds_of_young_jobs_last_seconds() -> None:
    """Alone on four slots: rounds at 0, 1, 2 and 3 s; a change costs a second."""
    policy = goodput()
    perfect(policy, A)
    it = InstantCluster(policy, row_of(4))
    it.submit(elastic(A, noise_scale=1e9))
    it.at(0.0)
    grown = {0.0: 1}
    while len(it.jobs[A].running_on) < 4 and it.now < 60.0:
        wake_at = it.plans[-1].wake_at
        assert wake_at is not None
        grown[wake_at] = it.sizes(wake_at)[A]

    assert max(grown) < 15.0
    assert sorted(set(grown.values())) == [1, 2, 4]


def test_a_young_job_keeps_its_size_for_a_small_gain() -> None:
    """On two slots of four; two more make it 2 x as fast, and cost it (T - 30) / (T + 30)."""

    def grown(age: float) -> int:
        policy = goodput(moves="restart")
        perfect(policy, A)
        job = elastic(A, -age, noise_scale=1e9, running_on={S0: 128, S1: 128})
        plan = policy.plan(view_of(row_of(4), job), Seconds(0.0))
        return len(plan.local_batch[A])

    assert (grown(60.0), grown(600.0)) == (2, 4)


def test_a_spread_job_moves_to_fewer_nodes_if_that_pays() -> None:
    """It is 4 x slower on two nodes; once it is old, a move costs next to nothing."""

    def nodes_at(age: float) -> set[str]:
        policy = goodput(growth=1.0, moves="restart")
        for nodes in (1, 2):
            speed = 400.0 / nodes**2
            seen = epoch_seen(A, slots=2, nodes=nodes, global_batch=128, samples_per_s=speed)
            policy.observe(seen, Seconds(0.0))
        job = elastic(A, -age, running_on={S0: 64, T0: 64})
        plan = policy.plan(view_of(row_of(2, 2), job), Seconds(0.0))
        return {node_of(slot) for slot in plan.local_batch[A]}

    assert (len(nodes_at(10.0)), len(nodes_at(6000.0))) == (2, 1)


@pytest.mark.parametrize(("batch", "then"), [(64, 128), (120, 120), (128, 128)])
def test_a_batch_changes_only_for_more_than_the_margin(batch: int, then: int) -> None:
    policy = goodput(growth=1.0)
    perfect(policy, A)
    job = elastic(A, noise_scale=1e9, running_on={S0: batch})

    plan = policy.plan(view_of(row_of(1), job), Seconds(0.0))

    assert plan.local_batch == {A: {S0: then}}
    assert [reason.code for reason in plan.reasons.values()] == ["batch"] * (batch != then)


def tell(policy: Policy, *noise_scales: float | None) -> None:
    """Report noise scales of A, without a speed."""
    for noise_scale in noise_scales:
        seen = steps_seen(A, samples_per_s=0.0, noise_scale=noise_scale)
        policy.observe(seen, Seconds(0.0))


def noise_of(policy: Policy, job: JobView) -> float:
    """Noise scale in the reason of the start."""
    plan = policy.plan(view_of(row_of(1), job), Seconds(0.0))
    return plan.reasons[job.job].numbers["noise_scale"]


def test_the_noise_scale_comes_from_telemetry_then_from_epochs() -> None:
    silent, heard, between, nonsense = (goodput() for _ in range(4))
    tell(silent, None)
    tell(heard, 1000.0)
    tell(between, 1000.0, 2000.0)
    tell(nonsense, 1000.0, None, float("nan"), float("inf"), 0.0, -1.0)

    job = elastic(A, noise_scale=50.0)  # of its epochs
    assert noise_of(silent, job) == 50.0
    assert noise_of(heard, job) == 1000.0
    assert noise_of(between, job) == pytest.approx(1000.0 * 2.0**0.3)
    assert noise_of(nonsense, job) == 1000.0
    assert noise_of(goodput(noise_scale_prior=3.0), elastic(A)) == 3.0 * 64
    family = goodput(share_family=True)
    tell(family, 1000.0)
    assert noise_of(family, elastic(B, noise_scale=50.0)) == 50.0  # another job
    heard.observe(JobEnded(job=A, family="", samples_done=64, succeeded=True), Seconds(1.0))
    assert noise_of(heard, job) == 50.0  # a new job of that name


@pytest.mark.parametrize("share", [False, True])
def test_speeds_of_relatives_count_only_with_share_family(share: bool) -> None:  # noqa: FBT001
    """A is slower on two slots; without its reports B is expected to gain from them."""
    policy = goodput(share_family=share)
    for slots in (1, 2):
        seen = epoch_seen(A, family="f", slots=slots, samples_per_s=100.0 / slots)
        policy.observe(seen, Seconds(0.0))
    job = elastic(B, -1e6, family="f", noise_scale=0.0, running_on={S0: 64})

    plan = policy.plan(view_of(row_of(2), job), Seconds(0.0))

    assert len(plan.local_batch[B]) == (1 if share else 2)
