"""Which processes the reconciler starts and stops, and who has a slot's device."""

from __future__ import annotations

from signal import SIGKILL, SIGTERM

from nodeagent.reconciler import (
    Connected,
    Desired,
    Ended,
    FetchWorkspace,
    GraceOver,
    GrantSlot,
    Kill,
    LogsStored,
    OrderGroup,
    PublishEvent,
    RemoveWorker,
    Started,
    StartFailed,
    StartWorker,
    Terminate,
    WorkspaceFailed,
    WorkspaceReady,
)
from schemas.ids import JobId
from schemas.wire.agent import JOIN
from tests.support.builders import (
    S0,
    S1,
    SNAPSHOT,
    T0,
    A,
    B,
    cleared,
    exited,
    refused,
    run,
    settle,
    started,
    stop,
    switch,
)
from tests.support.reconciler_events import (
    BOTH,
    FIRST,
    agent,
    alive,
    ended,
    laid_out,
    wanted,
    worker,
)

# --- starting


def test_a_worker_is_started_only_after_its_workspace_is_there() -> None:
    reconciler = agent()

    assert wanted(reconciler, run(A)) == [FetchWorkspace(A, SNAPSHOT, "ann")]
    assert reconciler.handle(laid_out(A)) == [StartWorker(FIRST, 0, run(A))]


def test_a_workspace_is_fetched_once_however_often_it_is_wanted() -> None:
    reconciler = agent()
    delta = run(A, on=BOTH)

    assert wanted(reconciler, delta) == [FetchWorkspace(A, SNAPSHOT, "ann")]
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
        FetchWorkspace(A, SNAPSHOT, "ann"),
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
        FetchWorkspace(A, "6" * 64, "ann"),
    ]

    actions = wanted(reconciler, settle(A, 2, on=S0, born=[(1, 0)]))

    assert actions[-1] == PublishEvent(cleared(A, 3))
    assert reconciler.handle(WorkspaceReady(A, "6" * 64)) == []
