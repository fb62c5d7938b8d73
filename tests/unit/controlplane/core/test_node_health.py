"""A node that cannot start workers is offered none."""

from __future__ import annotations

from controlplane.core.commands import RequestPlan
from controlplane.core.inputs import NodeSuspected
from controlplane.core.model.job_phases import Phase
from controlplane.service.api.replies import node_rows
from schemas.ids import SlotId
from schemas.wire.agent import NodeHealth
from tests.support.builders import BATCH, N1, S0, S1, T0, A, greeting, news, refused, send, stop
from tests.support.controller import Controller, cluster_of, running, starting

FULL = "/var/lib/ones is full; free space on it"


def usable(controller: Controller) -> dict[SlotId, bool]:
    return {slot.slot: slot.usable for slot in controller.view().slots}


def shown(controller: Controller) -> list[tuple[str, str]]:
    return [(node.state, node.reason) for _, node in node_rows(controller.state).after(0)]


def test_a_node_that_cannot_start_workers_gets_none_and_keeps_those_that_train() -> None:
    controller = running(cluster_of(n1=2))

    commands = controller.tell(N1, NodeHealth(problems=(FULL,)))

    assert commands == [news("node.unhealthy", N1, reason=FULL), RequestPlan()]
    assert usable(controller) == {S0: False, S1: False}
    assert shown(controller) == [("unhealthy", FULL)]
    assert controller.job(A).phase is Phase.RUNNING
    assert controller.place({A: {S0: 16, S1: BATCH - 16}}) == [RequestPlan()]
    assert controller.replayed() == controller.state


def test_a_node_that_is_well_again_is_offered_work_again() -> None:
    controller = running(cluster_of(n1=2))
    controller.tell(N1, NodeHealth(problems=(FULL,)))

    commands = controller.tell(N1, NodeHealth(problems=()))

    assert commands == [news("node.healthy", N1), RequestPlan()]
    assert usable(controller) == {S0: False, S1: True}
    assert shown(controller) == [("up", "")]


def test_problems_that_change_are_announced_and_change_no_plan() -> None:
    controller = cluster_of(n1=1)
    controller.tell(N1, NodeHealth(problems=(FULL,)))

    assert controller.tell(N1, NodeHealth(problems=(FULL, "b"))) == [
        news("node.unhealthy", N1, reason=f"{FULL}; b")
    ]
    assert controller.tell(N1, NodeHealth(problems=(FULL, "b"))) == []


def test_a_greeting_says_how_a_node_is_now() -> None:
    controller = cluster_of(n1=1)

    assert news("node.unhealthy", N1, reason=FULL) in controller.take(
        greeting(N1, boot="boot-2", problems=(FULL,))
    )
    assert usable(controller) == {S0: False}
    assert news("node.healthy", N1) in controller.take(greeting(N1, boot="boot-3"))
    assert usable(controller) == {S0: True}


def test_a_node_that_is_silent_as_well_is_shown_as_silent() -> None:
    controller = cluster_of(n1=1)
    controller.tell(N1, NodeHealth(problems=(FULL,)))

    controller.take(NodeSuspected(node=N1, silent_s=6.0))

    assert shown(controller) == [("suspect", FULL)]


def test_a_job_whose_worker_a_node_could_not_start_for_its_own_fault_goes_elsewhere() -> None:
    controller = starting(cluster_of(n1=1, n2=1))

    commands = controller.tell(N1, refused(A, error="no space left on device", node_fault=True))

    why = "node n1: no space left on device; restarts from the beginning"
    assert commands == [send(N1, stop(A, 2)), news("job.paused", A, reason=why), RequestPlan()]
    controller.place({A: T0})
    assert [member.slot for member in controller.job(A).members()] == [T0]
