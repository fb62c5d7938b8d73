"""Ranks for which a job waits: who they are, what users read, and which inputs follow."""

from __future__ import annotations

from typing import Any, Final

import pytest

from controlplane.core.inputs import JoinStalled, RescaleExpired, Straggler
from controlplane.service.api.replies import job_summary
from controlplane.service.worker_telemetry import FRESH_S, SETTLE_S, JobUse, TelemetryTable
from schemas.ids import Rank, Seconds, Version
from schemas.jobs import PROGRESS_DEADLINE_S
from schemas.wire.agent import STALL_S, StepsReported, WorkerStalled, WorkerUsed
from tests.support.builders import (
    S0,
    S1,
    T0,
    A,
    exited,
    formed,
    named,
    paused,
    quiesced,
    ready,
    resized,
    started,
    store,
)
from tests.support.controller import Controller, cluster_of, running, training
from tests.unit.controlplane.core.steps import NEW, OLD, both, quiescing, switching, told

AT: Final = "train.py:17 in evaluate"
WAITED_S: Final = STALL_S + SETTLE_S
OTHER: Final = (1, 1)
SWITCHED: Final = formed(A, index=4, group=2)


def stall(
    version: int, rank: int, *, group: int = 1, step: int = 40, idle_s: float = 40.0, **fields: Any
) -> WorkerStalled:
    usual = {"waits_s": None, "at": AT, **fields}
    who = {"job": A, "version": Version(version), "rank": Rank(rank), "group": Version(group)}
    return WorkerStalled(**who, step=step, idle_s=idle_s, **usual)


def waits(version: int, rank: int, *, waits_s: float = WAITED_S, **fields: Any) -> WorkerStalled:
    return stall(version, rank, waits_s=waits_s, **fields)


def steps(step: int, group: int = 1) -> StepsReported:
    return StepsReported(
        job=A, version=Version(1), rank=Rank(0), group=Version(group), epoch=1, step=step,
        samples_done=step * 64, samples_per_s=100.0, train_loss=0.5, global_batch=64, lr=0.1,
    )  # fmt: skip


def three() -> Controller:
    return training(cluster_of(n1=2, n2=1), S0, S1, T0)


def joined() -> Controller:
    """Job a grows from one slot to two, and its only incumbent has passed the boundary."""
    return told(switching(), SWITCHED)


class Watched:
    """A job and what is known of its workers."""

    def __init__(self, controller: Controller, *reports: WorkerStalled) -> None:
        self.controller = controller
        self.table = TelemetryTable()
        self.hears(*reports)

    @property
    def now(self) -> Seconds:
        return Seconds(self.controller.now)

    def hears(self, *reports: WorkerStalled) -> None:
        for report in reports:
            self.table.take_stall(report, self.now)

    def note(self) -> str:
        """The part of the reason that tells of a stall, or nothing."""
        job = self.controller.job(A)
        said = job_summary(job, None, self.table, self.now).reason
        return said.removesuffix(job.reason).removesuffix("; ")

    def due(self) -> list[Any]:
        inputs = self.table.due(self.controller.reactor, self.now)
        return [one for one in inputs if isinstance(one, JoinStalled | RescaleExpired)]


@pytest.mark.parametrize(
    ("reports", "note"),
    [
        ([], ""),
        ([stall(1, 1)], f"no step for 40 s: rank 1 is at {AT}"),
        ([stall(1, 1, at="")], "no step for 40 s: rank 1 is at no line of its script"),
        (
            [waits(1, 0, idle_s=42.0), stall(1, 1, step=41), waits(1, 2)],
            f"no step for 42 s: rank 1 is at {AT}",
        ),
        (
            [stall(1, 0, at="train.py:3"), stall(1, 2), waits(1, 1)],
            f"no step for 40 s: rank 0 is at train.py:3, rank 2 is at {AT}",
        ),
        ([waits(1, 0), waits(1, 1)], "no step for 40 s: rank 2 does not answer, the others wait for it"),
        ([waits(1, 0)], "no step for 40 s: ranks 1, 2 do not answer, the others wait for them"),
        ([waits(1, 0, waits_s=31.0), waits(1, 1)], "no step for 40 s: rank 2 does not answer, the others wait for it"),
        ([waits(1, 0, waits_s=31.0), waits(1, 1, waits_s=31.0)], ""),  # the third may yet report
        ([waits(1, 0), waits(1, 1), waits(1, 2)], "no step for 40 s: all ranks wait for each other"),
        ([waits(1, 0), waits(1, 1, group=0)], "no step for 40 s: rank 2 does not answer, the others wait for it"),
        ([stall(1, 1, group=0)], ""),  # of a former group
        ([stall(1, 1, idle_s=0.0)], ""),  # it goes on
        ([stall(1, 1), stall(1, 1, idle_s=0.0)], ""),
        ([stall(1, 1, idle_s=600.0)], f"no step for 10 min: rank 1 is at {AT}"),
    ],
)  # fmt: skip
def test_a_job_without_steps_says_for_whom_it_waits(
    reports: list[WorkerStalled], note: str
) -> None:
    assert Watched(three(), *reports).note() == note


def test_a_note_names_a_few_ranks_of_many() -> None:
    controller = training(cluster_of(n1=6), *(f"n1/{n}" for n in range(6)), slots=(1, 6))  # type: ignore[arg-type]

    busy = Watched(controller, *(stall(1, rank, at="train.py:3") for rank in range(6)))
    silent = Watched(controller, waits(1, 0))

    assert busy.note().endswith("rank 2 is at train.py:3, and 3 more")
    assert (
        silent.note()
        == "no step for 40 s: ranks 1, 2, 3, 2 more do not answer, the others wait for them"
    )


def test_a_rank_of_one_says_where_it_is() -> None:
    assert Watched(running(), stall(1, 0)).note() == f"no step for 40 s: rank 0 is at {AT}"


def test_reports_are_forgotten_with_the_next_step() -> None:
    watched = Watched(three(), stall(1, 1))

    watched.table.take(steps(41), watched.now)

    assert watched.note() == ""


def test_reports_that_are_not_repeated_are_forgotten() -> None:
    watched = Watched(three(), stall(1, 1))
    notes = []
    for pause_s in (0.0, FRESH_S, 1.0):
        watched.controller.now += pause_s
        notes.append(watched.note())

    assert notes == [f"no step for {seconds} s: rank 1 is at {AT}" for seconds in (40, 65)] + [""]


def test_after_the_boundary_the_newcomers_belong_to_the_group() -> None:
    before = Watched(switching(), waits(*OLD, group=1))
    after = Watched(joined(), waits(*OLD, group=2))

    assert before.note() == "no step for 40 s: all ranks wait for each other"
    assert after.note() == "no step for 40 s: rank 1 does not answer, the others wait for it"


def test_survivors_at_rest_wait_for_the_others() -> None:
    watched = Watched(told(quiescing(), quiesced(A, index=3, group=2)), stall(*OLD), stall(*OTHER))

    assert watched.note() == f"no step for 40 s: rank 1 is at {AT}"


def test_workers_that_leave_are_not_waited_for() -> None:
    watched = Watched(told(three(), exited(A, rank=2, signal=9)), waits(1, 0), waits(1, 1))

    assert watched.note() == "no step for 40 s: all ranks wait for each other"


def straggler(
    version: int, rank: int, idle_s: float, *, answers: bool = False, at: str = ""
) -> Straggler:
    worker = named(A, version, rank)
    return Straggler(worker=worker, rank=Rank(rank), idle_s=idle_s, answers=answers, at=at)


SILENT: Final = straggler(*NEW, WAITED_S)
BUSY: Final = straggler(*NEW, 41.0, answers=True, at=AT)


@pytest.mark.parametrize(
    ("reports", "late"),
    [
        ([waits(*OLD, group=2)], SILENT),
        ([waits(*OLD, group=2), stall(*NEW, group=2, idle_s=41.0)], BUSY),
        ([waits(*OLD, group=2), waits(*NEW, group=1)], SILENT),
        ([waits(*OLD, group=2), waits(*NEW, group=2)], None),
        ([waits(*OLD, group=2, waits_s=STALL_S)], None),  # others may yet report
        ([waits(*OLD, group=1)], None),  # before the boundary
        ([stall(*OLD, group=2)], None),  # an evaluation of an incumbent
        ([stall(*OLD, group=2), stall(*NEW, group=2)], None),
        ([], None),
    ],
)
def test_a_join_is_cancelled_if_the_incumbents_wait_for_a_newcomer(
    reports: list[WorkerStalled], late: Straggler | None
) -> None:
    expected = [] if late is None else [JoinStalled(job=A, version=Version(2), stragglers=(late,))]

    assert Watched(joined(), *reports).due() == expected


def test_a_join_is_kept_if_one_incumbent_does_not_wait() -> None:
    controller = training(cluster_of(n1=2, n2=1), S0, S1)
    from_two = told(controller, *growth())

    assert Watched(from_two, waits(1, 0, group=2)).due() == []
    assert Watched(from_two, waits(1, 0, group=2), stall(1, 1, group=2)).due() == []
    assert len(Watched(from_two, waits(1, 0, group=2), waits(1, 1, group=2)).due()) == 1


def growth() -> list[Any]:
    """The order to take a third slot, until all were told to switch."""
    return [
        resized(A, 3), store(A, index=3, group=2, port=29500), started(A, 2, rank=2), ready(A, 2, rank=2),
    ]  # fmt: skip


def test_a_wait_that_was_reported_once_does_not_grow_by_itself() -> None:
    watched = Watched(joined(), waits(*OLD, group=2, waits_s=STALL_S - 1.0))
    watched.controller.now += FRESH_S

    assert watched.due() == []


def test_the_input_cancels_the_join_once() -> None:
    watched = Watched(joined(), waits(*OLD, group=2))
    (event,) = watched.due()
    watched.controller.take(event)

    assert watched.due() == []
    assert watched.controller.job(A).reason == "rank 1 did not answer for 32 s; 1 worker continues"


LONG: Final = PROGRESS_DEADLINE_S


@pytest.mark.parametrize(
    ("reports", "stragglers"),
    [
        ([], ()),
        ([stall(*OTHER, idle_s=LONG)], (straggler(*OTHER, LONG, answers=True, at=AT),)),
        ([waits(*OLD, waits_s=LONG), stall(*OTHER, idle_s=LONG / 2)], (straggler(*OTHER, LONG / 2, answers=True, at=AT),)),
        ([waits(*OLD, waits_s=LONG)], (straggler(*OTHER, LONG),)),
        ([waits(*OLD, waits_s=LONG), waits(*OTHER, waits_s=LONG)], ()),
        ([stall(*OTHER, idle_s=LONG / 2 - 1.0)], ()),  # its steps are long
    ],
)  # fmt: skip
def test_a_passed_deadline_names_the_stragglers(
    reports: list[WorkerStalled], stragglers: tuple[Straggler, ...]
) -> None:
    watched = Watched(told(both(), paused(A)))
    watched.controller.now += LONG
    watched.hears(*reports)

    assert watched.due() == [RescaleExpired(job=A, version=Version(2), stragglers=stragglers)]


def test_an_ended_job_leaves_no_reports() -> None:
    watched = Watched(three(), stall(1, 1))
    watched.table.forget(A)

    assert watched.table._stalls == {}


def used_by(rank: int, **numbers: Any) -> WorkerUsed:
    return WorkerUsed(job=A, version=Version(1), rank=Rank(rank), **numbers)


def test_a_job_uses_what_its_workers_reported_lately() -> None:
    table = TelemetryTable()
    assert table.use_of(A, Seconds(0.0)) == JobUse()
    table.take_usage(used_by(0, cpu_cores=9.0, memory_bytes=9), Seconds(0.0))
    table.take_usage(used_by(1, cpu_cores=1.0, memory_bytes=4), Seconds(10.0))
    table.take_usage(
        used_by(2, cpu_cores=0.5, memory_bytes=3, gpu_share=0.5, gpu_memory_bytes=7), Seconds(16.0)
    )

    assert table.use_of(A, Seconds(16.0)) == JobUse(1.5, 7, 0.5, 7)

    table.forget(A)
    assert table.use_of(A, Seconds(16.0)) == JobUse()
