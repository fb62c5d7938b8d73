"""What a worker says of its latest steps: of its present group and batch, and of nothing else."""

from __future__ import annotations

import pytest

from elastic.metrics import RecentSteps, StepMeans
from schemas.epochs import StepTimes


class Clock:
    """Steps of one worker, in seconds that are counted here."""

    def __init__(self) -> None:
        self.now = 100.0
        self.meter = RecentSteps(self.now)

    def step(
        self,
        took_s: float,
        *,
        sync_s: float = 0.0,
        version: int = 1,
        shares: tuple[int, ...] = (64,),
        samples: int | None = None,
        passes: int = 1,
        rank: int | None = 0,
    ) -> StepMeans | None:
        self.now += took_s
        if sync_s:
            self.meter.add_reduction(sync_s)
        self.meter.step_over(
            self.now,
            version=version,
            shares=shares,
            rank=rank,
            samples=sum(shares) if samples is None else samples,
            passes=passes,
        )
        return self.meter.means


def test_a_slow_job_is_measured_with_its_second_step() -> None:
    clock = Clock()

    assert clock.step(9.0) == StepMeans(1, (64,))
    assert clock.step(4.0) == StepMeans(
        1, (64,), samples_per_s=16.0, times=StepTimes(4.0, 0.0, 64, 1)
    )


def test_a_fast_job_is_measured_after_half_a_second_and_then_in_windows_of_two() -> None:
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

    assert means is not None
    times = means.times
    assert times == StepTimes(pass_s=1.5, sync_s=0.5, local_batch=17, passes=3)
    assert times.pass_s + (times.passes - 1) * (times.pass_s - times.sync_s) == 3.5


@pytest.mark.parametrize(
    "change", [{"version": 2}, {"shares": (32, 32), "version": 2}, {"shares": (128,)}]
)
def test_a_change_begins_anew_and_its_first_step_does_not_count(
    change: dict[str, int | tuple[int, ...]],
) -> None:
    clock = Clock()
    for _ in range(3):
        clock.step(1.0)

    assert clock.step(7.0, **change) == StepMeans(  # type: ignore[arg-type] # some keywords
        **{"version": 1, "shares": (64,), **change},  # type: ignore[arg-type]
    )
    assert clock.meter.steps == 1
    means = clock.step(2.0, **change)  # type: ignore[arg-type]
    assert means is not None
    assert (clock.meter.steps, means.times and means.times.pass_s) == (2, 2.0)


def test_while_the_state_is_on_its_way_to_a_newcomer_nothing_is_measured() -> None:
    clock = Clock()
    clock.step(1.0)

    assert [clock.step(2.0, version=2, shares=(64, 0)) for _ in range(3)] == [None] * 3
    assert clock.meter.steps == 0
    assert clock.step(2.0, version=2, shares=(32, 32)) == StepMeans(2, (32, 32))
    assert clock.meter.steps == 1


def test_the_last_step_of_an_epoch_counts_as_samples_and_not_as_a_step_of_the_batch() -> None:
    clock = Clock()
    clock.step(1.0)
    clock.step(2.0)
    clock.meter.begin_epoch(clock.now)

    means = clock.step(2.0, samples=16)

    assert means == StepMeans(1, (64,), samples_per_s=8.0, times=StepTimes(2.0, 0.0, 64, 1))


def test_what_a_script_does_between_epochs_is_in_its_speed_and_not_in_its_steps() -> None:
    clock = Clock()
    clock.step(1.0)
    clock.step(2.0)
    clock.now += 6.0  # an evaluation
    clock.meter.begin_epoch(clock.now)

    means = clock.step(2.0)

    assert means is not None
    assert (means.samples_per_s, means.times) == (8.0, StepTimes(2.0, 0.0, 64, 1))


def test_an_epoch_has_the_means_of_its_whole_steps_in_the_last_group() -> None:
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


def test_a_reduction_that_failed_is_no_part_of_the_steps_of_the_next_group() -> None:
    clock = Clock()
    clock.step(1.0, shares=(32, 32))
    clock.meter.add_reduction(30.0)  # until somebody was given up
    clock.step(31.0, version=2)

    means = clock.step(2.0, version=2)

    assert means is not None
    assert means.times == StepTimes(2.0, 0.0, 64, 1)


def test_a_pause_is_held_against_a_usual_step_and_its_usual_wait_for_peers() -> None:
    clock = Clock()
    assert clock.meter.average_step() == (0.0, 0.0)
    for _ in range(3):
        clock.step(1.0, sync_s=0.25, shares=(32, 32), passes=2)
    clock.meter.add_reduction(0.5)
    clock.meter.add_reduction(0.25)

    assert clock.meter.average_step() == (1.0, 0.25)
    assert clock.meter.reduction_s() == 0.75
