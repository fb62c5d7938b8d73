"""What an agent does about its orders and its processes."""

from __future__ import annotations

from signal import SIGKILL, SIGTERM
from typing import Any

import pytest

from nodeagent.reconciler import Reconciler
from nodeagent.reconciler_actions import (
    Action,
    AwaitExit,
    FetchWorkspace,
    ForgetJob,
    GrantSlot,
    Kill,
    OrderGroup,
    PublishEvent,
    RemoveWorker,
    StartWorker,
    Terminate,
)
from nodeagent.reconciler_events import (
    Adopted,
    Connected,
    Desired,
    Ended,
    Event,
    GraceOver,
    LogsStored,
    ReportRead,
    Started,
    StartFailed,
    WorkspaceFailed,
    WorkspaceReady,
)
from schemas.ids import JobId, Rank, Version, WorkerId, worker_id
from schemas.messages.agent import JOIN, RECOVER, SUSPEND, GroupDelta, WorkerSeen
from schemas.messages.worker import Report
from tests.support.builders import (
    BATCH,
    N1,
    S0,
    S1,
    SNAPSHOT,
    T0,
    A,
    B,
    assignment,
    cleared,
    epoch_end,
    exited,
    finished,
    formed,
    members,
    ready,
    refused,
    run,
    seen,
    settle,
    started,
    stop,
    switch,
)

BOTH = {S0: 32, S1: 32}
FIRST = WorkerId(f"{A}.v1.r0")


def worker(job: JobId, version: int = 1, rank: int = 0) -> WorkerId:
    return worker_id(job, Version(version), Rank(rank))


def agent(*events: Event) -> Reconciler:
    """An agent to which this happened."""
    reconciler = Reconciler(N1)
    for event in events:
        reconciler.handle(event)
    return reconciler


def wanted(reconciler: Reconciler, delta: GroupDelta) -> list[Action]:
    return reconciler.handle(Desired(delta))


def laid_out(job: JobId) -> WorkspaceReady:
    return WorkspaceReady(job, SNAPSHOT)


def alive(job: JobId = A, version: int = 1, **order: Any) -> list[Event]:
    """Everything up to a living process of a job."""
    return [
        Desired(run(job, version, **order)),
        laid_out(job),
        Started(worker(job, version), 100, 7),
    ]


def alive_on_both(job: JobId = A) -> list[Event]:
    """A job that trains on both slots."""
    order = run(job, on=BOTH)
    return [
        Desired(order),
        laid_out(job),
        *(Started(worker(job, rank=rank), 100 + rank, 7) for rank in (0, 1)),
        Desired(settle(job, on=BOTH)),
    ]


def adopted(delta: GroupDelta, *, granted: bool = True) -> Adopted:
    told = assignment(delta, granted=granted)
    return Adopted(worker(delta.job, delta.version), told, 100, 7)


def ended(job: JobId = A, version: int = 1, *, code: int | None = 0) -> Ended:
    return Ended(worker(job, version), code, None, unseen=code is None)


# --- starting


def test_a_worker_is_started_only_after_its_workspace_is_there() -> None:
    reconciler = agent()

    assert wanted(reconciler, run(A)) == [FetchWorkspace(A, SNAPSHOT)]
    assert reconciler.handle(laid_out(A)) == [StartWorker(FIRST, 0, run(A))]


def test_a_workspace_is_fetched_once_however_often_it_is_wanted() -> None:
    reconciler = agent()
    delta = run(A, on=BOTH)

    assert wanted(reconciler, delta) == [FetchWorkspace(A, SNAPSHOT)]
    assert wanted(reconciler, switch(A, on=BOTH)) == []
    assert [type(action) for action in reconciler.handle(laid_out(A))] == [StartWorker, StartWorker]


def test_a_workspace_that_is_there_serves_the_next_version() -> None:
    reconciler = agent(*alive(), ended(), LogsStored(FIRST))

    actions = wanted(reconciler, run(A, 3))

    assert actions == [
        RemoveWorker(FIRST),
        StartWorker(worker(A, 3), 0, run(A, 3)),
        PublishEvent(cleared(A, 3)),
    ]


def test_an_agent_starts_the_members_on_its_own_slots_only() -> None:
    reconciler = agent(Desired(run(A, on={T0: 32, S1: 32})))

    actions = reconciler.handle(laid_out(A))

    assert actions == [StartWorker(worker(A, rank=1), 1, run(A, on={T0: 32, S1: 32}))]


def test_a_group_on_other_nodes_is_none_of_its_business() -> None:
    assert wanted(agent(), run(A, on=T0)) == []


def test_a_started_worker_is_said() -> None:
    reconciler = agent(Desired(run(A)), laid_out(A))

    assert reconciler.handle(Started(FIRST, 100, 7)) == [
        PublishEvent(started(A, pid=100)),
        OrderGroup(FIRST, run(A)),
    ]


def test_a_worker_is_started_once_for_each_version() -> None:
    reconciler = agent(*alive(), ended(), LogsStored(FIRST))

    assert wanted(reconciler, switch(A)) == []
    assert wanted(reconciler, settle(A)) == [PublishEvent(cleared(A, 2))]


def test_a_worker_that_cannot_be_started_is_refused_and_its_folder_removed() -> None:
    reconciler = agent(Desired(run(A)), laid_out(A))

    actions = reconciler.handle(StartFailed(FIRST, "no zygote", "install torch"))

    assert actions == [
        PublishEvent(refused(A, error="no zygote", hint="install torch")),
        RemoveWorker(FIRST),
    ]
    assert wanted(reconciler, switch(A)) == [], "it is not tried again by itself"


def test_a_worker_without_a_workspace_is_refused() -> None:
    reconciler = agent(Desired(run(A)))

    actions = reconciler.handle(WorkspaceFailed(A, SNAPSHOT, "no such snapshot"))

    assert actions == [PublishEvent(refused(A, error="no such snapshot"))]
    assert reconciler.handle(laid_out(A)) == []


def test_a_workspace_that_failed_is_fetched_again_for_the_next_version() -> None:
    reconciler = agent(Desired(run(A)), WorkspaceFailed(A, SNAPSHOT, "no such snapshot"))

    assert wanted(reconciler, run(A, 3)) == [
        FetchWorkspace(A, SNAPSHOT),
        PublishEvent(cleared(A, 3)),
    ]


# --- one process on each device


def test_a_worker_starts_beside_the_process_before_and_has_the_device_when_that_is_gone() -> None:
    reconciler = agent(*alive(A), Desired(stop(A, 2)), Desired(run(B)))

    assert reconciler.handle(laid_out(B)) == [StartWorker(worker(B), 0, run(B), granted=False)]
    assert reconciler.handle(Started(worker(B), 101, 7)) == [
        PublishEvent(started(B, pid=101)),
        OrderGroup(worker(B), run(B)),
    ]
    assert reconciler.handle(Connected(worker(B))) == [OrderGroup(worker(B), run(B))]
    assert reconciler.handle(ended(A, code=15)) == [
        PublishEvent(exited(A, code=15)),
        GrantSlot(worker(B)),
        PublishEvent(cleared(A, 3)),
    ]


def test_a_worker_that_is_still_being_started_has_the_device_when_it_has() -> None:
    reconciler = agent(
        *alive(A), Desired(stop(A, 2)), Desired(run(B)), laid_out(B), ended(A, code=15)
    )

    assert reconciler.handle(Started(worker(B), 101, 7)) == [
        PublishEvent(started(B, pid=101)),
        GrantSlot(worker(B)),
        OrderGroup(worker(B), run(B)),
    ]


def test_the_next_version_of_a_job_has_the_device_after_the_one_before_too() -> None:
    reconciler = agent(*alive())

    assert wanted(reconciler, run(A, 3)) == [
        Terminate(FIRST),
        StartWorker(worker(A, 3), 0, run(A, 3), granted=False),
    ]
    reconciler.handle(Started(worker(A, 3), 101, 7))
    assert reconciler.handle(ended(code=0)) == [
        PublishEvent(exited(A, code=0)),
        GrantSlot(worker(A, 3)),
        PublishEvent(cleared(A, 3)),
    ]


def test_another_slot_is_used_at_once() -> None:
    reconciler = agent(*alive(A), Desired(run(B, on=S1)))

    assert reconciler.handle(laid_out(B)) == [StartWorker(worker(B), 0, run(B, on=S1))]


def test_a_start_that_failed_gives_its_device_to_the_next() -> None:
    reconciler = agent(
        Desired(run(A)), laid_out(A), Desired(stop(A, 2)), Desired(run(B)), laid_out(B)
    )
    reconciler.handle(Started(worker(B), 101, 7))

    actions = reconciler.handle(StartFailed(FIRST, "no zygote"))

    assert actions == [
        PublishEvent(refused(A, error="no zygote")),
        RemoveWorker(FIRST),
        GrantSlot(worker(B)),
        PublishEvent(cleared(A, 3)),
    ]


def test_a_worker_that_never_had_the_device_leaves_it_to_nobody() -> None:
    reconciler = agent(
        *alive(A),
        *alive(B),
        Desired(stop(B, 2)),
        Desired(run(JobId("c-3"))),
        laid_out(JobId("c-3")),
    )
    reconciler.handle(Started(worker(JobId("c-3")), 102, 7))

    assert reconciler.handle(ended(B, code=15)) == [
        PublishEvent(exited(B, code=15)),
        PublishEvent(cleared(B, 3)),
    ]


def test_a_device_is_granted_again_to_a_worker_that_connects() -> None:
    reconciler = agent(*alive())

    assert reconciler.handle(Connected(FIRST))[0] == GrantSlot(FIRST)


# --- stopping


def test_a_worker_is_stopped_gently_and_then_by_force() -> None:
    reconciler = agent(*alive())

    assert wanted(reconciler, stop(A, 2)) == [Terminate(FIRST)]
    assert reconciler.handle(GraceOver(FIRST)) == [Kill(FIRST)]
    assert reconciler.handle(Ended(FIRST, None, SIGKILL, unseen=False)) == [
        PublishEvent(exited(A, signal=SIGKILL)),
        PublishEvent(cleared(A, 3)),
    ]


def test_a_worker_that_stopped_in_time_is_not_killed() -> None:
    reconciler = agent(*alive(), Desired(stop(A, 2)), Ended(FIRST, None, SIGTERM, unseen=False))

    assert reconciler.handle(GraceOver(FIRST)) == []


def test_a_worker_is_asked_to_stop_only_once() -> None:
    reconciler = agent(*alive(), Desired(stop(A, 2)))

    assert wanted(reconciler, stop(A, 3, forget=True)) == []


def test_a_worker_that_is_called_off_while_it_starts_is_stopped_when_it_has() -> None:
    reconciler = agent(Desired(run(A)), laid_out(A))

    assert wanted(reconciler, stop(A, 2)) == []
    assert reconciler.handle(Started(FIRST, 100, 7)) == [
        PublishEvent(started(A, pid=100)),
        Terminate(FIRST),
    ]


def test_a_worker_that_was_called_off_before_it_started_is_said_to_be_cleared() -> None:
    reconciler = agent(Desired(run(A)))

    assert wanted(reconciler, stop(A, 2)) == [PublishEvent(cleared(A, 3))]
    assert reconciler.handle(laid_out(A)) == []


def test_it_is_said_once_that_nothing_older_is_left() -> None:
    reconciler = agent(Desired(run(A)), Desired(stop(A, 2)))

    assert reconciler.handle(laid_out(A)) == []
    assert wanted(reconciler, stop(A, 2, term=2)) == []
    assert wanted(reconciler, stop(A, 4)) == [PublishEvent(cleared(A, 5))]


def test_it_is_not_said_while_a_process_is_still_leaving() -> None:
    reconciler = agent(*alive(), Desired(run(A, 3)))
    reconciler.handle(Started(worker(A, 3), 101, 7))

    assert wanted(reconciler, stop(A, 4)) == [Terminate(worker(A, 3))]
    assert reconciler.handle(ended(code=0)) == [PublishEvent(exited(A, code=0))]
    assert reconciler.handle(ended(A, 3, code=0)) == [
        PublishEvent(exited(A, 3, code=0)),
        PublishEvent(cleared(A, 5)),
    ]


def test_a_newcomer_that_was_called_off_before_it_started_is_said_to_be_cleared() -> None:
    reconciler = agent(*alive(), Desired(settle(A)))
    grows = run(A, 2, on=BOTH, born=[(1, 0), (2, 1)], kind=JOIN, snapshot="6" * 64)
    assert wanted(reconciler, grows) == [
        OrderGroup(FIRST, grows),
        FetchWorkspace(A, "6" * 64),
    ]

    actions = wanted(reconciler, settle(A, 2, on=S0, born=[(1, 0)]))

    assert actions[-1] == PublishEvent(cleared(A, 3))
    assert reconciler.handle(WorkspaceReady(A, "6" * 64)) == []


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
        finished(A, index=4, why="done"),
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

    assert wanted(reconciler, run(A, 3)) == [Terminate(FIRST), FetchWorkspace(A, SNAPSHOT)]
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


# --- the picture for the greeting


def test_the_greeting_names_every_process_and_none_that_only_waits() -> None:
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


def test_an_empty_node_greets_with_nothing() -> None:
    nothing: tuple[WorkerSeen, ...] = ()
    assert agent().seen() == nothing
