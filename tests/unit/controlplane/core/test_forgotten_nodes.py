"""A lost node that is forgotten leaves no slot, no worker and no name behind."""

from __future__ import annotations

from controlplane.core.inputs import NodeForgotten, NodeLost
from controlplane.core.model.job_phases import Phase
from tests.support.builders import N1, N2, S0, T0, A, greeting, news
from tests.support.controller import Controller, cluster_of, running

GONE = NodeForgotten(node=N1, user="bob")


def lost() -> Controller:
    """Job a trained on a node that is lost now; another node is up."""
    controller = running(cluster_of(n1=1, n2=1))
    controller.take(NodeLost(node=N1, silent_s=40.0))
    return controller


def test_a_forgotten_node_is_gone_and_its_job_trains_elsewhere() -> None:
    controller = lost()

    assert news("node.forgotten", N1, user="bob") in controller.take(GONE)

    state = controller.state
    assert list(state.nodes) == [N2]
    assert (list(state.slot_index.slots()), state.slot_index.owners()) == ([T0], {})
    assert controller.job(A).workers == {}
    controller.place({A: T0})
    assert controller.job(A).phase is Phase.STARTING


def test_a_node_that_is_not_lost_stays() -> None:
    controller = running(cluster_of(n1=1))

    controller.take(GONE)

    assert list(controller.state.nodes) == [N1]
    assert controller.job(A).phase is Phase.RUNNING


def test_an_agent_that_returns_joins_as_a_new_node() -> None:
    controller = lost()
    controller.take(GONE)

    assert news("node.joined", N1, slots=1) in controller.take(greeting(N1))
    assert S0 in controller.state.slot_index.slots()
