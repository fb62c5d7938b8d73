"""Goodput: sizes and batches together."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policy.api import EpochSeen, JobEnded, JobView, Policy, StepsSeen
from controlplane.policy.baselines.goodput import JobBounds, best_sizes, goodput_table, utilities
from controlplane.policy.registry import make
from controlplane.prediction.throughput import Sample, SpeedModel, fit
from schemas.errors import SettingsError
from schemas.ids import JobId, Seconds, SlotId, node_of
from tests.support.builders import S0, S1, T0, A, B, C, job_view
from tests.support.sizes import examples
from tests.support.views import InstantCluster, row_of, view_of

BOUNDS = JobBounds(first_batch=64, batch_limit=512, local_limit=128, most=8, widest=4)
STEP = SpeedModel(compute=(0.1, 0.001), known=True)  # seconds: 0.1 + 0.001 for each sample


def elastic(job: JobId, at: float = 0.0, **changes: Any) -> JobView:
    known = {"slots": (1, 8), "batch_limit": 512, "local_limit": 128, **changes}
    return job_view(job, at, **known)


def goodput(**options: Any) -> Policy:
    return make("goodput", options)


def perfect(policy: Policy, job: JobId, family: str = "") -> None:
    """It was seen that n slots make the job n times as fast."""
    for slots, batch in itertools.product((1, 2, 4, 8), (64, 128, 256, 512)):
        event = EpochSeen(
            job=job,
            family=family,
            slots=slots,
            nodes=1 + (slots > 4),
            global_batch=batch,
            samples_per_s=batch / (0.1 + 0.001 * batch / slots),
            whole=True,
        )
        policy.observe(event, Seconds(0.0))


def sizes(placed: dict[JobId, list[SlotId]]) -> dict[JobId, int]:
    return {name: len(slots) for name, slots in placed.items()}


# --- what sizes are worth


def test_a_noisy_gradient_makes_the_largest_batches_best() -> None:
    table = goodput_table(STEP, BOUNDS, 1e9, 1)

    assert table.batches.tolist() == [128, 256, 256, 512, 512, 512, 512, 512]


def test_without_noise_a_larger_batch_is_worth_nothing() -> None:
    assert set(goodput_table(STEP, BOUNDS, 0.0, 4).batches.tolist()) == {64}


def test_speed_ups_of_a_batch_that_fits_no_single_slot_are_over_the_fewest_that_it_fits() -> None:
    """64 samples, 32 of which fit a slot: none on one, 64 on two, 128 on four."""
    table = goodput_table(STEP, replace(BOUNDS, local_limit=32, most=4), 1e9, 1)

    assert (table.fewest, table.batches.tolist()) == (2, [0, 64, 64, 128])
    assert table.speedups[:2].tolist() == [0.0, 1.0]
    assert table.speedups[3] == table.goodputs[3] / table.goodputs[1]


def test_a_batch_that_fits_no_number_of_slots_is_worth_nothing_on_any() -> None:
    table = goodput_table(STEP, replace(BOUNDS, local_limit=1, most=4), 0.0, 1)

    assert (table.batches.tolist(), table.speedups.tolist()) == ([0] * 4, [0.0] * 4)


def test_goodput_on_one_slot_worked_out_by_hand() -> None:
    """Batch 64: 64 / 0.164 s = 390; batch 128: 128 / 0.228 s (64 + 64) / (64 + 128) = 374."""
    table = goodput_table(STEP, BOUNDS, 64.0, 1)

    assert table.batches[0] == 64
    assert table.goodputs[0] == pytest.approx(64 / 0.164)


def test_a_size_that_no_batch_goes_with_is_not_offered() -> None:
    tight = JobBounds(first_batch=2, batch_limit=4, local_limit=4, most=6, widest=6)

    assert (goodput_table(STEP, tight, 1.0, 1).batches > 0).tolist() == [True] * 4 + [False] * 2


@pytest.mark.parametrize(
    ("power", "value"),
    [(-1.0, [-1000.0, -1.0, -0.5]), (1.0, [0.001, 1.0, 2.0]), (0.0, [-6.9078, 0.0, 0.6931])],
)
def test_utilities_rank_as_the_mean_of_that_power(power: float, value: list[float]) -> None:
    assert utilities(np.array([0.0, 1.0, 2.0]), power) == pytest.approx(np.array(value), abs=1e-4)


@settings(max_examples=examples(150), deadline=None)
@given(
    room=st.integers(0, 8),
    gains=st.lists(st.lists(st.integers(0, 50), max_size=5), min_size=1, max_size=4),
)
def test_the_best_sizes_are_those_of_all_if_further_slots_are_worth_less(
    room: int, gains: list[list[int]]
) -> None:
    value = [
        np.cumsum([0.0, *sorted((value + 0.5 for value in row), reverse=True)]) for row in gains
    ]
    every = itertools.product(*(range(len(row)) for row in value))
    best = max(_total(value, chosen) for chosen in every if sum(chosen) <= room)

    chosen = best_sizes(value, room)

    assert sum(chosen) <= room
    assert _total(value, chosen) == pytest.approx(best)


@settings(max_examples=examples(150), deadline=None)
@given(
    room=st.integers(0, 8),
    value=st.lists(st.lists(st.integers(0, 50), max_size=5), min_size=1, max_size=4),
)
def test_the_best_sizes_fit_and_are_at_least_half_as_good_as_can_be(
    room: int, value: list[list[int]]
) -> None:
    tables = [np.array([0.0, *row]) for row in value]
    every = itertools.product(*(range(len(row)) for row in tables))
    best = max(_total(tables, chosen) for chosen in every if sum(chosen) <= room)

    chosen = best_sizes(tables, room)

    assert sum(chosen) <= room
    assert _total(tables, chosen) >= best / 2


def _total(value: list[Any], chosen: Any) -> float:
    return float(sum(row[size] for row, size in zip(value, chosen, strict=True)))


# --- by example


def test_a_job_grows_to_twice_the_most_it_ever_had_in_each_round() -> None:
    policy = goodput(reallocation_s=0.0)
    perfect(policy, A)
    it = InstantCluster(policy, row_of(4, 4))
    it.submit(elastic(A, noise_scale=1e9))

    grown = [sizes(it.at(60.0 * number))[A] for number in range(5)]

    assert grown == [1, 2, 4, 8, 8]
    assert sum(it.jobs[A].running_on.values()) == 512


def test_a_job_whose_batch_fits_no_single_slot_starts_on_the_fewest_that_it_fits() -> None:
    policy = goodput()
    perfect(policy, A)
    job = elastic(A, local_limit=32)

    plan = policy.plan(view_of(row_of(4), job), Seconds(0.0))

    assert plan.local_batch == {A: {S0: 32, S1: 32}}
    assert plan.reasons[A].text.endswith("1.00 x the goodput of 2 slots, with batch 64")


def test_two_equal_jobs_share_and_a_third_makes_room_for_itself() -> None:
    policy = goodput(reallocation_s=0.0)
    it = InstantCluster(policy, row_of(4, 4))
    names = [JobId(f"j-{number}") for number in range(3)]
    for name in names:
        perfect(policy, name)
    it.submit(*(elastic(name, noise_scale=1e9) for name in names[:2]))
    for number in range(4):
        placed = it.at(60.0 * number)
    assert sizes(placed) == dict.fromkeys(names[:2], 4)

    it.submit(elastic(names[2], 240.0, noise_scale=1e9))

    assert sizes(it.at(240.0))[names[2]] == 1
    assert sorted(sizes(it.at(300.0)).values()) == [2, 3, 3]


def test_between_rounds_sizes_hold_and_who_comes_starts_on_idle_slots() -> None:
    """A round of jobs that are as old as A lasts a minute."""
    it = InstantCluster(goodput(), row_of(2))
    it.submit(elastic(A, -1000.0, slots=(1, 1)))
    it.at(0.0)
    it.submit(elastic(B, 10.0), elastic(C, 11.0))

    assert sizes(it.at(12.0)) == {A: 1, B: 1}
    assert it.plans[-1].reasons[C].text == "waits: sizes are chosen again in the next round"
    it.end(A)
    assert sizes(it.at(13.0)) == {B: 1, C: 1}


def test_newcomers_may_have_to_wait_for_the_round_as_published() -> None:
    it = InstantCluster(goodput(starts="rounds", age_share=0.0), row_of(4))
    it.submit(elastic(A))
    it.at(0.0)
    it.submit(elastic(B, 10.0))

    assert sizes(it.at(10.0)) == {A: 1}
    assert it.plans[-1].wake_at == 60.0
    assert it.plans[-1].reasons[B].text == "waits: sizes are chosen again in the next round"
    assert B in it.at(60.0)


def test_jobs_of_seconds_are_looked_at_within_seconds() -> None:
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
        grown[wake_at] = sizes(it.at(wake_at))[A]

    assert max(grown) < 15.0
    assert sorted(set(grown.values())) == [1, 2, 4]


def test_a_young_job_is_not_re_allocated_for_a_small_gain() -> None:
    """On two slots of four; two more make it 2 x as fast, and cost it (T - 30) / (T + 30)."""

    def grown(age: float) -> int:
        policy = goodput(moves="restart")
        perfect(policy, A)
        job = elastic(A, -age, noise_scale=1e9, running_on={S0: 128, S1: 128})
        plan = policy.plan(view_of(row_of(4), job), Seconds(0.0))
        return len(plan.local_batch[A])

    assert (grown(60.0), grown(600.0)) == (2, 4)


def test_a_job_that_is_spread_out_is_brought_together_if_that_is_worth_it() -> None:
    """Seen to be 4 x slower on two nodes; once it is old, a move costs it next to nothing."""

    def nodes_at(age: float) -> set[str]:
        policy = goodput(growth=1.0, moves="restart")
        for nodes in (1, 2):
            event = EpochSeen(
                job=A, family="", slots=2, nodes=nodes, global_batch=128, whole=True,
                samples_per_s=400.0 / nodes**2,
            )  # fmt: skip
            policy.observe(event, Seconds(0.0))
        job = elastic(A, -age, running_on={S0: 64, T0: 64})
        plan = policy.plan(view_of(row_of(2, 2), job), Seconds(0.0))
        return {node_of(slot) for slot in plan.local_batch[A]}

    assert (len(nodes_at(10.0)), len(nodes_at(6000.0))) == (2, 1)


@pytest.mark.parametrize(("batch", "then"), [(64, 128), (120, 120), (128, 128)])
def test_a_batch_changes_only_if_that_is_worth_it(batch: int, then: int) -> None:
    policy = goodput(growth=1.0)
    perfect(policy, A)
    job = elastic(A, noise_scale=1e9, running_on={S0: batch})

    plan = policy.plan(view_of(row_of(1), job), Seconds(0.0))

    assert plan.local_batch == {A: {S0: then}}
    assert [reason.code for reason in plan.reasons.values()] == ["batch"] * (batch != then)


def tell(policy: Policy, *noise_scales: float | None) -> None:
    """Telemetry of A, which has no speed yet."""
    for noise_scale in noise_scales:
        policy.observe(
            StepsSeen(
                job=A, family="", group=1, slots=1, nodes=1, global_batch=64, step=1,
                samples_done=64, noise_scale=noise_scale,
            ),
            Seconds(0.0),
        )  # fmt: skip


def said_noise(policy: Policy, job: JobView) -> float:
    """The noise scale that the reason for its start names."""
    plan = policy.plan(view_of(row_of(1), job), Seconds(0.0))
    return plan.reasons[job.job].numbers["noise_scale"]


def test_telemetry_tells_the_noise_scale_before_an_epoch_does() -> None:
    silent, heard, between, nonsense = (goodput() for _ in range(4))
    tell(silent, None)
    tell(heard, 1000.0)
    tell(between, 1000.0, 2000.0)
    tell(nonsense, 1000.0, None, float("nan"), float("inf"), 0.0, -1.0)

    job = elastic(A, noise_scale=50.0)  # of its epochs
    assert said_noise(silent, job) == 50.0
    assert said_noise(heard, job) == 1000.0
    assert said_noise(between, job) == pytest.approx(1000.0 * 2.0**0.3)
    assert said_noise(nonsense, job) == 1000.0
    assert said_noise(goodput(noise_scale_prior=3.0), elastic(A)) == 3.0 * 64


def test_telemetry_of_others_and_of_a_former_life_tells_nothing() -> None:
    policy = goodput(share_family=True)
    tell(policy, 1000.0)

    assert said_noise(policy, elastic(B, noise_scale=50.0)) == 50.0

    ended = JobEnded(job=A, family="", samples_done=64, succeeded=True)
    policy.observe(ended, Seconds(1.0))
    assert said_noise(policy, elastic(A, noise_scale=50.0)) == 50.0


@pytest.mark.parametrize("share", [False, True])
def test_a_relative_is_learnt_from_only_if_that_is_chosen(share: bool) -> None:  # noqa: FBT001
    """A was seen to be slower on two slots; B is thought to gain from them if that says nothing."""
    policy = goodput(share_family=share)
    for slots in (1, 2):
        event = EpochSeen(
            job=A, family="f", slots=slots, nodes=1, global_batch=64, samples_per_s=100.0 / slots,
            whole=True,
        )  # fmt: skip
        policy.observe(event, Seconds(0.0))
    job = elastic(B, -1e6, family="f", noise_scale=0.0, running_on={S0: 64})

    plan = policy.plan(view_of(row_of(2), job), Seconds(0.0))

    assert len(plan.local_batch[B]) == (1 if share else 2)


def test_the_speed_that_was_seen_is_what_is_planned_with() -> None:
    model = fit([Sample(1, 1, 64.0, 0.164), Sample(1, 1, 128.0, 0.228)], 64)

    assert goodput_table(model, BOUNDS, 64.0, 1).goodputs[0] == pytest.approx(64 / 0.164, rel=0.05)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"power": 2.0}, r"power: 2\.0 is above 1\.0; lower it"),
        ({"growth": 0.5}, r"growth: 0\.5 is below 1\.0; raise it"),
        ({"batches_per_doubling": 0}, "batches_per_doubling: 0 is below 1; raise it"),
        ({"reallocation_s": float("nan")}, "reallocation_s: nan is not finite; give a number"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        goodput(**options)
