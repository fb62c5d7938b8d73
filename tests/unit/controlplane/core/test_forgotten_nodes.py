"""A lost node that is forgotten leaves no slot, no worker and no name behind."""

from __future__ import annotations

from controlplane.core.inputs import NodeForgotten
from tests.support.builders import N1, N2, S0, T0, A, greeting, news
from tests.support.controller import Controller, cluster_of, running
from tests.unit.controlplane.core.steps import Story, lose, place, played, stories, told

GONE = NodeForgotten(node=N1, user="bob")


def lost() -> Controller:
    """Job a trained on a node that is lost now; another node is up."""
    return told(running(cluster_of(n1=1, n2=1)), lose(N1))


@stories(
    {
        "a forgotten node is gone and its job trains elsewhere": [
            lost, GONE, {"news of nodes": [news("node.forgotten", N1, user="bob")], "nodes' phases": {N2: "up"}},
            {"usable": {T0: True}, "owners": {}, "workers": {}}, place({A: T0}), {"phase": "starting"},
        ],
        "a node that is not lost stays": [running, GONE, {"nodes' phases": {N1: "up"}, "phase": "running"}],
        "an agent that returns joins as a new node": [
            lost, GONE, greeting(N1), {"first": news("node.joined", N1, slots=1), "usable": {S0: True, T0: True}},
        ],
    }
)  # fmt: skip
def test_a_forgotten_node_leaves_nothing_behind(story: Story) -> None:
    for found, expected in played(*story):
        assert found == expected
