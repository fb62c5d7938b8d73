"""A node that cannot start workers is offered none."""

from __future__ import annotations

from typing import Final

from controlplane.core.commands import RequestPlan
from controlplane.core.inputs import NodeSuspected
from controlplane.service.api.replies import node_rows
from schemas.wire.agent import NodeHealth
from tests.support.builders import BATCH, N1, S0, S1, T0, A, greeting, news, refused, send, stop
from tests.support.controller import Controller, cluster_of, running, starting
from tests.unit.controlplane.core.steps import Story, place, played, replays, stories

FULL = "/var/lib/ones is full; free space on it"
ILL, WELL = (N1, NodeHealth(problems=(FULL,))), (N1, NodeHealth(problems=()))
WORSE = (N1, NodeHealth(problems=(FULL, "b")))


def shown(controller: Controller) -> list[tuple[str, str]]:
    return [(node.state, node.reason) for _, node in node_rows(controller.state).after(0)]


def one() -> Controller:
    return cluster_of(n1=1)


def trains() -> Controller:
    return running(cluster_of(n1=2))


HEALTH: Final[dict[str, Story]] = {
    "a node that cannot start workers gets none and keeps those that train": [
        trains, ILL,
        {
            "commands": [news("node.unhealthy", N1, reason=FULL), RequestPlan()],
            "usable": {S0: False, S1: False}, shown: [("unhealthy", FULL)], "phase": "running",
        },
        place({A: {S0: 16, S1: BATCH - 16}}), {"commands": [RequestPlan()], replays: True},
    ],
    "a node that is well again is offered work again": [
        trains, ILL, WELL,
        {"commands": [news("node.healthy", N1), RequestPlan()], "usable": {S0: False, S1: True}, shown: [("up", "")]},
    ],
    "problems that change are announced and change no plan": [
        one, ILL, WORSE, {"commands": [news("node.unhealthy", N1, reason=f"{FULL}; b")]}, WORSE, {"commands": []},
    ],
    "a greeting says how a node is now": [
        one, greeting(N1, boot="boot-2", problems=(FULL,)),
        {"first": news("node.unhealthy", N1, reason=FULL), "usable": {S0: False}},
        greeting(N1, boot="boot-3"), {"first": news("node.healthy", N1), "usable": {S0: True}},
    ],
    "a node that is silent as well is shown as silent": [
        one, ILL, NodeSuspected(node=N1, silent_s=6.0), {shown: [("suspect", FULL)]},
    ],
    "a job whose worker a node could not start for its own fault goes elsewhere": [
        lambda: starting(cluster_of(n1=1, n2=1)), refused(A, error="no space left on device", node_fault=True),
        {
            "commands": [
                send(N1, stop(A, 2)),
                news("job.paused", A, reason="node n1: no space left on device; restarts from the beginning"),
                RequestPlan(),
            ],
        },
        place({A: T0}), {"slots": [T0]},
    ],
}  # fmt: skip


@stories(HEALTH)
def test_a_node_says_how_it_is(story: Story) -> None:
    for found, expected in played(*story):
        assert found == expected
