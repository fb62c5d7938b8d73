"""Who may drain a node, and which drains could never be."""

from __future__ import annotations

import math

import pytest

from controlplane.core.inputs import DrainRequested, UndrainRequested
from controlplane.service.api.changes import drain_input
from controlplane.service.api.replies import node_info
from schemas.errors import BadFieldError, UnknownNodeError
from schemas.ids import NodeId
from schemas.transport.keys import Identity
from schemas.wire.client import DrainNode, UndrainNode
from tests.support.builders import N1, S0
from tests.support.controller import cluster_of, training

ANN = Identity("operator", "ann")
DRAIN = DrainNode(node=N1, reason="new kernel", within_s=60.0)
ASKED = DrainRequested(node=N1, user="ann", reason="new kernel", within_s=60.0)


@pytest.mark.parametrize("role", ["operator", "admin"])
def test_operators_and_admins_drain_nodes_and_give_them_back(role: str) -> None:
    controller, who = cluster_of(n1=1), Identity(role, "ann")

    assert drain_input(controller.state, DRAIN, who) == ASKED
    assert drain_input(controller.state, UndrainNode(node=N1), who) is None
    controller.take(ASKED)
    undrained = drain_input(controller.state, UndrainNode(node=N1), who)
    assert undrained == UndrainRequested(node=N1, user="ann")


def test_a_node_that_never_joined_cannot_be_drained() -> None:
    with pytest.raises(UnknownNodeError, match="no node 'n9' ever joined"):
        drain_input(cluster_of(n1=1).state, DrainNode(node=NodeId("n9")), ANN)


@pytest.mark.parametrize("within_s", [math.nan, math.inf, -1.0, 1e12])
def test_a_deadline_that_can_never_come_is_refused(within_s: float) -> None:
    with pytest.raises(BadFieldError, match="within_s"):
        drain_input(cluster_of(n1=1).state, DrainNode(node=N1, within_s=within_s), ANN)


def test_a_reason_is_bounded() -> None:
    with pytest.raises(BadFieldError, match="reason: 501 characters"):
        drain_input(cluster_of(n1=1).state, DrainNode(node=N1, reason="x" * 501), ANN)


def test_the_list_of_nodes_says_how_far_a_drain_is_and_why() -> None:
    controller = training(cluster_of(n1=1, n2=1), S0)

    empty = DrainRequested(node=NodeId("n2"), user="ann", reason="", within_s=None)
    controller.take(empty)
    controller.take(ASKED)

    rows = [node_info(controller.state, NodeId(name)) for name in ("n1", "n2")]
    assert [(row.state, row.reason) for row in rows] == [
        ("draining", "drained by ann: new kernel"),
        ("drained", "drained by ann"),
    ]
