"""Step times, noise scale, host usage, speed, and stop rules."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from elastic.metrics import (
    MIN_MEASUREMENTS,
    USAGE_WINDOW_S,
    NoiseMeter,
    RecentSteps,
    StepMeans,
    StopState,
    Usage,
    UsageMeter,
    cpu_seconds,
    stop_reason,
)
from elastic.training_errors import MissingMetricError
from schemas.epochs import StepTimes
from schemas.jobs import StopRule


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.meter = RecentSteps(self.now)

    def step(
        self, took_s: float, *, sync_s: float = 0.0, samples: int | None = None, **given: Any
    ) -> StepMeans | None:
        facts = {"version": 1, "shares": (64,), "passes": 1, "rank": 0, **given}
        self.now += took_s
        if sync_s:
            self.meter.add_reduction(sync_s)
        facts["samples"] = sum(facts["shares"]) if samples is None else samples
        self.meter.step_over(self.now, **facts)
        return self.meter.means


def test_the_second_step_of_a_slow_job_is_measured() -> None:
    clock = Clock()

    assert clock.step(9.0) == StepMeans(1, (64,))
    assert clock.step(4.0) == StepMeans(
        1, (64,), samples_per_s=16.0, times=StepTimes(4.0, 0.0, 64, 1)
    )


def test_a_fast_job_is_measured_in_windows() -> None:
    clock = Clock()
    first = [clock.step(0.125) for _ in range(5)]

    assert [means.samples_per_s for means in first if means] == [0.0, 0.0, 0.0, 0.0, 512.0]
    assert clock.meter.steps == 5
    slower = [clock.step(0.25) for _ in range(14)]
    # the first window is looked at before it is complete, the second one is not
    assert [round(means.samples_per_s) for means in slower if means] == [
        427, 384, 358, 341, 329, 320, *[320] * 7, 256,
    ]  # fmt: skip


def test_the_parts_of_a_step_add_up_to_it() -> None:
    clock = Clock()
    clock.step(1.0, shares=(50, 50), passes=3)

    means = clock.step(3.5, sync_s=0.5, shares=(50, 50), passes=3)

    times = means.times
    assert times == StepTimes(pass_s=1.5, sync_s=0.5, local_batch=17, passes=3)
    assert times.pass_s + (times.passes - 1) * (times.pass_s - times.sync_s) == 3.5


@pytest.mark.parametrize(
    "change", [{"version": 2}, {"shares": (32, 32), "version": 2}, {"shares": (128,)}]
)
def test_a_change_starts_a_new_window(change: dict[str, Any]) -> None:
    clock = Clock()
    for _ in range(3):
        clock.step(1.0)

    assert clock.step(7.0, **change) == StepMeans(**{"version": 1, "shares": (64,), **change})
    assert clock.meter.steps == 1
    means = clock.step(2.0, **change)
    assert (clock.meter.steps, means.times and means.times.pass_s) == (2, 2.0)


def test_a_transfer_suspends_the_measurement() -> None:
    clock = Clock()
    clock.step(1.0)

    assert [clock.step(2.0, version=2, shares=(64, 0)) for _ in range(3)] == [None] * 3
    assert clock.meter.steps == 0
    assert clock.step(2.0, version=2, shares=(32, 32)) == StepMeans(2, (32, 32))
    assert clock.meter.steps == 1


@pytest.mark.parametrize(
    ("pause_s", "samples"),
    [(0.0, 16), (6.0, None)],
    ids=["a short step", "an evaluation before it"],
)
def test_short_steps_and_pauses_count_in_the_speed_only(
    pause_s: float, samples: int | None
) -> None:
    clock = Clock()
    clock.step(1.0)
    clock.step(2.0)
    clock.now += pause_s
    clock.meter.begin_epoch(clock.now)

    means = clock.step(2.0, samples=samples)

    assert means == StepMeans(1, (64,), samples_per_s=8.0, times=StepTimes(2.0, 0.0, 64, 1))


def test_an_epoch_has_the_means_of_its_whole_steps() -> None:
    clock = Clock()
    for took_s in (1.0, 8.0):
        clock.step(took_s)
    clock.meter.begin_epoch(clock.now)
    assert clock.meter.over_epoch() is None

    clock.step(2.0)
    clock.step(3.0)
    clock.step(0.5, samples=16)
    assert clock.meter.over_epoch() == StepTimes(2.5, 0.0, 64, 1)

    clock.step(9.0, version=2)
    assert clock.meter.over_epoch() is None


def test_a_failed_reduction_is_not_measured() -> None:
    clock = Clock()
    clock.step(1.0, shares=(32, 32))
    clock.meter.add_reduction(30.0)  # until somebody was given up
    clock.step(31.0, version=2)

    means = clock.step(2.0, version=2)

    assert means.times == StepTimes(2.0, 0.0, 64, 1)


def test_an_average_step_has_its_reductions() -> None:
    clock = Clock()
    assert clock.meter.average_step() == (0.0, 0.0)
    for _ in range(3):
        clock.step(1.0, sync_s=0.25, shares=(32, 32), passes=2)
    clock.meter.add_reduction(0.5)
    clock.meter.add_reduction(0.25)

    assert clock.meter.average_step() == (1.0, 0.25)
    assert clock.meter.sync_s == 0.75


SCALARS = 2000


def measured(*passes: int, times: int = 400) -> tuple[NoiseMeter, float]:
    """Return a meter of gradients with noise 1 per scalar and sample, and their noise scale."""
    torch.manual_seed(0)
    gradient, whole, meter = torch.randn(SCALARS) * 0.05, sum(passes), NoiseMeter()
    for _ in range(times):
        parts = [(gradient + torch.randn(SCALARS) / own**0.5) * (own / whole) for own in passes]
        meter.begin()
        for part, own in zip(parts[:-1], passes, strict=False):
            meter.add_pass(part, own, whole)
        meter.add_total(torch.stack(parts).sum(0), whole)
    return meter, SCALARS / float(torch.dot(gradient, gradient))


@pytest.mark.parametrize(
    "passes", [(16, 16), (16, 48), (32, 224), (7, 13), (32, 32), (11, 11, 10), (16,) * 8], ids=str
)
def test_all_passes_but_the_last_give_the_noise_scale(passes: tuple[int, ...]) -> None:
    meter, true = measured(*passes)

    assert meter.scale() == pytest.approx(true, rel=0.25)


@pytest.mark.parametrize("moves", [0.0, 0.1])
def test_two_steps_in_a_row_give_the_noise_scale_of_a_worker_alone(moves: float) -> None:
    torch.manual_seed(0)
    gradient, meter = torch.randn(SCALARS) * 0.05, NoiseMeter()
    for step in range(1, 1600):
        moved = gradient * (1.0 + moves * (step % 2))  # as the parameters move
        meter.add_alone(moved + torch.randn(SCALARS) / 16**0.5, step, 16)

    true = SCALARS / float(torch.dot(gradient, gradient))
    assert meter.scale() == pytest.approx(true, rel=0.25)


def test_steps_that_do_not_follow_each_other_do_not_count() -> None:
    meter = NoiseMeter()
    for turn in range(4 * MIN_MEASUREMENTS):
        meter.add_alone(torch.randn(SCALARS) + 0.1, 4 * turn, 16)
        meter.add_alone(torch.randn(SCALARS) + 0.1, 4 * turn + 1, 17)  # another batch
        meter.add_alone(torch.randn(SCALARS) + 0.1, 4 * turn + 4, 16)

    assert meter.scale() is None


def test_the_noise_scale_needs_measurements() -> None:
    assert measured(16, 48, times=MIN_MEASUREMENTS - 1)[0].scale() is None
    assert measured(16, 48, times=MIN_MEASUREMENTS)[0].scale() is not None


def test_an_overflow_is_ignored() -> None:
    meter, _ = measured(16, 48, times=MIN_MEASUREMENTS)
    before = meter.scale()

    meter.add_pass(torch.full((SCALARS,), float("inf")), 16, 64)
    meter.add_total(torch.full((SCALARS,), float("inf")), 64)

    assert meter.scale() == before


@pytest.mark.parametrize(
    ("part", "own", "total"), [(0.5, 32, 0.0), (1.0, 64, 1.0)], ids=["a lost signal", "one pass"]
)
def test_no_noise_scale_without_signal_or_with_one_pass(
    part: float, own: int, total: float
) -> None:
    meter = NoiseMeter()
    for _ in range(2 * MIN_MEASUREMENTS):
        meter.add_pass(torch.ones(SCALARS) * part, own, 64)
        meter.add_total(torch.ones(SCALARS) * total, 64)

    assert meter.scale() is None


def test_passes_of_a_dropped_step_do_not_count() -> None:
    torch.manual_seed(0)
    meter = NoiseMeter()
    for _ in range(2 * MIN_MEASUREMENTS):
        meter.begin()
        meter.add_pass(torch.full((SCALARS,), float("nan")), 16, 64)
        share, rest = torch.ones(SCALARS) * 0.3, torch.ones(SCALARS) * 0.7
        meter.begin()
        meter.add_pass(share, 16, 64)
        meter.add_total(share + rest, 64)

    assert meter.scale() is not None


def first_end(rule: StopRule, values: list[float]) -> int | None:
    """Return the first epoch (1-based) after which the rule ends a job that reports `values`."""
    state = StopState()
    for epoch, value in enumerate(values, start=1):
        if stop_reason(rule, state, epoch, epoch * 100, {"accuracy": value}):
            return epoch
    return None


@pytest.mark.parametrize(("rule", "values", "end"), [
    (StopRule(epochs=3), [0.0] * 9, 3),
    (StopRule(samples=250), [0.0] * 9, 3),
    (StopRule(metric="accuracy", at_least=0.9), [0.5, 0.9, 1.0], 2),
    (StopRule(metric="accuracy", at_least=0.9, consecutive=3), [0.9, 0.9, 0.1, 0.9, 0.95, 0.9], 6),
    (StopRule(metric="accuracy", at_least=2.0, epochs=4), [0.9] * 9, 4),
    (StopRule(metric="accuracy", plateau=2), [0.1, 0.3, 0.2, 0.4, 0.4, 0.4], 6),
    (StopRule(metric="accuracy", plateau=2), [math.nan, math.nan], 2),
    (StopRule(metric="accuracy", at_least=0.9), [0.1] * 9, None),
])  # fmt: skip
def test_a_rule_ends_a_job_at_its_epoch(
    rule: StopRule, values: list[float], end: int | None
) -> None:
    assert first_end(rule, values) == end


def test_a_missing_metric_is_named() -> None:
    with pytest.raises(MissingMetricError, match=r"'accuracy', the script reported loss, mse"):
        stop_reason(
            StopRule(metric="accuracy", plateau=1), StopState(), 1, 1, {"loss": 1, "mse": 2}
        )


def test_speed_is_measured_over_the_epoch() -> None:
    clock = Clock()
    for samples in (100, 300, 10):
        clock.step(1.0, samples=samples)
    assert clock.meter.epoch_speed(102.5) == (164.0, 2.5)
    clock.meter.begin_epoch(103.0)
    clock.step(1.0, samples=50)

    assert clock.meter.epoch_speed(104.0) == (50.0, 1.0)


def test_usage_is_the_mean_of_the_last_window() -> None:
    """Four workers: each sends 2 x 3/4 of what a ring sums."""
    meter = UsageMeter()
    meter.count_all_reduce(1000, members=4)  # before anybody asks

    assert meter.usage(cpu_s=7.0, now=100.0) is None
    meter.count_all_reduce(4000, members=4)
    assert meter.usage(cpu_s=9.0, now=100.0 + USAGE_WINDOW_S / 2) is None
    assert meter.usage(cpu_s=17.0, now=100.0 + USAGE_WINDOW_S) == Usage(2.0, 6000 / USAGE_WINDOW_S)
    assert meter.usage(cpu_s=90.0, now=101.0 + USAGE_WINDOW_S) == Usage(2.0, 6000 / USAGE_WINDOW_S)


def test_falling_processor_time_counts_as_none() -> None:
    meter = UsageMeter()
    meter.usage(cpu_s=7.0, now=0.0)

    assert meter.usage(cpu_s=5.0, now=USAGE_WINDOW_S) == Usage(0.0, 0.0)


@pytest.mark.slow
def test_processor_time_includes_children() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        while cpu_seconds() - time.process_time() < 0.1:
            assert child.poll() is None
        child.kill()
        child.wait()

    assert cpu_seconds() - time.process_time() >= 0.1
