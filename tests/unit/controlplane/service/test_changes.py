"""Checks of drains and resizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from controlplane.core.inputs import (
    DrainRequested,
    NodesReserved,
    SharingChanged,
    UndrainRequested,
)
from controlplane.service.api.changes import (
    check_class,
    check_ordered_slots,
    check_resize,
    check_user_limits,
    drain_input,
    reserve_input,
    reserved_nodes,
)
from controlplane.service.api.replies import node_info
from schemas.errors import BadFieldError, DeniedError, UnknownNodeError
from schemas.ids import JobId, NodeId, Seconds
from schemas.nodes import Reservation
from schemas.sharing import PriorityClass, Sharing, UserLimits
from schemas.transport.keys import Identity
from schemas.wire.client import DrainNode, ReserveNodes, ResizeJob, UndrainNode
from tests.support.builders import N1, N2, S0, A, job_spec, resized
from tests.support.controller import Controller, cluster_of, running, training

ANN = Identity("operator", "ann")
DRAIN = DrainNode(node=N1, reason="new kernel", within_s=60.0)
ASKED = DrainRequested(node=N1, user="ann", reason="new kernel", within_s=60.0)


@pytest.mark.parametrize("role", ["operator", "admin"])
def test_operators_and_admins_drain_and_return_nodes(role: str) -> None:
    controller, who = cluster_of(n1=1), Identity(role, "ann")

    assert drain_input(controller.state, DRAIN, who) == ASKED
    assert drain_input(controller.state, UndrainNode(node=N1), who) is None
    controller.take(ASKED)
    undrained = drain_input(controller.state, UndrainNode(node=N1), who)
    assert undrained == UndrainRequested(node=N1, user="ann")


@pytest.mark.parametrize(
    ("request_", "refusal"),
    [
        (DrainNode(node=NodeId("n9")), "no node 'n9' ever joined"),
        (DrainNode(node=N1, reason="x" * 501), "reason: 501 characters"),
        *((DrainNode(node=N1, within_s=s), "within_s") for s in (math.nan, math.inf, -1.0, 1e12)),
    ],
)
def test_an_impossible_drain_is_refused_with_its_field(request_: DrainNode, refusal: str) -> None:
    with pytest.raises((UnknownNodeError, BadFieldError), match=refusal):
        drain_input(cluster_of(n1=1).state, request_, ANN)


def test_the_list_of_nodes_shows_state_and_reason_of_a_drain() -> None:
    controller = training(cluster_of(n1=1, n2=1), S0)

    empty = DrainRequested(node=NodeId("n2"), user="ann", reason="", within_s=None)
    controller.take(empty)
    controller.take(ASKED)

    rows = [node_info(controller.state, NodeId(name)) for name in ("n1", "n2")]
    assert [(row.state, row.reason) for row in rows] == [
        ("draining", "drained by ann: new kernel"),
        ("drained", "drained by ann"),
    ]


@pytest.mark.parametrize(
    ("limit", "most"),
    [
        (None, "what fits its slots, where the job file has no max_batch_size"),
        (128, "max_batch_size of the job file"),
    ],
)
def test_the_refusal_of_a_batch_names_the_source_of_its_bound(limit: int | None, most: str) -> None:
    controller = running(max_batch_size=limit)

    with pytest.raises(BadFieldError) as error:
        check_resize(controller.reactor.state, controller.job(A), ResizeJob(job=A, batch=4096))

    assert error.value.hint == f"at least one sample for each slot, at most {most}"


def test_the_orders_of_a_user_ask_for_a_bounded_number_of_slots() -> None:
    controller = running(cluster_of(n1=1), slots=(1, 8))
    controller.take(resized(A, 6))
    controller.submit("b", slots=(1, 8))
    state = controller.state

    check_ordered_slots(state, JobId("b-2"), 2, "ann", 8)
    check_ordered_slots(state, A, 8, "ann", 8)  # replaces its own order
    check_ordered_slots(state, JobId("b-2"), 8, "bob", 8)
    with pytest.raises(DeniedError, match="would ask for 9 slots, the limit is 8"):
        check_ordered_slots(state, JobId("b-2"), 3, "ann", 8)


def test_a_rigid_job_cannot_be_resized_and_can_be_paused() -> None:
    controller = cluster_of(n1=2)
    controller.submit("a", kind="command", command=("make",), script="", batch_size=0, slots=2)
    state, job = controller.state, controller.job(A)

    check_resize(state, job, ResizeJob(job=A, slots=0))
    with pytest.raises(BadFieldError) as refused:
        check_resize(state, job, ResizeJob(job=A, slots=1))
    assert refused.value.message == "slots: a command job keeps its 2 slots while it runs"


CLASSES = Sharing(
    classes={
        "urgent": PriorityClass(rank=10, roles=("admin",), users=("cat",)),
        "vision": PriorityClass(rank=5, projects=("vision",)),
        "any": PriorityClass(rank=-5),
    }
)


@pytest.mark.parametrize(
    ("role", "user", "project", "allowed"),
    [
        ("user", "ann", "ann", "any"),
        ("user", "ann", "vision", "vision, any"),
        ("user", "cat", "cat", "urgent, any"),
        ("admin", "dan", "dan", "urgent, any"),
    ],
)
def test_a_job_has_a_class_that_its_user_may_name(
    role: str, user: str, project: str, allowed: str
) -> None:
    controller, who = cluster_of(n1=1), Identity(role, user)
    controller.take(SharingChanged(sharing=CLASSES))

    for name in allowed.split(", "):
        check_class(controller.state, job_spec(job_class=name), project, who)
    check_class(controller.state, job_spec(), project, who)
    for name in {*CLASSES.classes, "fast"} - set(allowed.split(", ")):
        with pytest.raises(BadFieldError) as refused:
            check_class(controller.state, job_spec(job_class=name), project, who)
        assert refused.value.message == f"class: {user} may not use {name!r}"
        assert refused.value.hint == f"choose from {allowed}, or leave it out"


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"slots": 7}, "ann would have 8 slots, the limit for one user is 7"),
        ({"running": 1}, "ann would have 2 running jobs, the limit for one user is 1"),
    ],
)
def test_orders_of_a_user_keep_the_limits_of_the_user(limits: dict[str, int], said: str) -> None:
    controller = running(cluster_of(n1=1), slots=(1, 8))
    controller.submit("b", slots=(1, 8))
    job = controller.job(JobId("b-2"))
    controller.take(SharingChanged(sharing=Sharing(user_limits=UserLimits(**limits))))
    held = len(controller.job(A).members())

    with pytest.raises(DeniedError) as refused:
        check_user_limits(controller.state, job, 8 - held)

    assert refused.value.message == said


KEYS = [ANN, Identity("user", "eve", ("vision",))]
WINDOW = Reservation(begin=Seconds(500.0), end=Seconds(600.0))


def reserve(
    controller: Controller, *nodes: NodeId, now: float = 100.0, **fields: Any
) -> NodesReserved:
    request = ReserveNodes(nodes=nodes or (N1,), reservation=replace(WINDOW, **fields))
    return reserve_input(controller.state, request, ANN, now, KEYS)


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"begin": 99.0}, "begin", "begin: 99 to 600 is not a time to come"),
        ({"begin": 700.0}, "begin", "begin: 700 to 600 is not a time to come"),
        ({"begin": math.nan}, "begin", "begin: nan to 600 is not a time to come"),
        ({"reason": "x" * 501}, "reason", "reason: 501 characters exceed 500"),
        ({"projects": ("visoin",)}, "projects", "projects: 'visoin' is unknown"),
        ({"users": ("bob",)}, "users", "users: 'bob' is unknown"),
        (
            {"begin": 550.0, "end": 700.0},
            "begin",
            "begin: n2 has maintenance from 1970-01-01T00:08:20Z to 1970-01-01T00:10:00Z by ann",
        ),
    ],
)
def test_an_impossible_reservation_names_its_field(
    fields: dict[str, Any], field: str, said: str
) -> None:
    controller = cluster_of(n1=1, n2=1)
    controller.take(reserve(controller, N2))

    with pytest.raises(BadFieldError) as refused:
        reserve(controller, N1, N2, **fields)

    assert (refused.value.message, refused.value.field) == (said, field)
    assert node_info(controller.state, N2).reason.startswith("maintenance from 1970-01-01T00:08")


def test_a_reservation_names_only_known_nodes_and_at_least_one() -> None:
    controller = cluster_of(n1=1)

    with pytest.raises(UnknownNodeError, match="no node 'n9' ever joined"):
        reserve(controller, N1, NodeId("n9"))
    with pytest.raises(BadFieldError, match="nodes: none is named"):
        reserve_input(controller.state, ReserveNodes(nodes=(), reservation=WINDOW), ANN, 1.0, KEYS)
    with pytest.raises(BadFieldError, match="id: no reservation 'r-9'"):
        reserved_nodes(controller.state, "r-9")


def test_a_reservation_is_made_by_its_sender_and_shown_with_its_nodes() -> None:
    controller = cluster_of(n1=1)

    controller.take(reserve(controller, N1, N1, projects=("vision",), users=("eve",), user="bob"))

    made = replace(WINDOW, projects=("vision",), users=("eve",), user="ann", id="r-1")
    assert node_info(controller.state, N1).reservations == (made,)
    assert reserved_nodes(controller.state, "r-1") == [N1]
