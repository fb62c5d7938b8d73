"""Virtual time, and progress of one job."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.sim.engine.event_queue import AFTER, FIRST, LAST, USUAL, Kernel
from controlplane.sim.engine.jobs import STOPPED, TrainingProgress
from controlplane.sim.models.job_model import Throughput
from tests.support.simulations import ToyModel, job


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([FIRST, USUAL, LAST, AFTER]))))
def test_any_schedule_is_sorted_and_stable(rows: list[tuple[int, int]]) -> None:
    kernel, seen = Kernel(), list[tuple[int, int, int]]()
    for number, (when, priority) in enumerate(rows):
        kernel.call_at(float(when), seen.append, (when, priority, number), priority=priority)

    kernel.run()

    assert seen == sorted(seen)
    assert len(seen) == len(rows)


def test_a_call_sees_its_time_and_priority_and_is_never_in_the_past() -> None:
    kernel, seen = Kernel(), list[tuple[float, int]]()

    def look() -> None:
        seen.append((kernel.now, kernel.priority))

    kernel.call_at(5.0, kernel.call_at, 3.0, look)
    for priority in (AFTER, FIRST):
        kernel.call_at(1.0, look, priority=priority)
    kernel.run()

    assert seen == [(1.0, FIRST), (1.0, AFTER), (5.0, USUAL)]


def test_a_run_continues_after_its_limit() -> None:
    kernel, seen = Kernel(), list[float]()
    for when in (1.0, 2.0, 3.0):
        kernel.call_at(when, seen.append, when)

    kernel.run(until=2.0)
    assert (seen, kernel.now) == ([1.0, 2.0], 2.0)
    kernel.run()
    assert (seen, kernel.now) == ([1.0, 2.0, 3.0], 3.0)


def test_a_call_can_stop_the_run() -> None:
    kernel, seen = Kernel(), list[float]()

    def stop() -> None:
        kernel.stopped = True

    kernel.call_at(1.0, seen.append, 1.0)
    kernel.call_at(1.0, stop)
    kernel.call_at(1.0, seen.append, 2.0)
    kernel.run()

    assert seen == [1.0]


def test_an_endless_cycle_at_one_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.sim.engine.event_queue.MAX_CALLS_AT_ONCE", 1000)
    kernel = Kernel()

    def again() -> None:
        kernel.call_at(kernel.now, again)

    kernel.call_at(7.0, again)
    with pytest.raises(RuntimeError, match=r"time stands still at 7\.0 s: .*again"):
        kernel.run()


def training(epoch_samples: int = 100, epochs: int = 4) -> TrainingProgress:
    toy = ToyModel(epoch_samples=epoch_samples, epochs=epochs)
    made = TrainingProgress(toy.job_model(job("a"), "fixed", seed=0))
    made.batch = 10
    return made


TEN = Throughput(samples_per_s=20.0, progress_per_s=10.0)


def test_progress_is_counted_at_the_speed_that_was_in_force() -> None:
    job = training()
    job.set_throughput(TEN, 5.0)
    job.set_throughput(Throughput(40.0, 20.0), 8.0)
    job.advance(9.0)

    assert (job.progress, job.epoch_samples, job.steps) == (50.0, 100.0, 10.0)


def test_a_stalled_or_stopped_job_makes_no_progress() -> None:
    job = training()
    job.set_throughput(TEN, 0.0)
    job.stall(4.0, 2.0)

    assert job.epoch_due(2.0) == 12.0
    job.advance(3.0)
    assert job.progress == 20.0
    job.advance(5.0)
    assert (job.progress, job.epoch_trained_s) == (30.0, 3.0)
    job.set_throughput(STOPPED, 5.0)
    assert job.epoch_due(5.0) == math.inf


def test_an_epoch_ends_where_it_should_and_tells_its_mean_speed() -> None:
    job = training()
    job.set_throughput(TEN, 0.0)
    job.set_throughput(Throughput(10.0, 5.0), 5.0)

    assert job.finish_epoch(15.0) == 200.0 / 15.0
    assert (job.progress, job.epoch, job.epoch_samples, job.epoch_trained_s) == (100.0, 1, 0.0, 0.0)


def test_every_change_has_a_revision_of_its_own() -> None:
    job, revisions = training(), [0]
    for change, arguments in ((job.set_throughput, (TEN, 0.0)), (job.stall, (2.0, 1.0)), (job.stop, (3.0,))):  # fmt: skip
        change(*arguments)
        revisions.append(job.revision)

    assert sorted(set(revisions)) == revisions


def test_a_job_rolls_back_to_its_checkpoint_and_never_below_zero() -> None:
    job = training()
    job.set_throughput(TEN, 0.0)
    job.advance(12.0)
    job.save()
    job.advance(15.0)
    job.roll_back(job.saved)
    assert job.progress == 120.0

    job.roll_back(-5.0)
    assert job.progress == 0.0


@given(st.lists(st.floats(0.0, 10.0), max_size=20))
def test_advancing_often_changes_nothing(waits: list[float]) -> None:
    often, once, now = training(), training(), 0.0
    for each in (often, once):
        each.set_throughput(TEN, 0.0)
        each.stall(3.0, 0.0)
    for wait in waits:
        now += wait
        often.advance(now)
    once.advance(now)

    assert often.progress == pytest.approx(once.progress, abs=1e-9)
    assert often.steps == pytest.approx(once.steps, abs=1e-9)
    assert often.epoch_due(now) == pytest.approx(once.epoch_due(now))
