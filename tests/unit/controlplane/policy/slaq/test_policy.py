"""Policy `slaq`: sizes, allocations, and losses of stretches of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policy.api import EpochSeen, JobView, Policy
from controlplane.policy.registry import make
from controlplane.policy.slaq.observed_jobs import LossReports
from controlplane.policy.slaq.policy import allocate
from schemas.ids import JobId, Seconds
from tests.support.builders import A, B, C, job_view
from tests.support.sizes import examples
from tests.support.views import InstantCluster, epoch_seen, row_of, steps_seen

NAN = float("nan")


def elastic(job: JobId, most: int = 8, **changes: Any) -> JobView:
    return job_view(job, 0.0, **{"slots": (1, most), "family": str(job), "epoch": 8} | changes)


def epoch(job: JobId, number: int, loss: float | None, slots: int = 1) -> EpochSeen:
    """Epochs of 1000 samples; 100 samples/s and slot."""
    return epoch_seen(job, family=str(job), slots=slots, samples_per_s=100.0 * slots, epoch=number,
                      samples_done=1000 * number, train_loss=loss)  # fmt: skip


def told(
    losses: dict[JobId, Callable[[int], float | None]], many: int = 8, **options: Any
) -> Policy:
    """Policy that received so many epochs of each job, at 100 s."""
    policy = make("slaq", options)
    for job, loss in losses.items():
        for k in range(1, many + 1):
            policy.observe(epoch(job, k, loss(k)), Seconds(100.0))
    return policy


def cluster(policy: Policy, *jobs: JobView, slots: int = 8) -> InstantCluster:
    it = InstantCluster(policy, row_of(slots))
    it.submit(*jobs)
    return it


def falls(k: int) -> float:
    return 10.0 / k


def has_converged(k: int) -> float:
    return 1.0 + 0.2**k


def test_slots_go_to_the_job_whose_loss_falls() -> None:
    it = cluster(told({A: has_converged, B: falls}), elastic(A), elastic(B))

    assert it.sizes(100.0) == {A: 1, B: 7}
    reason = it.plans[0].reasons[B]
    assert reason.text.startswith(
        "resumes on 7 slots: the next 10 s are expected to lower its loss by 4"
    )
    assert reason.text.endswith("by one more slot a-1 would gain 15%")
    assert reason.numbers["predicted_loss"] == pytest.approx(10.0 / 14.5, rel=0.05)
    assert it.plans[0].predicted_loss[B] == reason.numbers["predicted_loss"]
    assert {"loss", "limit", "share_of_rest", "gain", "rival_gain"} <= reason.numbers.keys()


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda _: None, "it has reported no loss"),
        (lambda _: NAN, "it has reported no loss"),
        (lambda k: 1.0 if k < 3 else None, "2 of its losses are known, a curve needs 3"),
        (lambda _: 1.0, "its loss has not fallen"),
        (lambda k: 1.0 * k, "its loss has not fallen"),
        (lambda k: 10.0**k, "its loss has not fallen"),
        (lambda k: (5.0, 4.0, *range(5, 11))[k - 1], "its loss does not fall"),
        (lambda k: (9, 8, 7, 2, 2, 7, 8, 8)[k - 1], "its losses follow no curve"),
    ],
)
def test_a_job_without_a_curve_has_its_fair_share_and_the_reason(
    loss: Callable[[int], float | None], why: str
) -> None:
    it = cluster(told({A: loss, B: falls}), elastic(A), elastic(B))

    assert it.sizes(100.0) == {A: 4, B: 4}
    assert it.plans[0].reasons[A].text == (
        f"resumes on 4 slots: its share of 8 slots among 2, since {why}"
    )


@pytest.mark.parametrize(
    ("losses", "many", "jobs", "slots", "sizes"),
    [
        ({B: falls, C: falls}, 8, [elastic(A, 9, epoch=0), elastic(B), elastic(C)], 12, {A: 8}),
        ({B: falls}, 8, [elastic(A), elastic(B, most=2)], 8, {A: 6, B: 2}),
        ({A: falls, B: falls}, 8, [elastic(A, stop_samples=9000), elastic(B, samples_done=8000)], 8,
         {A: 1, B: 7}),
        ({A: has_converged, B: has_converged}, 30, [elastic(A), elastic(B)], 8, {A: 4, B: 4}),
    ],
    ids=[
        "a new job has twice its share", "slots that jobs with curves cannot use are shared",
        "no gain beyond a stated end in 10 s", "converged jobs share slots by speed",
    ],
)  # fmt: skip
def test_sizes_by_example(
    losses: Any, many: int, jobs: list[JobView], slots: int, sizes: dict[JobId, int]
) -> None:
    found = cluster(told(losses, many), *jobs, slots=slots).sizes(100.0)

    assert found.items() >= sizes.items()


def test_a_job_with_long_epochs_has_a_curve_from_telemetry() -> None:
    """No epoch has ended: the loss falls as exp(-x), so its mean so far as (1 - exp(-x)) / x."""
    policy = told({B: has_converged})
    for k in range(1, 12):
        x = 0.1 * k
        loss = 10.0 * (1.0 - exp(-x)) / x
        seen = steps_seen(A, family=str(A), step=k, samples_done=1000 * k, train_loss=loss)
        policy.observe(seen, Seconds(100.0))
    it = cluster(policy, elastic(A), elastic(B))

    assert it.sizes(100.0) == {A: 7, B: 1}


def test_a_size_holds_for_a_scheduling_epoch_if_there_is_room() -> None:
    it = cluster(told({A: has_converged, B: falls, C: falls}), elastic(B))
    it.at(100.0)
    it.submit(elastic(A))
    assert it.sizes(100.0) == {A: 1, B: 7}

    it.submit(elastic(C))
    it.at(102.0)
    held = it.sizes(105.0)

    assert held[A] == 1
    assert it.plans[-1].wake_at == 115.0
    assert abs(held[B] - held[C]) <= 1
    it.end(C)
    assert it.sizes(106.0) == {A: 1, B: 7}  # free slots are given at once


def test_jobs_take_turns_if_not_all_fit() -> None:
    it = cluster(told({}, quantum_s=60.0), elastic(A), elastic(B), slots=1)

    had = [set(it.at(now)) for now in (0.0, 30.0, 60.0, 90.0, 120.0)]

    assert had == [{A}, {A}, {B}, {B}, {A}]
    assert it.plans[0].reasons[B].text == (
        "waits: needs 1 slot, jobs whose turn it is leave no room for it"
    )


def test_an_efficiency_floor_limits_a_size() -> None:
    """Two slots are 1.8 times as fast as one, four 2.2 times: 0.9 and 0.55 a slot."""
    policy = told({A: falls}, efficiency_floor=0.8)
    for slots, speed in ((2, 180.0), (4, 220.0)):
        measured = msgspec.structs.replace(epoch(A, 8, None, slots), samples_per_s=speed)
        policy.observe(measured, Seconds(100.0))
    it = cluster(policy, elastic(A))

    assert it.sizes(100.0) == {A: 2}


def test_with_target_quality_the_nearest_job_comes_first() -> None:
    """Both are to make 90% of their reduction: A needs a few epochs, B a hundred."""
    losses = {A: lambda k: 10.0 * 0.8**k, B: lambda k: 10.0 * 0.99**k}
    jobs = (elastic(A), elastic(B))

    soon = cluster(told(losses, target="quality"), *jobs).sizes(100.0)
    much = cluster(told(losses), *jobs).sizes(100.0)

    assert (soon[A], much[A]) == (3, 1)


# --- allocation


@dataclass
class Table:
    """Gains of the second slot, the third, ... of each job."""

    rows: Sequence[Sequence[float]]

    def step(self, row: int, size: int) -> float:
        return self.rows[row][size - 1]


# Gains of the second, third and fourth slot.
HAND = Table([[6.0, 3.0, 2.0], [4.0, 2.5, 1.0], [1.0, 0.5, 0.0]])


def test_an_allocation_agrees_with_a_calculation_by_hand() -> None:
    """Eight slots for three jobs: one each, then 6 to A, 4 to B, 3 to A, 2.5 to B, 2 to A."""
    assert allocate(HAND, [(1, 4)] * 3, [0, 0, 0], room=8, margin=0.0) == [4, 3, 1]


def test_a_move_must_gain_more_than_the_margin() -> None:
    """A's third slot gains 3, B's third 2.5: a fifth less."""
    now = [2, 3, 1]

    assert allocate(HAND, [(1, 4)] * 3, now, room=6, margin=0.25) == now
    assert allocate(HAND, [(1, 4)] * 3, now, room=6, margin=0.15) == [3, 2, 1]
    # Excess slots are taken where they are missed least.
    assert allocate(HAND, [(1, 4)] * 3, [4, 4, 2], room=7, margin=9.0) == [3, 3, 1]


@pytest.mark.parametrize("room", [3, 5, 30])
def test_bounds_hold_and_slots_without_gain_stay_free(room: int) -> None:
    assert sum(allocate(HAND, [(1, 4), (1, 2), (1, 4)], [0] * 3, room, 0.0)) == min(room, 9)
    assert allocate(HAND, [(1, 4), (1, 2), (1, 4)], [0] * 3, 30, 0.0) == [4, 2, 3]


tables = st.lists(
    st.lists(st.integers(0, 9), min_size=3, max_size=3).map(lambda row: sorted(row)[::-1]),
    min_size=1,
    max_size=4,
)


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=tables, have=st.lists(st.integers(0, 4), min_size=4, max_size=4), more=st.integers(0, 9)
)
def test_without_a_margin_the_sizes_are_optimal(
    rows: list[list[int]], have: list[int], more: int
) -> None:
    table, room = Table(rows), len(rows) + more

    found = allocate(table, [(1, 4)] * len(rows), have[: len(rows)], room, margin=0.0)

    def gain(sizes: Sequence[int]) -> float:
        return sum(sum(row[: size - 1]) for row, size in zip(rows, sizes, strict=True))

    others = product(range(1, 5), repeat=len(rows))
    assert sum(found) <= room
    assert gain(found) == max(gain(sizes) for sizes in others if sum(sizes) <= room)


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), min_size=1, max_size=4),
    have=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    more=st.integers(0, 9),
    margin=st.sampled_from([0.0, 0.25, 2.0]),
)
def test_an_allocation_is_stable(
    rows: list[list[float]], have: list[int], more: int, margin: float
) -> None:
    table, bounds, room = Table(rows), [(1, 4)] * len(rows), len(rows) + more

    found = allocate(table, bounds, have[: len(rows)], room, margin)

    assert all(1 <= size <= 4 for size in found)
    assert sum(found) <= room
    assert allocate(table, bounds, found, room, margin) == found


# --- reports of mean losses, converted to one loss per stretch of training


def stretches(reports: LossReports) -> list[tuple[float, float]]:
    return list(zip(reports.positions, reports.losses, strict=True))


def test_telemetry_adds_the_stretch_since_the_last_report() -> None:
    """Mean 4 over 400 samples, then 3 over 800: 2 over those in between; the epoch's 2.8: 2."""
    reports = LossReports(40)

    reports.take_steps(400, 4.0)
    reports.take_steps(800, 3.0)
    reports.take_epoch(1, 1000, 2.8)
    reports.take_epoch(2, 2000, 1.5)

    assert stretches(reports) == [(200.0, 4.0), (600.0, 2.0), (1500.0, 1.5)]


def test_a_short_stretch_is_not_a_report() -> None:
    """The shortest is a quarter of the last epoch, or of the first one so far."""
    reports = LossReports(40)

    for samples in range(100, 1000, 100):
        reports.take_steps(samples, 1.0)
    reports.take_epoch(1, 1000, 1.0)
    for samples in range(1100, 2000, 100):
        reports.take_steps(samples, 1.0)

    first, second = [50.0, 150.0, 250.0, 350.0, 500.0, 700.0], [1150.0, 1450.0, 1750.0]
    assert list(reports.positions) == [*first, *second]


def test_samples_that_are_trained_again_count_once() -> None:
    reports = LossReports(40)
    reports.take_epoch(1, 1000, 4.0)
    reports.take_steps(1500, 3.0)

    reports.take_steps(1200, 3.2)
    reports.take_steps(1500, 3.0)
    reports.take_epoch(2, 2000, 2.5)

    assert stretches(reports) == [(500.0, 4.0), (1250.0, 3.0), (1750.0, 2.0)]
    resumed = LossReports(40)  # earlier epochs are assumed to be equally long
    resumed.take_epoch(10, 10_000, 1.0)
    assert stretches(resumed) == [(9500.0, 1.0)]


def test_missing_and_implausible_losses_are_ignored() -> None:
    reports = LossReports(40)

    for epoch, loss in enumerate([None, float("nan"), float("inf"), -1e300], 1):
        reports.take_epoch(epoch, 1000 * epoch, loss)

    assert stretches(reports) == []
    assert reports.first is None


def test_a_rise_and_its_return_are_no_reduction() -> None:
    """First 4, then 1000, then 3.5: the loss has fallen by 0.5."""
    reports = LossReports(40)

    for epoch, loss in enumerate([4.0, 1000.0, 3.5], 1):
        reports.take_epoch(epoch, 1000 * epoch, loss)

    assert reports.largest_drop == 0.5


@given(
    told=st.lists(st.tuples(st.integers(1, 500), st.floats(-10, 10)), min_size=1, max_size=30),
    kept=st.integers(3, 10),
)
def test_positions_rise_and_the_latest_are_kept(told: list[tuple[int, float]], kept: int) -> None:
    reports, samples = LossReports(kept), 0
    for number, (more, loss) in enumerate(told):
        samples += more
        if number % 4 == 3:
            reports.take_epoch(number // 4 + 1, samples, loss)
        else:
            reports.take_steps(samples, loss)

    positions = list(reports.positions)
    assert positions == sorted(set(positions))
    assert len(positions) == min(reports.edition, kept)
