"""A node on which scripts fail before training is suspected, and not the scripts."""

from __future__ import annotations

import pytest

from controlplane.core.inputs import UndrainRequested
from controlplane.core.model.job_phases import Phase
from schemas.ids import JobId
from tests.support.builders import N1, S0, T0, A, exited, formed, news, raised, ready, started
from tests.support.controller import Controller, cluster_of

CUDA = "RuntimeError: CUDA error"


def fails(controller: Controller, job: JobId, *, version: int, on: str = S0) -> None:
    """Job `job` starts on a slot, and its script fails before it trains."""
    node = on.rpartition("/")[0]
    controller.place({job: on})
    controller.tell(node, started(job, version))
    controller.tell(node, raised(job, version, index=1, error=CUDA, where="train.py:1"))
    controller.tell(node, exited(job, version, code=1))


def fallen(jobs: int, **spec: object) -> Controller:
    """Some jobs, one after the other, failed on the first of two nodes."""
    controller = cluster_of(n1=1, n2=1)
    for number in range(1, jobs + 1):
        controller.submit("a", **spec)
        fails(controller, JobId(f"a-{number}"), version=1)
    return controller


def test_the_first_failure_before_training_is_not_counted_and_tried_elsewhere() -> None:
    controller = fallen(1)
    job = controller.job(A)

    assert (job.phase, job.attempts.failures) == (Phase.PAUSED, 0)
    assert job.reason == (
        f"{CUDA} (train.py:1) (exit code 1); before training on node n1, which may be the cause: "
        "tries another one, not counted"
    )
    assert controller.state.nodes[N1].usable


def test_a_script_that_fails_on_two_nodes_has_failed_and_no_node_is_blamed() -> None:
    controller = fallen(1)
    controller.now += 60.0

    fails(controller, A, version=controller.job(A).next_version, on=T0)

    assert controller.job(A).phase is Phase.FAILED
    assert controller.state.nodes[N1].strikes == {}


def test_a_node_on_which_three_jobs_failed_in_a_row_gets_no_more() -> None:
    controller = fallen(3)

    assert [slot.usable for slot in controller.view().slots] == [False, True]
    assert controller.state.nodes[N1].suspicion == (
        "jobs failed here before training: a-1, a-2, a-3; the last with: "
        f"{CUDA} (train.py:1) (exit code 1); repair it, then `ones node undrain n1`"
    )


def test_an_operator_returns_a_suspected_node() -> None:
    controller = fallen(3)

    told = controller.take(UndrainRequested(node=N1, user="bob"))

    assert news("node.healthy", N1) in told
    assert [slot.usable for slot in controller.view().slots] == [True, True]


def test_a_job_that_trains_on_a_node_clears_it() -> None:
    controller = fallen(2)
    controller.submit("b")
    job = JobId("b-3")
    controller.place({job: S0})
    controller.tell(N1, started(job))
    controller.tell(N1, ready(job))
    controller.tell(N1, formed(job))

    assert controller.state.nodes[N1].strikes == {}


@pytest.mark.parametrize("spec", [{"on_loss": "fail"}])
def test_a_job_that_must_not_run_twice_fails_at_once(spec: dict[str, str]) -> None:
    assert fallen(1, **spec).job(A).phase is Phase.FAILED


def test_without_another_node_a_failure_is_the_script_s() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a")

    fails(controller, A, version=1)

    assert controller.job(A).phase is Phase.FAILED
