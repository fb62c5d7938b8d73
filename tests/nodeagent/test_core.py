"""What an agent does about its orders and its processes."""

from __future__ import annotations

from signal import SIGKILL, SIGTERM

import pytest

from nodeagent.actions import (
    Action,
    FetchWorkspace,
    ForgetJob,
    Kill,
    OrderSwitch,
    RemoveWorker,
    Say,
    StartWorker,
    Terminate,
)
from nodeagent.core import AgentCore
from nodeagent.events import (
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
from schemas.messages.agent import GroupDelta, WorkerSeen
from tests.support.builders import (
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
    ready,
    refused,
    run,
    seen,
    settle,
    started,
    stop,
    switch,
)

FIRST = WorkerId(f"{A}.v1.r0")


def worker(job: JobId, version: int = 1, rank: int = 0) -> WorkerId:
    return worker_id(job, Version(version), Rank(rank))


def agent(*events: Event) -> AgentCore:
    """An agent to which this happened."""
    core = AgentCore(N1)
    for event in events:
        core.handle(event)
    return core


def wanted(core: AgentCore, delta: GroupDelta) -> list[Action]:
    return core.handle(Desired(delta))


def laid_out(job: JobId) -> WorkspaceReady:
    return WorkspaceReady(job, SNAPSHOT)


def alive(job: JobId = A, version: int = 1, **order: object) -> list[Event]:
    """Everything up to a living process of a job."""
    return [
        Desired(run(job, version, **order)),
        laid_out(job),
        Started(worker(job, version), 100, 7),
    ]


def adopted(delta: GroupDelta) -> Adopted:
    return Adopted(worker(delta.job, delta.version), assignment(delta), 100, 7)


def ended(job: JobId = A, version: int = 1, *, code: int | None = 0) -> Ended:
    return Ended(worker(job, version), code, None, unseen=code is None)


# --- starting


def test_a_worker_is_started_only_after_its_workspace_is_there() -> None:
    core = agent()

    assert wanted(core, run(A)) == [FetchWorkspace(A, SNAPSHOT)]
    assert core.handle(laid_out(A)) == [StartWorker(FIRST, 0, run(A))]


def test_a_workspace_is_fetched_once_however_often_it_is_wanted() -> None:
    core = agent()
    delta = run(A, on={S0: 32, S1: 32})

    assert wanted(core, delta) == [FetchWorkspace(A, SNAPSHOT)]
    assert wanted(core, switch(A, on={S0: 32, S1: 32})) == []
    assert [type(action) for action in core.handle(laid_out(A))] == [StartWorker, StartWorker]


def test_a_workspace_that_is_there_serves_the_next_version() -> None:
    core = agent(*alive(), ended(), LogsStored(FIRST))

    actions = wanted(core, run(A, 3))

    assert actions == [
        RemoveWorker(FIRST),
        StartWorker(worker(A, 3), 0, run(A, 3)),
        Say(cleared(A, 3)),
    ]


def test_an_agent_starts_the_members_on_its_own_slots_only() -> None:
    core = agent(Desired(run(A, on={T0: 32, S1: 32})))

    actions = core.handle(laid_out(A))

    assert actions == [StartWorker(worker(A, rank=1), 1, run(A, on={T0: 32, S1: 32}))]


def test_a_group_on_other_nodes_is_none_of_its_business() -> None:
    assert wanted(agent(), run(A, on=T0)) == []


def test_a_started_worker_is_said() -> None:
    core = agent(Desired(run(A)), laid_out(A))

    assert core.handle(Started(FIRST, 100, 7)) == [Say(started(A, pid=100))]


def test_a_worker_is_started_once_for_each_version() -> None:
    core = agent(*alive(), ended(), LogsStored(FIRST))

    assert wanted(core, switch(A)) == []
    assert wanted(core, settle(A)) == []


def test_a_worker_that_cannot_be_started_is_refused_and_its_folder_removed() -> None:
    core = agent(Desired(run(A)), laid_out(A))

    actions = core.handle(StartFailed(FIRST, "no zygote", "install torch"))

    assert actions == [
        Say(refused(A, error="no zygote", hint="install torch")),
        RemoveWorker(FIRST),
    ]
    assert wanted(core, switch(A)) == [], "it is not tried again by itself"


def test_a_worker_without_a_workspace_is_refused() -> None:
    core = agent(Desired(run(A)))

    actions = core.handle(WorkspaceFailed(A, SNAPSHOT, "no such snapshot"))

    assert actions == [Say(refused(A, error="no such snapshot"))]
    assert core.handle(laid_out(A)) == []


def test_a_workspace_that_failed_is_fetched_again_for_the_next_version() -> None:
    core = agent(Desired(run(A)), WorkspaceFailed(A, SNAPSHOT, "no such snapshot"))

    assert wanted(core, run(A, 3)) == [FetchWorkspace(A, SNAPSHOT), Say(cleared(A, 3))]


# --- one process on each slot


def test_a_slot_is_used_only_after_the_process_before_is_gone() -> None:
    core = agent(*alive(A), Desired(stop(A, 2)))
    assert wanted(core, run(B)) == [FetchWorkspace(B, SNAPSHOT)]
    assert core.handle(laid_out(B)) == []

    actions = core.handle(ended(A, code=15))

    assert actions == [
        Say(exited(A, code=15)),
        StartWorker(worker(B), 0, run(B)),
        Say(cleared(A, 2)),
    ]


def test_the_next_version_of_a_job_waits_for_the_one_before_too() -> None:
    core = agent(*alive())

    assert wanted(core, run(A, 3)) == [Terminate(FIRST)]
    assert core.handle(ended(code=0)) == [
        Say(exited(A, code=0)),
        StartWorker(worker(A, 3), 0, run(A, 3)),
        Say(cleared(A, 3)),
    ]


def test_another_slot_is_used_at_once() -> None:
    core = agent(*alive(A), Desired(run(B, on=S1)))

    assert core.handle(laid_out(B)) == [StartWorker(worker(B), 0, run(B, on=S1))]


def test_a_start_that_failed_gives_its_slot_to_the_next() -> None:
    core = agent(Desired(run(A)), laid_out(A), Desired(stop(A, 2)), Desired(run(B)), laid_out(B))

    actions = core.handle(StartFailed(FIRST, "no zygote"))

    assert actions == [
        Say(refused(A, error="no zygote")),
        RemoveWorker(FIRST),
        StartWorker(worker(B), 0, run(B)),
        Say(cleared(A, 2)),
    ]


# --- stopping


def test_a_worker_is_stopped_gently_and_then_by_force() -> None:
    core = agent(*alive())

    assert wanted(core, stop(A, 2)) == [Terminate(FIRST)]
    assert core.handle(GraceOver(FIRST)) == [Kill(FIRST)]
    assert core.handle(Ended(FIRST, None, SIGKILL, unseen=False)) == [
        Say(exited(A, signal=SIGKILL)),
        Say(cleared(A, 2)),
    ]


def test_a_worker_that_stopped_in_time_is_not_killed() -> None:
    core = agent(*alive(), Desired(stop(A, 2)), Ended(FIRST, None, SIGTERM, unseen=False))

    assert core.handle(GraceOver(FIRST)) == []


def test_a_worker_is_asked_to_stop_only_once() -> None:
    core = agent(*alive(), Desired(stop(A, 2)))

    assert wanted(core, stop(A, 3, forget=True)) == []


def test_a_worker_that_is_called_off_while_it_starts_is_stopped_when_it_has() -> None:
    core = agent(Desired(run(A)), laid_out(A))

    assert wanted(core, stop(A, 2)) == []
    assert core.handle(Started(FIRST, 100, 7)) == [
        Say(started(A, pid=100)),
        Terminate(FIRST),
    ]


def test_a_worker_that_was_called_off_before_it_started_is_said_to_be_cleared() -> None:
    core = agent(Desired(run(A)))

    assert wanted(core, stop(A, 2)) == [Say(cleared(A, 2))]
    assert core.handle(laid_out(A)) == []


def test_it_is_said_once_that_nothing_older_is_left() -> None:
    core = agent(Desired(run(A)), Desired(stop(A, 2)))

    assert core.handle(laid_out(A)) == []
    assert wanted(core, stop(A, 2, term=2)) == []
    assert wanted(core, stop(A, 4)) == [Say(cleared(A, 4))]


def test_it_is_not_said_while_a_process_is_still_leaving() -> None:
    core = agent(*alive(), Desired(run(A, 3)))

    assert wanted(core, stop(A, 4)) == []
    assert core.handle(ended(code=0)) == [Say(exited(A, code=0)), Say(cleared(A, 4))]


# --- the group


def test_a_worker_is_told_to_switch_when_it_is_ordered() -> None:
    core = agent(*alive(), Connected(FIRST), ReportRead(FIRST, ready(A)))

    assert wanted(core, switch(A)) == [OrderSwitch(FIRST, Version(1))]


def test_a_worker_that_only_prepares_is_not_told_to_switch() -> None:
    assert agent(*alive()).handle(Connected(FIRST)) == []


def test_a_worker_that_starts_after_the_order_is_told_to_switch_at_once() -> None:
    core = agent(Desired(switch(A)), laid_out(A))

    assert core.handle(Started(FIRST, 100, 7)) == [
        Say(started(A, pid=100)),
        OrderSwitch(FIRST, Version(1)),
    ]


def test_a_worker_that_connects_again_is_told_again() -> None:
    core = agent(*alive(), Desired(switch(A)))

    assert core.handle(Connected(FIRST)) == [OrderSwitch(FIRST, Version(1))]


def test_a_worker_that_connects_again_is_not_told_nothing() -> None:
    core = agent(*alive(), Desired(switch(A)))

    assert OrderSwitch(FIRST, Version(1)) in core.handle(Connected(FIRST))


def test_a_member_of_its_group_is_not_told_again() -> None:
    core = agent(*alive(), Desired(switch(A)))

    assert core.handle(ReportRead(FIRST, formed(A))) == [Say(formed(A))]
    assert core.handle(Connected(FIRST)) == []
    assert wanted(core, settle(A)) == []


def test_a_worker_that_is_to_stop_is_not_told_to_switch() -> None:
    core = agent(*alive(), Desired(switch(A)), Desired(stop(A, 2)))

    assert core.handle(Connected(FIRST)) == []


# --- the end of a worker


def test_reports_are_said_as_they_are_read_and_the_exit_behind_them() -> None:
    core = agent(*alive())
    reports = [ready(A), formed(A), epoch_end(A, 1), finished(A, index=4, why="done")]

    said = [core.handle(ReportRead(FIRST, report)) for report in reports]

    assert said == [[Say(report)] for report in reports]
    assert core.handle(ended(code=0)) == [Say(exited(A, code=0))]


def test_an_exit_that_nobody_saw_is_said_as_such() -> None:
    assert agent(*alive()).handle(ended(code=None)) == [Say(exited(A))]


def test_an_exit_is_said_once() -> None:
    core = agent(*alive(), ended(code=0))

    assert core.handle(ended(code=0)) == []


def test_a_folder_is_removed_when_its_logs_are_stored_and_nobody_wants_it() -> None:
    core = agent(*alive(), ended())

    assert wanted(core, stop(A, 2)) == [Say(cleared(A, 2))]
    assert core.handle(LogsStored(FIRST)) == [RemoveWorker(FIRST)]


def test_a_folder_whose_logs_were_stored_early_is_removed_when_nobody_wants_it() -> None:
    core = agent(*alive(), ended())

    assert core.handle(LogsStored(FIRST)) == []
    assert wanted(core, stop(A, 2)) == [RemoveWorker(FIRST), Say(cleared(A, 2))]


def test_a_job_that_ended_is_forgotten_when_nothing_of_it_is_left() -> None:
    core = agent(*alive(), ended())

    assert wanted(core, stop(A, 2, forget=True)) == [Say(cleared(A, 2))]
    assert core.handle(LogsStored(FIRST)) == [RemoveWorker(FIRST), ForgetJob(A)]
    assert core.jobs == {}


def test_a_job_of_which_nothing_was_ever_here_is_forgotten_at_once() -> None:
    core = agent()

    assert wanted(core, stop(A, 2, forget=True)) == [Say(cleared(A, 2)), ForgetJob(A)]
    assert core.jobs == {}


def test_a_job_that_pauses_is_not_forgotten() -> None:
    core = agent(*alive(), ended(), LogsStored(FIRST), Desired(stop(A, 2)))

    assert list(core.jobs) == [A]


@pytest.mark.parametrize("late", [laid_out(A), WorkspaceFailed(A, SNAPSHOT, "no")], ids=repr)
def test_a_forgotten_job_stays_forgotten(late: Event) -> None:
    core = agent(Desired(run(A)), Desired(stop(A, 2, forget=True)))

    assert core.handle(late) == []
    assert core.jobs == {}


def test_what_is_heard_of_an_unknown_worker_changes_nothing() -> None:
    core = agent()

    for event in (
        Started(FIRST, 100, 7),
        StartFailed(FIRST, "no"),
        Connected(FIRST),
        ReportRead(FIRST, ready(A)),
        ended(),
        GraceOver(FIRST),
        LogsStored(FIRST),
    ):
        assert core.handle(event) == []
    assert core == AgentCore(N1)


# --- workers that an earlier life of the agent left


def test_an_adopted_worker_that_is_wanted_goes_on() -> None:
    core = agent(adopted(run(A)))

    assert wanted(core, settle(A)) == [OrderSwitch(FIRST, Version(1))]
    assert core.handle(ReportRead(FIRST, formed(A))) == [Say(formed(A))]
    assert core.handle(ended(code=0)) == [Say(exited(A, code=0))]


def test_an_adopted_worker_that_is_not_wanted_is_stopped() -> None:
    core = agent(adopted(run(A)))

    assert wanted(core, stop(A, 2)) == [Terminate(FIRST)]


def test_an_adopted_worker_that_was_replaced_is_stopped_before_its_slot_is_used() -> None:
    core = agent(adopted(run(A)))

    assert wanted(core, run(A, 3)) == [Terminate(FIRST), FetchWorkspace(A, SNAPSHOT)]
    assert core.handle(laid_out(A)) == []
    assert core.handle(ended(code=15)) == [
        Say(exited(A, code=15)),
        StartWorker(worker(A, 3), 0, run(A, 3)),
        Say(cleared(A, 3)),
    ]


def test_an_adopted_worker_of_which_nothing_is_heard_is_left_alone_on_its_slot() -> None:
    core = agent(adopted(run(A)), Desired(run(B)))

    assert core.handle(laid_out(B)) == []
    assert core.handle(ReportRead(FIRST, epoch_end(A, 1))) == [Say(epoch_end(A, 1))]
    assert core.handle(ended()) == [
        Say(exited(A, code=0)),
        StartWorker(worker(B), 0, run(B)),
    ]


def test_an_adopted_worker_that_had_ended_says_so_and_is_not_started_again() -> None:
    core = agent(adopted(run(A)))

    assert core.handle(ended()) == [Say(exited(A, code=0))]
    assert wanted(core, settle(A)) == []


# --- the picture for the greeting


def test_the_greeting_names_every_process_and_none_that_only_waits() -> None:
    core = agent(
        *alive(A),
        Desired(run(B, on=S1)),
        laid_out(B),
        Desired(run(JobId("c-3"))),
        ended(A, code=3),
    )

    assert core.seen() == (
        seen(A, pid=100, ended=True, code=3),
        seen(B, slot=1, pid=None),
    )


def test_an_empty_node_greets_with_nothing() -> None:
    nothing: tuple[WorkerSeen, ...] = ()
    assert agent().seen() == nothing
