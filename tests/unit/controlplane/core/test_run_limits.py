"""A job ends once it had slots for as long as its `max_run_s` allows."""

from __future__ import annotations

from controlplane.core.inputs import RunExpired
from controlplane.core.model.job_phases import Phase
from controlplane.core.reactor import Reactor
from controlplane.journal.snapshots import image_of, reactor_from
from tests.support.builders import N1, S0, A, paused, send, stop
from tests.support.controller import cluster_of, running

LIMIT_S = 100.0


def test_a_job_is_stopped_with_its_reason_when_its_time_is_used_up() -> None:
    controller = running(cluster_of(n1=1), max_run_s=LIMIT_S)
    early = controller.due(LIMIT_S - 1.0)
    controller.now += LIMIT_S
    version = controller.job(A).version

    assert (early, controller.due()) == ([], [RunExpired(job=A)])
    commands = controller.take(RunExpired(job=A))

    assert send(N1, stop(A, version + 1, forget=True)) in commands
    assert (controller.job(A).phase, controller.job(A).reason) == (
        Phase.FAILED,
        "stopped after 100 s, its max_run_s",
    )
    assert controller.due() == []


def test_the_time_that_is_left_survives_a_restart_and_waiting_costs_none() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a", max_run_s=LIMIT_S)
    controller.now += 10 * LIMIT_S
    waited = controller.due()
    controller.place({A: S0})
    controller.now += LIMIT_S

    restarted: Reactor = reactor_from(image_of(controller.reactor))

    assert waited == []
    assert RunExpired(job=A) in restarted.due(controller.now)


def test_a_job_that_was_paused_meanwhile_is_not_stopped() -> None:
    controller = running(cluster_of(n1=1), max_run_s=LIMIT_S)
    controller.take(paused(A))
    controller.now += 0.5 * LIMIT_S
    controller.take(RunExpired(job=A))

    assert not controller.job(A).ended
