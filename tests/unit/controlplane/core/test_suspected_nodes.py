"""A node on which scripts fail before training is suspected, and not the scripts."""

from __future__ import annotations

from typing import Any, Final

from controlplane.core.inputs import UndrainRequested
from schemas.ids import JobId, SlotId
from tests.support.builders import N1, S0, T0, A, exited, formed, news, raised, ready, started
from tests.support.controller import Controller, cluster_of
from tests.unit.controlplane.core.steps import Story, place, played, stories, submit, told

CUDA = "RuntimeError: CUDA error"


UNDRAIN = UndrainRequested(node=N1, user="bob")


def fails(job: JobId, version: int = 1, on: SlotId = S0) -> list[Any]:
    """Job `job` starts on a slot, and its script fails before it trains."""
    return [
        place({job: on}), started(job, version),
        raised(job, version, index=1, error=CUDA, where="train.py:1"), exited(job, version, code=1),
    ]  # fmt: skip


def fallen(jobs: int, **spec: object) -> Controller:
    """Some jobs, one after the other, failed on the first of two nodes."""
    names = [JobId(f"a-{number}") for number in range(1, jobs + 1)]
    return told(
        cluster_of(n1=1, n2=1),
        *(step for name in names for step in (submit("a", **spec), *fails(name))),
    )


def suspicion(controller: Controller) -> str:
    return controller.state.nodes[N1].suspicion


def strikes(controller: Controller) -> object:
    return controller.state.nodes[N1].strikes


B3 = JobId("b-3")
SUSPECTED: Final[dict[str, Story]] = {
    "the first failure before training is not counted and tried elsewhere": [
        lambda: fallen(1),
        {
            "phase": "paused", "attempts.failures": 0, "usable": {S0: True, T0: True},
            "reason": f"{CUDA} (train.py:1) (exit code 1); before training on node n1, which may be the cause: tries another one, not counted",
        },
    ],
    "a script that fails on two nodes has failed and no node is blamed": [
        lambda: fallen(1), 60.0, *fails(A, 3, T0), {"phase": "failed", strikes: {}},
    ],
    "a node on which three jobs failed in a row gets no more until an operator returns it": [
        lambda: fallen(3),
        {
            "usable": {S0: False, T0: True},
            suspicion: (
                "jobs failed here before training: a-1, a-2, a-3; "
                "repair it, then `ones node undrain n1`"
            ),
        },
        UNDRAIN, {"first": news("node.healthy", N1), "usable": {S0: True, T0: True}},
    ],
    "failures of one user take no node from others": [
        lambda: told(cluster_of(n1=1, n2=1), submit("b", user="bob")),
        *(step for at in (2, 3, 4, 5) for step in (submit("a"), *fails(JobId(f"a-{at}")))),
        {"usable": {S0: True, T0: True}, suspicion: ""},
        *fails(JobId("b-1")), {"usable": {S0: False, T0: True}},
    ],
    "a job that trains on a node clears it": [
        lambda: fallen(2), submit("b"), place({B3: S0}), started(B3), ready(B3), formed(B3), {strikes: {}},
    ],
    "a job that must not run twice fails at once": [lambda: fallen(1, on_loss="fail"), {"phase": "failed"}],
    "without another node a failure is the script's": [
        lambda: cluster_of(n1=1), submit(), *fails(A), {"phase": "failed"},
    ],
}  # fmt: skip


@stories(SUSPECTED)
def test_a_node_is_suspected_before_scripts_are(story: Story) -> None:
    for found, expected in played(*story):
        assert found == expected
