"""Nodes that are reserved for the jobs of some projects and users."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.commands import Announce
from controlplane.core.handlers.drains import LEAD_S
from controlplane.core.inputs import (
    DrainDue,
    DrainExpired,
    DrainRequested,
    NodesReserved,
    ReservationCancelled,
    UndrainRequested,
)
from controlplane.core.model.job_phases import Phase
from controlplane.core.plan_check import check, difference
from controlplane.core.plan_cycle import PlanCycle
from controlplane.policy.api import Plan, Reason
from controlplane.policy.sharing.turns import at_once
from schemas.ids import JobId, NodeId, Seconds, SlotId, node_of
from schemas.nodes import Reservation
from tests.support.builders import BATCH, N1, N2, S0, S1, T0, T1, A, B, proposal, resized
from tests.support.controller import Controller, cluster_of
from tests.support.sizes import examples
from tests.unit.controlplane.core.test_hostile_reports import expected

GANG: dict[str, Any] = {
    "kind": "torchrun", "command": ("python", "train.py"), "script": "", "batch_size": 0,
}  # fmt: skip
DUE, EXPIRED = DrainDue(node=N1), DrainExpired(node=N1)
FOR_VISION = "reservation r-1 for project vision"


def cluster(**fields: Any) -> tuple[Controller, float]:
    """Nodes n1 and n2 with two slots each; n1 is reserved for project vision in 1000 s."""
    controller = cluster_of(n1=2, n2=2)
    begin = controller.now + 1000.0
    controller.take(reserved(begin, **fields))
    return controller, begin


def reserved(begin: float, *nodes: NodeId, **fields: Any) -> NodesReserved:
    times = {"begin": Seconds(begin), "end": Seconds(begin + 500.0)}
    usual = {"projects": ("vision",), "user": "ann", **times, **fields}
    return NodesReserved(nodes=nodes or (N1,), reservation=Reservation(**usual))


def at(controller: Controller, now: float) -> None:
    """Let time pass, and all that is due then happen."""
    controller.now = now
    for _ in range(10):
        for event in controller.due():
            controller.take(event)


def well(controller: Controller) -> None:
    """Let the workers of all jobs do what they should until nothing is left to do."""
    for _ in range(100):
        jobs = [controller.job(name) for name in controller.names]
        said = next((one for job in jobs for one in expected(job)), None)
        if said is None:
            return
        controller.tell(*said)


def serve(controller: Controller) -> PlanCycle:
    """Let claims start, as the service does."""
    cycle, now = PlanCycle(lambda: controller.reactor), Seconds(controller.now)
    plan = difference(at_once(cycle.serve_claims(now)), controller.state, now, whole=False)
    if not plan.empty:
        controller.take(proposal(plan.local_batch, based_on=controller.state.version))
    return cycle


def nodes_of(controller: Controller, job: JobId) -> set[NodeId]:
    return {node_of(slot) for slot in controller.state.slot_index.allocations().get(job, {})}


def refusal(controller: Controller, job: JobId, slot: SlotId) -> dict[JobId, str]:
    plan = Plan(based_on=controller.state.version, local_batch={job: {slot: BATCH}})
    return dict(check(plan, controller.state, Seconds(controller.now)).refused)


# --- before, during and after


def test_elastic_jobs_of_others_leave_before_and_come_back_after() -> None:
    controller, begin = cluster()
    controller.submit("a", slots=(1, 4), max_batch_size=4 * BATCH)
    controller.place({A: dict.fromkeys((S0, S1, T0), BATCH)})
    well(controller)
    assert controller.due(999.0 - LEAD_S) == []

    at(controller, begin - LEAD_S)
    well(controller)

    assert nodes_of(controller, A) == {N2}
    assert f"n1 is kept for {FOR_VISION} from 1970-01-01T00:33:20Z" in controller.job(A).reason
    assert refusal(controller, A, S0) == {A: "slot n1/0 is reserved for others"}
    assert controller.state.nodes[N1].usable
    at(controller, begin + 500.0)
    assert refusal(controller, A, S0) == {}
    assert (controller.state.nodes[N1].keeps, controller.state.draining) == ([], {})
    assert controller.replayed() == controller.state


def test_members_start_inside_and_run_across_the_end() -> None:
    controller, begin = cluster(users=("eve",), projects=())
    controller.submit("a", user="eve", **GANG, slots=4)
    at(controller, begin + 100.0)

    serve(controller)
    well(controller)
    at(controller, begin + 500.0)

    assert (controller.job(A).phase, nodes_of(controller, A)) == (Phase.RUNNING, {N1, N2})


def test_a_program_of_another_starts_there_only_if_it_ends_before() -> None:
    controller, begin = cluster()
    controller.submit("a", **GANG, slots=4, max_run_s=900.0)
    controller.submit("b", **GANG, slots=4, max_run_s=1100.0)

    cycle = serve(controller)
    assert nodes_of(controller, A) == {N1, N2}
    controller.now = begin - 10.0
    cycle = serve(controller)

    text = f"would run into the {FOR_VISION} of n1, and waits for its end"
    assert cycle.claim_reasons[B] == Reason("reservation", text, {"needs": 4.0})


def test_what_still_runs_at_the_begin_is_stopped_unless_it_is_a_member() -> None:
    controller, begin = cluster()
    controller.submit("a", **GANG, slots=1, on_loss="restart")
    controller.submit("b", project="vision", **GANG, slots=1)
    plan = {A: {S0: 1}, B: {S1: 1}}
    controller.take(proposal(plan, based_on=controller.state.version))
    well(controller)
    controller.now = begin - LEAD_S
    controller.take(DUE)

    assert EXPIRED in controller.due(LEAD_S)
    controller.now = begin
    controller.take(EXPIRED)

    assert (controller.job(A).phase, controller.job(B).phase) == (Phase.PAUSED, Phase.RUNNING)


def test_policies_see_reserved_slots_only_if_a_job_may_use_them() -> None:
    controller, begin = cluster()
    controller.submit("a", slots=(3, 4))
    at(controller, begin)
    cycle = PlanCycle(lambda: controller.reactor)

    view = at_once(cycle.view(Seconds(controller.now)))

    assert [slot.slot for slot in view.slots if slot.usable] == [T0, T1]
    text = f"needs 3 slots, could have 2 beside the {FOR_VISION} of n1"
    assert cycle.claim_reasons == {
        A: Reason("reservation", text, {"needs": 3.0, "slots": 2.0}),
    }
    controller.submit("b", project="vision", slots=(1, 4))
    view = at_once(cycle.view(Seconds(controller.now)))
    assert [slot.slot for slot in view.slots if slot.usable] == [S0, S1, T0, T1]
    plan = Plan(based_on=controller.state.version, local_batch={B: {T0: 32, S0: 32}})
    assert cycle.merged(plan).local_batch == plan.local_batch


def test_an_operator_cannot_order_a_job_of_another_onto_a_reserved_slot() -> None:
    controller, begin = cluster()
    controller.submit("a", slots=(1, 4))
    at(controller, begin)

    controller.take(resized(A, on=(S0,)))

    assert controller.job(A).phase is Phase.QUEUED
    assert "waiting for slots" in controller.job(A).override_wait_reason


# --- requests


def test_one_request_reserves_several_nodes_under_one_id_and_cancels_them_together() -> None:
    controller = cluster_of(n1=1, n2=1)
    begin = controller.now + 1000.0

    told = controller.take(reserved(begin, N1, N2, reason="course"))

    text = f"{FOR_VISION} from 1970-01-01T00:33:20Z to 1970-01-01T00:41:40Z by ann: course"
    said = [command.event for command in told if isinstance(command, Announce)]
    assert [(one.event, one.node, one.detail) for one in said] == [
        ("node.reserved", node, {"reason": text}) for node in (N1, N2)
    ]
    windows = {node.node: node.reservations for node in controller.state.nodes.values()}
    assert windows[N1] == windows[N2]
    assert windows[N1][0].id == "r-1"
    at(controller, begin)
    controller.take(ReservationCancelled(id="r-1", user="ann"))
    assert [node.reservations for node in controller.state.nodes.values()] == [[], []]
    assert controller.state.draining == {}


def test_a_reservation_survives_a_drain_of_its_node() -> None:
    controller, begin = cluster()
    at(controller, begin)
    maintenance = reserved(begin + 600.0, projects=(), user="ann")
    controller.take(maintenance)
    at(controller, begin + 600.0 - LEAD_S)
    assert not controller.state.nodes[N1].usable

    at(controller, begin + 1100.0)

    assert controller.state.nodes[N1].usable
    assert controller.state.nodes[N1].reservations == []


def test_cancelled_maintenance_ends_its_drain_but_not_that_of_an_operator() -> None:
    controller, begin = cluster(projects=())
    at(controller, begin)
    controller.take(ReservationCancelled(id="r-1", user="ann"))
    assert controller.state.nodes[N1].usable

    controller.take(reserved(controller.now + 100.0, projects=()))
    controller.take(DrainRequested(node=N1, user="ann", reason="", within_s=None))
    at(controller, controller.now + 100.0)
    controller.take(ReservationCancelled(id="r-2", user="ann"))

    assert not controller.state.nodes[N1].usable
    assert controller.state.nodes[N1].reservations == []


def test_undrain_ends_reservations_of_its_node() -> None:
    controller, begin = cluster()
    at(controller, begin)

    controller.take(UndrainRequested(node=N1, user="ann"))

    assert (controller.state.nodes[N1].reservations, controller.state.draining) == ([], {})


# --- property

JOBS = st.lists(
    st.tuples(st.sampled_from(["vision", "other"]), st.booleans(), st.sampled_from([None, 400.0])),
    min_size=1,
    max_size=4,
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("place"), st.permutations([S0, S1, T0, T1]), st.integers(1, 4)),
        st.tuples(st.just("pass"), st.sampled_from([20.0, 61.0, 300.0])),
        st.tuples(st.sampled_from(["well", "reserve", "cancel"])),
    ),
    max_size=20,
)


@settings(max_examples=examples(200), deadline=None)
@given(jobs=JOBS, steps=STEPS)
def test_no_slot_of_a_reserved_node_is_held_by_another_job_inside_the_window(
    jobs: list[tuple[str, bool, float | None]], steps: list[tuple[Any, ...]]
) -> None:
    controller = cluster_of(n1=2, n2=2)
    for project, rigid, limit_s in jobs:
        kind = {**GANG, "slots": 1} if rigid else {"slots": (1, 4), "max_batch_size": 256}
        limit = {} if limit_s is None else {"max_run_s": limit_s}
        controller.submit("j", project=project, **kind, **limit)
    serve(controller)
    well(controller)
    controller.take(reserved(controller.now + 70.0))
    for what, *how in steps:
        if what == "place":
            order, many = how
            elastic = [name for name in controller.names if not controller.job(name).spec.rigid]
            plan = {name: dict.fromkeys(order[:many], BATCH) for name in elastic[:1]}
            controller.take(proposal(plan, based_on=controller.state.version))
        elif what == "pass":
            at(controller, controller.now + how[0])
        elif what == "well":
            well(controller)
        elif what == "cancel":
            controller.take(ReservationCancelled(id="r-1", user="ann"))
        elif not any(node.reservations for node in controller.state.nodes.values()):
            controller.take(reserved(controller.now + 70.0, N1, N2))
        serve(controller)
        at(controller, controller.now)
        for name, slots in controller.state.slot_index.allocations().items():
            for node in (controller.state.nodes[node_of(slot)] for slot in slots):
                now = [r for r in node.reservations if r.begin <= controller.now < r.end]
                assert all(one.admits(*controller.job(name).owner) for one in now)
    assert controller.replayed() == controller.state
