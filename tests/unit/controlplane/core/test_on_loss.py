"""What becomes of a job whose workers are lost, as its user wants it."""

from __future__ import annotations

import signal
from functools import partial
from typing import Any, Final

import pytest

from controlplane.core.inputs import NodeSuspected
from tests.support.builders import N1, N2, S0, T0, A, exited, refused, started
from tests.support.controller import cluster_of, running, starting, training
from tests.unit.controlplane.core.steps import Story, do, lose, played, replays, stories

GONE = "node n1 has been silent for 30 s"
KILLED = "a worker was killed by SIGKILL"


def becomes(phase: str, reason: str) -> dict[Any, Any]:
    return {"phase": phase, "reason": reason, replays: True}


LOST: Final[dict[str, Story]] = {
    **{
        f"a job that loses all it had does what its user wants: {spec or 'nothing said'}, {why}": [
            partial(running, epochs=2, **spec), lost, becomes(phase, f"{why}; {then}"),
        ]
        for spec, phase, then in (
            ({}, "paused", "resumes after epoch 2"),
            ({"on_loss": "restart"}, "paused", "resumes after epoch 2"),
            ({"on_loss": "fail"}, "failed", "on_loss = fail"),
        )
        for lost, why in ((lose(N1), GONE), (exited(A, signal=signal.SIGKILL), KILLED))
    },
    "a job that may not start again goes on with whoever is left": [
        lambda: training(cluster_of(n1=1, n2=1), S0, T0, on_loss="fail"), lose(N2), {"change": "quiescing"},
    ],
    "what never began on a lost node is started elsewhere": [
        lambda: starting(cluster_of(n1=1, n2=1), on_loss="fail"), lose(N1), {"phase": "paused"},
    ],
    "what a node could not begin is started elsewhere": [
        lambda: starting(cluster_of(n1=1, n2=1), on_loss="fail"), refused(A, error="no space left", node_fault=True),
        {"phase": "paused"},
    ],
    "a script that began and did not come to its first epoch is not begun again": [
        partial(starting, on_loss="fail"), started(A), lose(N1), {"phase": "failed"},
    ],
    "a controller that begins again is no loss": [
        partial(running, on_loss="fail"), do("start"), NodeSuspected(node=N1, silent_s=6.0), {"phase": "running"},
    ],
}  # fmt: skip


@stories(LOST)
def test_a_loss_is_as_the_user_wants(story: Story) -> None:
    for found, expected in played(*story):
        assert found == expected


TOO_MUCH = (
    "the job's processes on the node exceeded 2 GiB of memory; reduce it, or ask the operator to "
    "raise memory_bytes in [jobs]"
)
TOO_LARGE = (
    "the job's files on the node exceeded 2 GiB; reduce it, or ask the operator to raise "
    "disk_bytes in [jobs]"
)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (
            {"signal": signal.SIGKILL, "memory_limit": 2 << 30},
            f"rank 0 was killed: {TOO_MUCH}",
        ),
        ({"code": 1, "memory_limit": 2 << 30}, f"the script exited with code 1; {TOO_MUCH}"),
        (
            {"signal": signal.SIGKILL, "disk_limit": 2 << 30},
            f"rank 0 was killed: {TOO_LARGE}",
        ),
    ],
)
@pytest.mark.parametrize("epochs", [0, 2])
def test_a_job_above_a_limit_of_its_node_fails_and_no_other_node_is_tried(
    end: dict[str, int], said: str, epochs: int
) -> None:
    job = running(cluster_of(n1=1, n2=1), epochs=epochs, retries=0)

    job.tell(N1, exited(A, **end))

    assert (job.job(A).phase.value, job.job(A).reason) == ("failed", said)
    assert job.state.nodes[N1].strikes == {}
