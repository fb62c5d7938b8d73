"""A drain is a resize away: what each job of a node that is drained does, and what is left of it."""

from __future__ import annotations

from controlplane.core.inputs import DrainDue, DrainExpired, DrainRequested, UndrainRequested
from controlplane.core.model.job_phases import Phase
from controlplane.core.model.node import NodePhase
from schemas.ids import NodeId, SlotId
from tests.support.builders import (
    BATCH,
    N1,
    N2,
    S0,
    T0,
    T1,
    A,
    exited,
    formed,
    greeting,
    join_failed,
    news,
    ready,
    started,
    store,
    suspended,
)
from tests.support.controller import Controller, cluster_of, starting, training

WHY = "n1 is drained by ann: new kernel"


def drain(node: NodeId = N1, within_s: float | None = None) -> DrainRequested:
    return DrainRequested(node=node, user="ann", reason="new kernel", within_s=within_s)


def slots_of(controller: Controller) -> list[SlotId]:
    job = controller.job(A)
    group = job.change.group if job.change is not None else job.group
    return [member.slot for member in group.members] if group is not None else []


def usable(controller: Controller) -> list[SlotId]:
    return [slot.slot for slot in controller.view().slots if slot.usable]


def test_a_node_that_is_drained_takes_no_new_work_until_it_is_given_back() -> None:
    controller = cluster_of(n1=1, n2=1)
    controller.submit("a")

    asked = controller.take(drain(within_s=60.0))
    controller.place({A: S0})

    announced = news("node.draining", N1, user="ann", reason="new kernel", within_s=60.0)
    assert announced in asked
    assert usable(controller) == [T0]
    assert controller.job(A).phase is Phase.QUEUED
    assert news("node.undrained", N1, user="bob") in controller.take(
        UndrainRequested(node=N1, user="bob")
    )
    assert usable(controller) == [S0, T0]
    assert controller.replayed() == controller.state


def test_a_group_grows_to_free_slots_elsewhere_and_then_leaves_the_node() -> None:
    controller = training(cluster_of(n1=2, n2=2), S0)

    controller.take(drain())
    assert slots_of(controller) == [S0, T0]
    controller.tell(N1, store(A, index=3, group=2, port=29500))
    controller.tell(N2, started(A, 2, rank=1, pid=7))
    controller.tell(N2, ready(A, 2, rank=1))
    controller.tell(N1, formed(A, index=4, group=2))
    controller.tell(N2, formed(A, 2, rank=1, index=2, group=2))
    assert slots_of(controller) == [T0]
    controller.tell(N2, formed(A, 2, rank=1, index=3, group=3))
    empty = controller.tell(N1, exited(A, code=0))

    assert controller.job(A).phase is Phase.RUNNING
    assert controller.job(A).attempts.losses == 0
    assert news("node.drained", N1, took_s=0.0) in empty
    assert [(one.code, one.by, one.reason) for one in controller.history_of(A).decisions[1:]] == [
        ("drain", "operator", f"{WHY}; grows elsewhere first"),
        ("drain", "operator", f"{WHY}; keeps 1 of 2 slots"),
    ]


def test_without_room_elsewhere_a_group_keeps_what_it_has_there() -> None:
    controller = training(cluster_of(n1=1, n2=1), S0, T0)

    controller.take(drain())

    assert slots_of(controller) == [T0]


def test_without_any_slot_elsewhere_a_job_pauses_with_its_state_and_starts_where_there_are() -> (
    None
):
    controller = training(cluster_of(n1=1), S0)

    controller.take(drain())
    controller.tell(N1, suspended(A, index=3, group=2))
    controller.tell(N1, exited(A, code=0))
    controller.take(greeting(N2))
    controller.place({A: T0})

    job = controller.job(A)
    assert job.phase is Phase.STARTING
    assert job.progress.step == 20
    assert (job.attempts.losses, job.override) == (0, None)


def test_a_group_below_its_least_elsewhere_pauses() -> None:
    controller = training(cluster_of(n1=1, n2=1), S0, T0, slots=(2, 4))

    controller.take(drain())

    assert slots_of(controller) == []
    assert controller.job(A).change is not None


def test_growth_that_fails_is_not_tried_again() -> None:
    controller = training(cluster_of(n1=1, n2=2), S0, T0)

    controller.take(drain())
    assert slots_of(controller) == [S0, T0, T1]
    controller.tell(N2, exited(A, 2, rank=2, code=1))
    assert controller.job(A).phase is Phase.RUNNING
    assert controller.due() == []
    controller.now += 60.0
    assert controller.due() == [DrainDue(node=N1)]
    controller.take(DrainDue(node=N1))

    assert slots_of(controller) == [T0]


def test_a_job_that_starts_there_is_put_back() -> None:
    controller = starting(cluster_of(n1=1, n2=1))

    controller.take(drain())

    assert controller.job(A).phase is Phase.PAUSED
    assert controller.job(A).attempts.losses == 0


def test_a_newcomer_that_is_prepared_there_is_called_off() -> None:
    controller = training(cluster_of(n1=1, n2=1), T0)
    controller.place({A: {T0: BATCH // 2, S0: BATCH // 2}})

    controller.take(drain())

    assert slots_of(controller) == [T0]
    assert controller.job(A).phase is Phase.RUNNING


def test_at_the_deadline_what_remains_is_stopped_and_waits_for_slots() -> None:
    controller = training(cluster_of(n1=1), S0, epochs=1)
    controller.take(drain(within_s=60.0))
    controller.now += 60.0
    assert controller.due() == [DrainExpired(node=N1)]

    controller.take(DrainExpired(node=N1))
    controller.tell(N1, exited(A, signal=9))

    job = controller.job(A)
    assert (job.phase, job.reason) == (
        Phase.PAUSED, "node n1 is drained by ann: new kernel; resumes after epoch 1"
    )  # fmt: skip
    assert controller.due() == []
    drained = controller.state.nodes[N1].drain
    assert drained is not None
    assert (drained.deadline_passed, drained.announced_empty) == (True, True)


def test_at_the_deadline_the_others_go_on_without_those_that_remain() -> None:
    controller = training(cluster_of(n1=1, n2=2), S0, T0, slots=(1, 2))
    controller.take(drain(within_s=60.0))  # grows, and its newcomer is never ready
    controller.now += 61.0

    controller.take(DrainExpired(node=N1))

    assert slots_of(controller) == [T0]
    assert controller.job(A).phase is Phase.RESCALING


def test_a_deadline_that_was_moved_does_not_pass() -> None:
    controller = training(cluster_of(n1=1), S0)
    controller.take(drain(within_s=60.0))
    controller.take(drain(within_s=600.0))
    controller.now += 61.0

    before = controller.job(A).version
    controller.take(DrainExpired(node=N1))

    assert controller.due() == []
    assert controller.job(A).version == before


def test_a_drain_outlives_the_node_s_silence_and_its_next_agent() -> None:
    controller = cluster_of(n1=1, n2=1)
    controller.take(drain())
    controller.lose(N1)
    controller.start()

    controller.take(greeting(N1, boot="boot-2"))

    assert controller.state.nodes[N1].phase is NodePhase.UP
    assert usable(controller) == []


def test_a_drain_of_a_node_that_never_joined_changes_nothing() -> None:
    controller = cluster_of(n1=1)

    assert controller.take(drain(NodeId("n9"))) == []
    assert controller.take(UndrainRequested(node=N1, user="ann")) == []


def test_a_join_that_fails_while_a_node_is_drained_ends_nothing() -> None:
    controller = training(cluster_of(n1=1, n2=1), S0, slots=(1, 2))
    controller.take(drain())
    controller.tell(N1, store(A, index=3, group=2, port=29500))
    controller.tell(N2, started(A, 2, rank=1))
    controller.tell(N2, ready(A, 2, rank=1))

    controller.tell(N1, join_failed(A, index=4, group=2, error="no route"))

    assert controller.job(A).phase is Phase.RUNNING
    assert slots_of(controller) == [S0]
