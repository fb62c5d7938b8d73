"""What becomes of a job whose workers are lost, as its user wants it."""

from __future__ import annotations

import signal

import pytest

from controlplane.core.inputs import NodeSuspected
from controlplane.core.model.job_phases import Phase
from controlplane.core.model.rescale import RescalePhase
from schemas.jobs import ENDED
from tests.support.builders import N1, N2, S0, T0, A, exited, refused, started
from tests.support.controller import Controller, cluster_of, running, starting, training

GONE = "node n1 has been silent for 30 s"
KILLED = "a worker was killed by SIGKILL"


def why(controller: Controller) -> str:
    return controller.history_of(A).changes[-1].reason


@pytest.mark.parametrize(
    ("spec", "phase", "then"),
    [
        ({}, Phase.PAUSED, "resumes after epoch 2"),
        ({"on_loss": "restart"}, Phase.PAUSED, "resumes after epoch 2"),
        ({"on_loss": "fail"}, Phase.FAILED, "on_loss = fail"),
    ],
)
def test_a_job_that_loses_all_it_had_does_what_its_user_wants(
    spec: dict[str, str], phase: Phase, then: str
) -> None:
    lost, killed = (running(cluster_of(n1=1), epochs=2, **spec) for _ in range(2))

    lost.lose(N1)
    killed.tell(N1, exited(A, signal=signal.SIGKILL))

    assert (lost.job(A).phase, why(lost)) == (phase, f"{GONE}; {then}")
    assert (killed.job(A).phase, why(killed)) == (phase, f"{KILLED}; {then}")
    for controller in (lost, killed):
        assert controller.replayed() == controller.state


def test_a_job_that_may_not_start_again_goes_on_with_whoever_is_left() -> None:
    controller = training(cluster_of(n1=1, n2=1), S0, T0, on_loss="fail")

    controller.lose(N2)

    change = controller.job(A).change
    assert change is not None
    assert change.phase is RescalePhase.QUIESCING


def test_what_never_began_is_started_elsewhere() -> None:
    controllers = [starting(cluster_of(n1=1, n2=1), on_loss="fail") for _ in range(2)]
    controllers[0].lose(N1)
    controllers[1].tell(N1, refused(A, error="no space left", node_fault=True))

    assert [controller.job(A).phase for controller in controllers] == [Phase.PAUSED] * 2


def test_a_script_that_began_and_did_not_come_to_its_first_epoch_is_not_begun_again() -> None:
    controller = starting(cluster_of(n1=1), on_loss="fail")
    controller.tell(N1, started(A))

    controller.lose(N1)

    assert controller.job(A).phase is Phase.FAILED


def test_a_controller_that_begins_again_is_no_loss() -> None:
    controller = running(on_loss="fail")
    controller.start()
    controller.take(NodeSuspected(node=N1, silent_s=6.0))

    assert controller.job(A).phase.value not in ENDED


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

    assert (job.job(A).phase, why(job)) == (Phase.FAILED, said)
    assert job.state.nodes[N1].strikes == {}
