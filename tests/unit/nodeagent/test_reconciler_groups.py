"""What the reconciler tells members of a group, and what it makes of ends and of workers that it finds."""

from __future__ import annotations

from signal import SIGKILL
from typing import Any

import pytest
from msgspec.structs import replace

from nodeagent.reconciler import Reconciler
from nodeagent.reconciler_events import (
    AwaitExit,
    Connected,
    Desired,
    Ended,
    Event,
    FetchWorkspace,
    ForgetJob,
    GraceOver,
    GrantSlot,
    Kill,
    LogsStored,
    OrderGroup,
    PublishEvent,
    RemoveWorker,
    ReportRead,
    Started,
    StartFailed,
    StartWorker,
    Terminate,
    WorkspaceFailed,
)
from schemas.ids import JobId, Rank, Version
from schemas.wire.agent import JOIN, RECOVER, SUSPEND, WorkerSeen
from schemas.wire.worker import Report
from tests.support.builders import (
    BATCH,
    N1,
    S0,
    S1,
    SNAPSHOT,
    A,
    B,
    cleared,
    epoch_end,
    exited,
    finished,
    formed,
    members,
    ready,
    run,
    seen,
    settle,
    started,
    stop,
    switch,
)
from tests.support.reconciler_events import (
    BOTH,
    FIRST,
    adopted,
    agent,
    alive,
    alive_on_both,
    ended,
    laid_out,
    wanted,
    worker,
)

# --- the group


def test_a_worker_is_told_of_each_stage_of_its_group_once() -> None:
    reconciler = agent(*alive(), Connected(FIRST), ReportRead(FIRST, ready(A)))

    assert wanted(reconciler, switch(A)) == [OrderGroup(FIRST, switch(A))]
    assert reconciler.handle(ReportRead(FIRST, formed(A))) == [PublishEvent(formed(A))]
    assert wanted(reconciler, settle(A)) == [
        OrderGroup(FIRST, settle(A)),
        PublishEvent(cleared(A, 2)),
    ]
    assert wanted(reconciler, settle(A, term=2)) == []


def test_a_report_that_names_another_worker_counts_for_who_wrote_it() -> None:
    reconciler = agent(*alive())
    forged = replace(epoch_end(A, 777), job=B, version=Version(9), rank=Rank(3))

    said = reconciler.handle(ReportRead(FIRST, forged))

    assert said == [PublishEvent(epoch_end(A, 777))]


def test_a_worker_that_starts_after_the_order_is_told_to_switch_at_once() -> None:
    reconciler = agent(Desired(switch(A)), laid_out(A))

    assert reconciler.handle(Started(FIRST, 100, 7)) == [
        PublishEvent(started(A, pid=100)),
        OrderGroup(FIRST, switch(A)),
    ]


def test_a_worker_that_connects_again_is_told_the_newest_again() -> None:
    reconciler = agent(*alive(), Desired(switch(A)))

    for _ in range(2):
        assert reconciler.handle(Connected(FIRST)) == [
            GrantSlot(FIRST),
            OrderGroup(FIRST, switch(A)),
        ]


def test_a_worker_that_is_to_stop_is_not_told_of_a_group() -> None:
    reconciler = agent(*alive(), Desired(switch(A)), Desired(stop(A, 2)))

    assert OrderGroup(FIRST, switch(A)) not in reconciler.handle(Connected(FIRST))


def test_an_incumbent_hears_of_a_newcomer_and_both_are_told_to_switch() -> None:
    reconciler = agent(*alive(), Desired(settle(A)))
    newcomer = worker(A, 2, 1)
    grows: dict[str, Any] = {"on": BOTH, "born": [(1, 0), (2, 1)], "kind": JOIN}

    assert wanted(reconciler, run(A, 2, **grows)) == [
        OrderGroup(FIRST, run(A, 2, **grows)),
        StartWorker(newcomer, 1, run(A, 2, **grows)),
    ]
    reconciler.handle(Started(newcomer, 101, 7))
    order = switch(A, 2, store="127.0.0.1:29100", **grows)
    assert wanted(reconciler, order) == [OrderGroup(FIRST, order), OrderGroup(newcomer, order)]


def test_a_newcomer_that_is_known_by_an_older_version_is_not_started_again() -> None:
    reconciler = agent(Desired(run(A, 1)), laid_out(A), StartFailed(FIRST, "no zygote"))

    assert wanted(reconciler, run(A, 2, on=S0, born=[(1, 0)], kind=RECOVER)) == [
        PublishEvent(cleared(A, 2))
    ]


def test_a_leaver_is_told_and_given_time_to_exit_by_itself() -> None:
    reconciler = agent(*alive_on_both())
    second = worker(A, rank=1)
    leaving = members(A, BOTH, [(1, 0), (1, 1)])[1:]
    order = switch(A, 2, on=S0, born=[(1, 0)], kind=JOIN, former=leaving)

    assert wanted(reconciler, order) == [OrderGroup(FIRST, order), OrderGroup(second, order)]
    settled = settle(A, 2, on=S0, born=[(1, 0)])
    assert wanted(reconciler, settled) == [AwaitExit(second), OrderGroup(FIRST, settled)]
    assert reconciler.handle(GraceOver(second)) == [Terminate(second)]
    assert reconciler.handle(GraceOver(second)) == [Kill(second)]
    assert reconciler.handle(Ended(second, None, SIGKILL, unseen=False)) == [
        PublishEvent(exited(A, rank=1, signal=SIGKILL)),
        PublishEvent(cleared(A, 3)),
    ]


def test_a_leaver_that_went_by_itself_is_neither_stopped_nor_killed() -> None:
    second = worker(A, rank=1)
    reconciler = agent(*alive_on_both(), Desired(switch(A, 2, on=S0, born=[(1, 0)])))

    assert reconciler.handle(Ended(second, 0, None, unseen=False))[0] == PublishEvent(
        exited(A, rank=1, code=0)
    )
    assert reconciler.handle(GraceOver(second)) == []


def test_a_leaver_that_stays_after_all_is_an_incumbent_again() -> None:
    second = worker(A, rank=1)
    leaving = members(A, BOTH, [(1, 0), (1, 1)])[1:]
    reconciler = agent(
        *alive_on_both(),
        Desired(switch(A, 2, on=S0, born=[(1, 0)], former=leaving)),
    )
    kept = settle(A, 2, on=BOTH, born=[(1, 0), (1, 1)])
    assert wanted(reconciler, kept)[:2] == [OrderGroup(FIRST, kept), OrderGroup(second, kept)]

    next_order = switch(A, 3, on=BOTH, born=[(1, 0), (1, 1)])
    reconciler.handle(Desired(next_order))

    assert wanted(reconciler, stop(A, 4)) == [Terminate(FIRST), Terminate(second)]


def test_a_group_of_nobody_is_told_to_those_that_leave() -> None:
    reconciler = agent(*alive())
    suspends = switch(A, 2, on={}, born=[], kind=SUSPEND, former=members(A, {S0: BATCH}, [(1, 0)]))

    assert wanted(reconciler, suspends) == [
        OrderGroup(FIRST, suspends),
        PublishEvent(cleared(A, 2)),
    ]
    assert wanted(reconciler, stop(A, 2)) == [AwaitExit(FIRST)]


# --- the end of a worker


def test_reports_are_said_as_they_are_read_and_the_exit_behind_them() -> None:
    reconciler = agent(*alive())
    reports: tuple[Report, ...] = (
        ready(A),
        formed(A),
        epoch_end(A, 1),
        finished(A, index=4, reason="done"),
    )

    said = [reconciler.handle(ReportRead(FIRST, report)) for report in reports]

    assert said == [[PublishEvent(report)] for report in reports]
    assert reconciler.handle(ended(code=0)) == [PublishEvent(exited(A, code=0))]


def test_an_exit_that_nobody_saw_is_said_as_such() -> None:
    assert agent(*alive()).handle(ended(code=None)) == [PublishEvent(exited(A))]


def test_an_exit_is_said_once() -> None:
    reconciler = agent(*alive(), ended(code=0))

    assert reconciler.handle(ended(code=0)) == []


def test_a_folder_is_removed_when_its_logs_are_stored_and_nobody_wants_it() -> None:
    reconciler = agent(*alive(), ended())

    assert wanted(reconciler, stop(A, 2)) == [PublishEvent(cleared(A, 3))]
    assert reconciler.handle(LogsStored(FIRST)) == [RemoveWorker(FIRST)]


def test_a_folder_whose_logs_were_stored_early_is_removed_when_nobody_wants_it() -> None:
    reconciler = agent(*alive(), ended())

    assert reconciler.handle(LogsStored(FIRST)) == []
    assert wanted(reconciler, stop(A, 2)) == [RemoveWorker(FIRST), PublishEvent(cleared(A, 3))]


def test_a_job_that_ended_is_forgotten_when_nothing_of_it_is_left() -> None:
    reconciler = agent(*alive(), ended())

    assert wanted(reconciler, stop(A, 2, forget=True)) == [PublishEvent(cleared(A, 3))]
    assert reconciler.handle(LogsStored(FIRST)) == [RemoveWorker(FIRST), ForgetJob(A)]
    assert reconciler.jobs == {}


def test_a_job_of_which_nothing_was_ever_here_is_forgotten_at_once() -> None:
    reconciler = agent()

    assert wanted(reconciler, stop(A, 2, forget=True)) == [
        PublishEvent(cleared(A, 3)),
        ForgetJob(A),
    ]
    assert reconciler.jobs == {}


def test_a_job_that_pauses_is_not_forgotten() -> None:
    reconciler = agent(*alive(), ended(), LogsStored(FIRST), Desired(stop(A, 2)))

    assert list(reconciler.jobs) == [A]


@pytest.mark.parametrize("late", [laid_out(A), WorkspaceFailed(A, SNAPSHOT, "no")], ids=repr)
def test_a_forgotten_job_stays_forgotten(late: Event) -> None:
    reconciler = agent(Desired(run(A)), Desired(stop(A, 2, forget=True)))

    assert reconciler.handle(late) == []
    assert reconciler.jobs == {}


def test_what_is_heard_of_an_unknown_worker_changes_nothing() -> None:
    reconciler = agent()

    for event in (
        Started(FIRST, 100, 7),
        StartFailed(FIRST, "no"),
        Connected(FIRST),
        ReportRead(FIRST, ready(A)),
        ended(),
        GraceOver(FIRST),
        LogsStored(FIRST),
    ):
        assert reconciler.handle(event) == []
    assert reconciler == Reconciler(N1)


# --- workers that an earlier life of the agent left


def test_an_adopted_worker_that_is_wanted_goes_on() -> None:
    reconciler = agent(adopted(run(A)))

    assert wanted(reconciler, settle(A)) == [
        OrderGroup(FIRST, settle(A)),
        PublishEvent(cleared(A, 2)),
    ]
    assert reconciler.handle(ReportRead(FIRST, formed(A))) == [PublishEvent(formed(A))]
    assert reconciler.handle(ended(code=0)) == [PublishEvent(exited(A, code=0))]


def test_an_adopted_worker_that_is_not_wanted_is_stopped() -> None:
    reconciler = agent(adopted(run(A)))

    assert wanted(reconciler, stop(A, 2)) == [Terminate(FIRST)]


def test_an_adopted_worker_that_was_replaced_keeps_the_device_until_it_is_gone() -> None:
    reconciler = agent(adopted(run(A)))

    assert wanted(reconciler, run(A, 3)) == [Terminate(FIRST), FetchWorkspace(A, SNAPSHOT, "ann")]
    assert reconciler.handle(laid_out(A)) == [
        StartWorker(worker(A, 3), 0, run(A, 3), granted=False)
    ]
    reconciler.handle(Started(worker(A, 3), 101, 7))
    assert reconciler.handle(ended(code=15)) == [
        PublishEvent(exited(A, code=15)),
        GrantSlot(worker(A, 3)),
        PublishEvent(cleared(A, 3)),
    ]


def test_an_adopted_worker_of_which_nothing_is_heard_is_left_alone_on_its_device() -> None:
    reconciler = agent(adopted(run(A)), Desired(run(B)))

    assert reconciler.handle(laid_out(B)) == [StartWorker(worker(B), 0, run(B), granted=False)]
    reconciler.handle(Started(worker(B), 101, 7))
    assert reconciler.handle(ReportRead(FIRST, epoch_end(A, 1))) == [PublishEvent(epoch_end(A, 1))]
    assert reconciler.handle(ended()) == [
        PublishEvent(exited(A, code=0)),
        GrantSlot(worker(B)),
    ]


def test_an_adopted_worker_that_was_prepared_beside_another_waits_for_the_device() -> None:
    for first, second in (((A, True), (B, False)), ((B, False), (A, True))):
        reconciler = agent(
            *(adopted(run(job), granted=granted) for job, granted in (first, second))
        )

        assert reconciler.handle(Connected(worker(B))) == []
        assert wanted(reconciler, run(B)) == [OrderGroup(worker(B), run(B))]
        reconciler.handle(Desired(stop(A, 2)))
        assert GrantSlot(worker(B)) in reconciler.handle(ended(A, code=15))


def test_an_adopted_worker_that_is_alone_on_its_slot_may_have_the_device_already() -> None:
    reconciler = agent(adopted(run(A), granted=False), Desired(stop(A, 2)), Desired(run(B)))

    assert reconciler.handle(laid_out(B)) == [StartWorker(worker(B), 0, run(B), granted=False)]


def test_an_adopted_worker_that_had_ended_says_so_and_is_not_started_again() -> None:
    reconciler = agent(adopted(run(A)))

    assert reconciler.handle(ended()) == [PublishEvent(exited(A, code=0))]
    assert wanted(reconciler, settle(A)) == [PublishEvent(cleared(A, 2))]


# --- what a hello tells


def test_a_hello_names_every_process_and_none_that_only_waits() -> None:
    reconciler = agent(
        *alive(A),
        Desired(run(B, on=S1)),
        laid_out(B),
        Desired(run(JobId("c-3"))),
        ended(A, code=3),
    )

    assert reconciler.seen() == (
        seen(A, pid=100, ended=True, code=3),
        seen(B, slot=1, pid=None),
    )


def test_an_empty_node_says_hello_with_nothing() -> None:
    nothing: tuple[WorkerSeen, ...] = ()
    assert agent().seen() == nothing
