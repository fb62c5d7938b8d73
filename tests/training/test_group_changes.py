"""A job's group changes while it trains: real processes, sockets and gloo."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

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

pytestmark = pytest.mark.slow
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


def as_alone(job: Crew, source: str, batch: int, within: float = 1e-9, *, size: int = SIZE) -> None:
    every_sample_once(job, size)
    all_ranks_equal(job)
    assert furthest(job.final(), alone(source, job.epochs()[-1].epoch, batch, size)) < within


@pytest.mark.parametrize(("source", "loop", "size"), [
    (PLAIN, LOOP, SIZE),
    (SCHEDULED, SCHEDULED_LOOP, SIZE),
    (WIDE, LOOP, SIZE),
    (PLAIN, DRAWN_AHEAD, 5 * SIZE),  # enough of an epoch is left to be drawn ahead
], ids=["momentum", "schedulers, scaler and clipping", "a handover over several steps", "loaders that differ"])  # fmt: skip
def test_a_growing_and_shrinking_group_trains_as_one_process(
    tmp_path: Path, source: str, loop: str, size: int
) -> None:
    late = "built:rank=1:version=3=stall 0.2"  # one is ready when another is not
    with crew(tmp_path, script(source, loop, size=size), faults=late) as job:
        job.through((12,), (6, 6), (3, 3, 3, 3), (4, 4, 4), (12,))

        as_alone(job, source, 12, size=size)


UNLIKE = PLAIN.replace("manual_seed(3)", "manual_seed(3 + agent.rank)")
ALWAYS_BETTER = "self.parts[1].step(1.0 - agent.step * agent.rank)"  # of other ranks
JOBS: dict[str, tuple[str, str, str, dict[str, Any], list[Any]]] = {
    "one state at the start": (UNLIKE, LOOP, PLAIN, {}, [(5, 4, 3), 1]),
    "the metric of rank 0": (
        SCHEDULED.replace("self.parts[1].step(1.0)", ALWAYS_BETTER), SCHEDULED_LOOP, SCHEDULED, {}, [(4, 4, 4), 10],
    ),
    "a large share in passes": (SCHEDULED, SCHEDULED_LOOP, SCHEDULED, {"bound": 4}, [(12,), (7, 5), 1]),
    "pauses": (
        SCHEDULED, SCHEDULED_LOOP, SCHEDULED, {}, [(6, 6), 1, "pause", (4, 4, 4), 1, "pause", (12,)],
    ),
    "growth after a loss": (
        PLAIN, LOOP, PLAIN, {"faults": "reduce:rank=1:step=9:version=1=kill"}, [(6, 6), "loss", (6, 6), 1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_a_job_trains_as_one_process(tmp_path: Path, name: str) -> None:
    source, loop, plain, options, events = JOBS[name]
    with crew(tmp_path, script(source, loop), **options) as job:
        job.through(*events)

        as_alone(job, plain, 12)


def test_incumbents_report_their_pauses_and_how_long_they_connected(tmp_path: Path) -> None:
    with crew(tmp_path, script(PLAIN, LOOP)) as job:
        job.through((12,), (6, 6), (12,))

        told = [one for one in job.reported(GroupFormed) if one.pause_ms]
        assert list(dict.fromkeys((one.group, one.rank) for one in told)) == [(2, 0), (3, 0)]
        assert told == sorted(told, key=lambda one: (one.group, one.pause_ms))
        assert {one.group for one in told if one.connect_ms} == {2, 3}


def test_the_reported_loss_is_a_mean_over_samples(tmp_path: Path) -> None:
    steady = PLAIN.replace("lr=0.05", "lr=0.0")  # so all epochs have the same loss
    with crew(tmp_path, script(steady, LOOP, size=24), bound=4) as job:
        losses = [epoch.facts.train_loss for epoch in job.through((6, 6), 1, (12,), 1)]

        assert losses == [pytest.approx(losses[-1])] * len(losses)


def test_a_batch_changes_without_a_new_process(tmp_path: Path) -> None:
    with crew(tmp_path, script(NOISY, LOOP), bound=4) as job:
        # batch normalisation refuses the last share of one sample
        epochs = job.through((6, 6), 1, (13, 12), 1, (2, 1), 1)

        every_sample_once(job)
        all_ranks_equal(job)
        assert len(job.workers) == 2
        assert [epochs[0].facts.global_batch, epochs[-1].facts.global_batch] == [12, 3]
        assert epochs[-1].facts.lr == pytest.approx(0.01 * 3 / 12)


def test_one_worker_measures_noise_from_its_passes(tmp_path: Path) -> None:
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


def test_telemetry_has_the_passes_of_the_current_group(tmp_path: Path) -> None:
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
    assert (alone.group_steps > 1, first.sync_s, first.local_batch, first.passes) == (
        True, 0.0, 4, 3,
    )  # fmt: skip
    assert (both.global_batch, second.local_batch, second.passes) == (20, 4, 3)
    assert 0.0 < second.sync_s < second.pass_s
    assert both.group_steps < both.step


def test_dropout_and_batch_norm_keep_ranks_equal(tmp_path: Path) -> None:
    with crew(tmp_path, script(NOISY, LOOP, size=73)) as job:
        job.through((6, 6), (3, 3, 3, 3), 1, (4, 4, 4))

        every_sample_once(job, 73)  # a last step of one sample would end it
        all_ranks_equal(job)


def test_all_workers_leave_out_the_remainder(tmp_path: Path) -> None:
    without = LOOP.replace("batch_size=1", "batch_size=1, drop_last=True, shuffle=True")
    with crew(tmp_path, script(PLAIN, without)) as job:
        job.through((12,), (6, 6), (8,), 1)

        all_ranks_equal(job)
        taken = [len(set(ids)) for ids in job.samples().values()]
        assert (taken[0], taken[-1]) == (SIZE // 12 * 12, SIZE // 8 * 8)
        assert [len(ids) for ids in job.samples().values()] == taken


KILLS = {
    "before the reduction": ("reduce:rank=1:step=10:version=1=kill", (4, 4, 4)),
    "rank 0 before the reduction": ("reduce:rank=0:step=10:version=1=kill", (4, 4, 4)),
    "after the reduction": ("reduced:rank=2:step=10:version=1=kill", (4, 4, 4)),
    "rank 0 after the reduction": ("reduced:rank=0:step=11:version=1=kill", (6, 6)),
    "one rank is a step ahead": ("reduced:rank=1:step=10:version=1=kill;reduced:rank=0:step=10:version=1=fail", (4, 4, 4)),
    "the last step of an epoch": ("reduced:rank=1:step=12:version=1=kill;reduced:rank=0:step=12:version=1=fail", (4, 4, 4)),
    "at the end of an epoch": ("report:rank=1:version=1=kill", (4, 4, 4)),
    "rank 0 at the end of an epoch": ("report:rank=0:version=1=kill", (4, 4, 4)),
    "no death": ("reduced:rank=1:step=10:version=1=fail", (4, 4, 4)),
    "twice": ("reduce:rank=1:step=10:version=1=kill;recover:rank=2:version=2=kill", (3, 3, 3, 3)),
    "again before a step is done": ("reduce:rank=1:step=10:version=1=kill;recovered:rank=0:version=2=kill", (3, 3, 3, 3)),
}  # fmt: skip


@pytest.mark.parametrize(("faults", "batches"), KILLS.values(), ids=KILLS.keys())
def test_a_lost_member_costs_no_sample_and_no_step(
    tmp_path: Path, faults: str, batches: tuple[int, ...]
) -> None:
    with crew(tmp_path, script(SCHEDULED, SCHEDULED_LOOP), faults=faults) as job:
        job.through(batches, "loss", 1)

        as_alone(job, SCHEDULED, 12)


def test_newcomers_write_the_records_of_lost_incumbents(tmp_path: Path) -> None:
    """Rank 0 dies after its reduction: whether the others get theirs is a race, so it is repeated."""
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


def test_a_durable_epoch_has_all_its_records(tmp_path: Path) -> None:
    late = "agreed:rank=1:version=1=stall 60"  # and so has not written its last samples
    with crew(tmp_path, script(PLAIN, LOOP, size=24), faults=late) as job:
        job.start(6, 6)
        job.trains_on()

        assert job.samples() == {1: list(range(24))}


def test_a_damaged_state_is_noticed_and_sent_again(tmp_path: Path) -> None:
    with crew(tmp_path, script(PLAIN, LOOP), faults="handover.send:rank=0=corrupt") as job:
        job.through((12,), (6, 6), 1)

        every_sample_once(job)
        assert "rank 1 had another state than rank 0: 0.weight by" in job.said()


LOSSES = [
    (point, who)
    for point, ranks in {
        "ready": (2,), "build": (0, 1, 2), "built": (0, 1, 2), "announce": (0, 1),
        "boundary": (0, 1), "swapped": (0, 1), "handover.send": (0, 1), "handover.receive": (2, 3),
        "handed_over": (2, 3),
    }.items()
    for who in ranks
]  # fmt: skip


@pytest.mark.parametrize(("point", "rank"), LOSSES, ids=[f"{p} {r}" for p, r in LOSSES])
def test_a_member_lost_in_a_change_costs_nothing(tmp_path: Path, point: str, rank: int) -> None:
    faults = f"{point}:rank={rank}:version=2=kill"
    with crew(tmp_path, script(WIDE, LOOP), faults=faults) as job:
        job.start(6, 6)
        job.change_if_it_can(3, 3, 3, 3)
        job.trains_on()
        job.finish()

        as_alone(job, WIDE, 12)
