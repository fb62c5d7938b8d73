"""Orders of operators are tried again when something changed for them, and reserve for a minute."""

from __future__ import annotations

import pytest

from controlplane.core.handlers.overrides import RESERVATION_S
from controlplane.core.inputs import OverrideDue
from controlplane.core.reactor import Reactor
from controlplane.journal.database import input_from
from controlplane.journal.snapshots import image_of, reactor_from
from tests.support.builders import N1, A, greeting, paused, resized, resumed, seen
from tests.support.controller import cluster_of
from tests.support.recorded_history import of_jobs


@pytest.mark.parametrize("seed", range(6))
def test_trying_all_orders_at_every_input_would_change_nothing(seed: int) -> None:
    queued, always = Reactor(), Reactor()
    for at, body in of_jobs(seed, 400).history:
        event = input_from(body)
        jobs = always.state.jobs
        always.state.changed_orders = {  # all but those that wait for their next retry
            name: None
            for name in always.state.overrides
            if name in always.state.changed_orders or not jobs[name].attempts.next_change_at
        }

        assert queued.handle(event, at) == always.handle(event, at)
        assert queued.view() == always.view()
        assert queued.state.jobs == always.state.jobs


def test_a_restored_state_tries_the_same_orders() -> None:
    live = Reactor()
    for number, (at, body) in enumerate(of_jobs(3, 300).history):
        event = input_from(body)
        restored = reactor_from(image_of(live)) if number % 5 == 0 else None
        commands = live.handle(event, at)

        if restored is not None:
            assert restored.handle(event, at) == commands
            assert restored.state == live.state


def test_a_waiting_order_reserves_free_slots_for_a_minute() -> None:
    controller = cluster_of(n1=2)
    controller.submit("a", slots=(4, 4), batch_size=64, max_batch_size=64)
    controller.take(resized(A, 4))
    reserved = [slot.usable for slot in controller.view().slots]
    controller.now += RESERVATION_S

    (due,) = controller.due()
    controller.take(due)

    assert due == OverrideDue(job=A)
    assert reserved == [False, False]
    assert [slot.usable for slot in controller.view().slots] == [True, True]
    assert controller.job(A).override_wait_reason == (
        "waiting for slots: ann ordered 4 slots; others may use free slots meanwhile"
    )
    assert controller.due() == []


def test_a_job_that_returns_from_a_pause_has_its_former_place_in_views() -> None:
    controller = cluster_of(n1=1)
    for name in "abc":
        controller.submit(name)
    controller.view()
    controller.take(paused(A))
    without = list(controller.view().jobs)
    controller.take(resumed(A))

    assert (without, list(controller.view().jobs)) == (["b-2", "c-3"], ["a-1", "b-2", "c-3"])


def test_an_order_that_waits_costs_other_inputs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = cluster_of()
    controller.take(greeting(N1, seen(A, journal="another")))
    controller.submit("b")
    controller.take(resized(controller.state.active.__iter__().__next__(), 2))
    tried: list[str] = []
    monkeypatch.setattr(
        "controlplane.core.handlers.overrides._reconcile",
        lambda _, job, __: tried.append(job.job),
    )

    for _ in range(3):
        controller.submit("c")

    assert len(tried) <= 1  # the order's own change, once
