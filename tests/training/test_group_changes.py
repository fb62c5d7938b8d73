"""A job's group changes while it trains: real processes, sockets and gloo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pytest

from schemas.wire.agent import GroupFormed
from tests.training.groups import (
    LOOP,
    NOISY,
    PLAIN,
    SCHEDULED,
    SCHEDULED_LOOP,
    SIZE,
    WIDE,
    Crew,
    NobodyIsFullError,
    alone,
    crew,
    furthest,
    script,
)

DRAWN_AHEAD = LOOP.replace(  # by as many loader workers as a host has cores, say
    "batch_size=1",
    "batch_size=1, num_workers=1 + agent.rank % 2, prefetch_factor=5,"
    " multiprocessing_context='fork'",
)


def every_sample_once(job: Crew, size: int = SIZE) -> None:
    epochs = [report.epoch for report in job.epochs()]
    every = list(range(1, epochs[-1] + 1))
    assert epochs == every
    assert job.samples() == {epoch: list(range(size)) for epoch in every}


def all_ranks_equal(job: Crew) -> None:
    assert {epoch: len(seen) for epoch, seen in job.digests().items() if len(seen) != 1} == {}


def as_alone(
    job: Crew,
    source: str,
    batch: int,
    within: float = 1e-9,
    *,
    size: int = SIZE,
) -> None:
    every_sample_once(job, size)
    all_ranks_equal(job)
    assert furthest(job.final(), alone(source, job.epochs()[-1].epoch, batch, size)) < within


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "loop", "size"),
    [
        (PLAIN, LOOP, SIZE),
        (SCHEDULED, SCHEDULED_LOOP, SIZE),
        (WIDE, LOOP, SIZE),
        (PLAIN, DRAWN_AHEAD, 5 * SIZE),  # enough of an epoch is left to be drawn ahead
    ],
    ids=[
        "momentum",
        "schedulers, scaler and clipping",
        "a handover over several steps",
        "loaders that differ",
    ],
)
def test_a_group_that_grows_and_shrinks_trains_as_one_process_would(
    tmp_path: Path, source: str, loop: str, size: int
) -> None:
    late = "built:rank=1:version=3=stall 0.2"  # one is ready when another is not
    with crew(tmp_path, script(source, loop, size=size), faults=late) as job:
        job.start(12)
        job.change(6, 6)
        job.change(3, 3, 3, 3)
        job.change(4, 4, 4)
        job.change(12)
        job.finish()

        as_alone(job, source, 12, size=size)


@pytest.mark.slow
def test_members_that_stay_tell_how_long_they_stood_still(tmp_path: Path) -> None:
    with crew(tmp_path, script(PLAIN, LOOP)) as job:
        job.start(12)
        job.change(6, 6)
        job.change(12)
        job.finish()

        told = [one for one in job.reported(GroupFormed) if one.pause_ms]
        assert list(dict.fromkeys((one.group, one.rank) for one in told)) == [(2, 0), (3, 0)]
        assert told == sorted(told, key=lambda one: (one.group, one.pause_ms))


@pytest.mark.slow
def test_a_group_of_several_starts_with_one_state(tmp_path: Path) -> None:
    unlike = PLAIN.replace("manual_seed(3)", "manual_seed(3 + agent.rank)")
    with crew(tmp_path, script(unlike, LOOP)) as job:
        job.start(5, 4, 3)
        job.trains_on()
        job.finish()

        as_alone(job, PLAIN, 12)


@pytest.mark.slow
def test_the_loss_that_is_reported_is_one_over_the_samples_also_in_passes(tmp_path: Path) -> None:
    steady = PLAIN.replace("lr=0.05", "lr=0.0")  # so all epochs have the same loss
    with crew(tmp_path, script(steady, LOOP, size=24), bound=4) as job:
        job.start(6, 6)
        job.trains_on()
        job.change(12)
        job.trains_on()
        losses = [epoch.facts.train_loss for epoch in job.finish()]

        assert losses == [pytest.approx(losses[-1])] * len(losses)


@pytest.mark.slow
def test_a_scheduler_that_follows_a_metric_follows_rank_0_s_on_all_ranks(tmp_path: Path) -> None:
    own = "self.parts[1].step(1.0 - agent.step * agent.rank)"  # others always get better
    unlike = SCHEDULED.replace("self.parts[1].step(1.0)", own)
    with crew(tmp_path, script(unlike, SCHEDULED_LOOP)) as job:
        job.start(4, 4, 4)
        job.trains_on(10)
        job.finish()

        as_alone(job, SCHEDULED, 12)


@pytest.mark.slow
def test_a_share_that_is_too_large_is_taken_in_passes(tmp_path: Path) -> None:
    with crew(tmp_path, script(SCHEDULED, SCHEDULED_LOOP), bound=4) as job:
        job.start(12)
        job.change(7, 5)
        job.trains_on()
        job.finish()

        as_alone(job, SCHEDULED, 12)


@pytest.mark.slow
def test_a_batch_changes_without_a_new_process(tmp_path: Path) -> None:
    with crew(tmp_path, script(NOISY, LOOP), bound=4) as job:
        job.start(6, 6)
        job.trains_on()
        job.change(13, 12)
        job.trains_on()
        job.change(2, 1)  # batch normalisation refuses a share of one sample
        job.trains_on()
        epochs = job.finish()

        every_sample_once(job)
        all_ranks_equal(job)
        assert len(job.workers) == 2
        assert [epochs[0].facts.global_batch, epochs[-1].facts.global_batch] == [12, 3]
        assert epochs[-1].facts.lr == pytest.approx(0.01 * 3 / 12)


@pytest.mark.slow
def test_telemetry_has_the_noise_scale_once_a_group_of_several_has_measured_it(
    tmp_path: Path,
) -> None:
    steady = PLAIN.replace("lr=0.05", "lr=0.0")  # its gradients stay as they are
    with crew(tmp_path, script(steady, LOOP)) as job:
        job.start(12)
        job.until(lambda: len(job.told) > 1, "one worker alone tells of its steps")
        alone_told = [steps.noise_scale for steps in job.told]
        job.change(6, 6)
        job.until(lambda: job.told[-1].noise_scale is not None, "two tell of their noise")
        job.finish()

        measured = [steps for steps in job.told if steps.noise_scale is not None]
        assert set(alone_told) == {None}
        assert {(steps.group, steps.rank, steps.global_batch) for steps in measured} == {(2, 0, 12)}
        assert all((steps.noise_scale or 0.0) > 0.0 for steps in measured)


@pytest.mark.slow
def test_one_worker_alone_measures_the_noise_scale_from_the_passes_of_its_steps(
    tmp_path: Path,
) -> None:
    steady = PLAIN.replace("lr=0.05", "lr=0.0")  # its gradients stay as they are

    def told(group: int) -> list[float]:
        return [each.noise_scale for each in job.told if each.group == group and each.noise_scale]

    with crew(tmp_path, script(steady, LOOP), bound=3) as job:
        job.start(12)
        job.until(lambda: len(told(1)) > 1, "one worker tells of its noise")
        job.change(3, 3, 3, 3)
        job.until(lambda: len(told(2)) > 1, "four tell of theirs")
        job.finish()

        # the same gradients, but few measurements
        assert 0.1 < median(told(1)) / median(told(2)) < 10.0


@pytest.mark.slow
def test_telemetry_says_how_the_steps_of_the_present_group_divide_into_passes(
    tmp_path: Path,
) -> None:
    with crew(tmp_path, script(PLAIN, LOOP), bound=4) as job:
        job.start(12)
        job.until(
            lambda: bool(job.told) and job.told[-1].step_times is not None, "one worker tells"
        )
        alone = job.told[-1]
        job.change(10, 10)
        job.until(
            lambda: job.told[-1].group == 2 and job.told[-1].step_times is not None, "two tell"
        )
        both = job.told[-1]
        job.finish()

    first, second = alone.step_times, both.step_times
    assert first is not None
    assert second is not None
    assert (alone.group_steps > 1, first.sync_s, first.local_batch, first.passes) == (
        True, 0.0, 4, 3,
    )  # fmt: skip
    assert (both.global_batch, second.local_batch, second.passes) == (20, 4, 3)
    assert 0.0 < second.sync_s < second.pass_s
    assert both.group_steps < both.step


@pytest.mark.slow
def test_dropout_and_batch_norm_leave_all_ranks_with_the_same_parameters(tmp_path: Path) -> None:
    with crew(tmp_path, script(NOISY, LOOP, size=73)) as job:
        job.start(6, 6)
        job.change(3, 3, 3, 3)
        job.trains_on()
        job.change(4, 4, 4)
        job.finish()

        every_sample_once(job, 73)  # a last step of one sample would end it
        all_ranks_equal(job)


@pytest.mark.slow
def test_a_remainder_that_is_left_out_is_left_out_by_all(tmp_path: Path) -> None:
    without = LOOP.replace("batch_size=1", "batch_size=1, drop_last=True, shuffle=True")
    with crew(tmp_path, script(PLAIN, without)) as job:
        job.start(12)
        job.change(6, 6)
        job.change(8)
        job.trains_on()
        job.finish()

        all_ranks_equal(job)
        taken = [len(set(ids)) for ids in job.samples().values()]
        assert (taken[0], taken[-1]) == (SIZE // 12 * 12, SIZE // 8 * 8)
        assert [len(ids) for ids in job.samples().values()] == taken


@pytest.mark.slow
def test_a_paused_job_goes_on_where_it_was(tmp_path: Path) -> None:
    with crew(tmp_path, script(SCHEDULED, SCHEDULED_LOOP)) as job:
        job.start(6, 6)
        job.trains_on()
        point = job.suspend()
        job.start(4, 4, 4, resume=point)
        job.trains_on()
        point = job.suspend()
        job.start(12, resume=point)
        job.finish()

        as_alone(job, SCHEDULED, 12)


KILLS = {
    "before the reduction": (["reduce:rank=1:step=10:version=1=kill"], (4, 4, 4)),
    "rank 0 before the reduction": (["reduce:rank=0:step=10:version=1=kill"], (4, 4, 4)),
    "after the reduction": (["reduced:rank=2:step=10:version=1=kill"], (4, 4, 4)),
    "rank 0 after the reduction": (["reduced:rank=0:step=11:version=1=kill"], (6, 6)),
    "one rank is a step ahead": (
        ["reduced:rank=1:step=10:version=1=kill", "reduced:rank=0:step=10:version=1=fail"],
        (4, 4, 4),
    ),
    "the last step of an epoch": (
        ["reduced:rank=1:step=12:version=1=kill", "reduced:rank=0:step=12:version=1=fail"],
        (4, 4, 4),
    ),
    "at the end of an epoch": (["report:rank=1:version=1=kill"], (4, 4, 4)),
    "rank 0 at the end of an epoch": (["report:rank=0:version=1=kill"], (4, 4, 4)),
    "nobody dies": (["reduced:rank=1:step=10:version=1=fail"], (4, 4, 4)),
    "twice": (
        ["reduce:rank=1:step=10:version=1=kill", "recover:rank=2:version=2=kill"],
        (3, 3, 3, 3),
    ),
    "again before a step is done": (
        ["reduce:rank=1:step=10:version=1=kill", "recovered:rank=0:version=2=kill"],
        (3, 3, 3, 3),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "batches"),
    [pytest.param(*kill, id=name) for name, kill in KILLS.items()],
)
def test_a_lost_member_costs_no_sample_and_no_step(
    tmp_path: Path, faults: Sequence[str], batches: Sequence[int]
) -> None:
    with crew(tmp_path, script(SCHEDULED, SCHEDULED_LOOP), faults=";".join(faults)) as job:
        job.start(*batches)
        job.until(job.broken, "a member is lost")
        job.recover()
        job.trains_on()
        job.finish()

        as_alone(job, SCHEDULED, 12)


@pytest.mark.slow
def test_newcomers_record_what_all_incumbents_took_who_died_one_behind_the_other(
    tmp_path: Path,
) -> None:
    """Rank 0 dies behind its sum: whether the others still get theirs is a race, tried until they do."""
    for attempt, stall_s in enumerate((0.3, 0.6, 0.2) * 4):
        home = tmp_path / f"{attempt}"
        home.mkdir()
        faults = (
            f"reduce:rank=0:version=2=stall {stall_s}",  # the newcomers have the state meanwhile
            "reduced:rank=0:version=2=kill",
            "recovered:rank=0:version=3=kill",
        )
        with crew(home, script(PLAIN, LOOP), faults=";".join(faults)) as job:
            job.start(6, 6)
            job.begin_change(3, 3, 3, 3)
            job.until(job.broken, "rank 0 is lost")
            try:
                job.recover()
            except NobodyIsFullError:
                continue
            job.trains_on()
            job.finish()

            if len(job.group.members) == 2:
                as_alone(job, PLAIN, 12)
                return
    raise AssertionError("no newcomer had the state in time")


@pytest.mark.slow
def test_a_durable_epoch_has_all_its_records_if_everybody_dies_at_its_end(tmp_path: Path) -> None:
    late = "agreed:rank=1:version=1=stall 60"  # and so has not written its last samples
    with crew(tmp_path, script(PLAIN, LOOP, size=24), faults=late) as job:
        job.start(6, 6)
        job.trains_on()

        assert job.samples() == {1: list(range(24))}


@pytest.mark.slow
def test_a_mended_group_grows_again(tmp_path: Path) -> None:
    with crew(tmp_path, script(PLAIN, LOOP), faults="reduce:rank=1:step=9:version=1=kill") as job:
        job.start(6, 6)
        job.until(job.broken, "a member is lost")
        job.recover()
        job.change(6, 6)
        job.trains_on()
        job.finish()

        as_alone(job, PLAIN, 12)


@pytest.mark.slow
def test_a_state_that_arrives_damaged_is_noticed_and_sent_again(tmp_path: Path) -> None:
    with crew(tmp_path, script(PLAIN, LOOP), faults="handover.send:rank=0=corrupt") as job:
        job.start(12)
        job.change(6, 6)
        job.trains_on()
        job.finish()

        every_sample_once(job)
        assert "sending rank 0's state" in job.said()


LOSSES = [
    (point, who)
    for point, ranks in {
        "ready": (2,), "build": (0, 1, 2), "built": (0, 1, 2), "announce": (0, 1),
        "boundary": (0, 1), "swapped": (0, 1), "handover.send": (0, 1), "handover.receive": (2, 3),
        "handed_over": (2, 3),
    }.items()
    for who in ranks
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("point", "rank"), LOSSES, ids=[f"{p} {r}" for p, r in LOSSES])
def test_a_member_lost_while_the_group_changes_costs_nothing(
    tmp_path: Path, point: str, rank: int
) -> None:
    faults = f"{point}:rank={rank}:version=2=kill"
    with crew(tmp_path, script(WIDE, LOOP), faults=faults) as job:
        job.start(6, 6)
        job.change_if_it_can(3, 3, 3, 3)
        job.trains_on()
        job.finish()

        as_alone(job, WIDE, 12)
