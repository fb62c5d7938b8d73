"""Usage of slots by account, and the begin of turns, as the core keeps them."""

from __future__ import annotations

import math
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.inputs import SharingChanged
from controlplane.core.model.usage import Usage, slot_seconds
from controlplane.core.plan_cycle import PlanCycle
from controlplane.core.reactor import Reactor
from controlplane.journal.snapshots import image_of, reactor_from
from controlplane.policy.sharing.turns import at_once
from schemas.ids import Seconds
from schemas.sharing import Sharing
from tests.support import builders
from tests.support.builders import S0, S1, A, paused
from tests.support.controller import Controller, cluster_of, running, training

H: Final = 100.0  # half-life, seconds
EXACT: Final = pytest.approx


def shared(controller: Controller, **rules: object) -> Controller:
    controller.take(SharingChanged(sharing=Sharing(half_life_s=H, **rules)))  # type: ignore[arg-type] # named by callers
    return controller


def usage(controller: Controller, account: str = "ann/ann") -> float:
    return controller.ledger().usage.get(account, 0.0)


def test_one_slot_for_a_half_life_leaves_its_integral() -> None:
    assert slot_seconds(1, H, H) == EXACT(H / math.log(2.0) / 2)
    assert slot_seconds(4, 1e9, H) == EXACT(4 * H / math.log(2.0))
    assert slot_seconds(3, 0.0, H) == 0.0


@given(st.lists(st.tuples(st.integers(0, 8), st.floats(0.0, 500.0)), max_size=8))
def test_it_does_not_matter_into_how_many_intervals_a_time_is_cut(
    parts: list[tuple[int, float]],
) -> None:
    cut, whole, now = Usage(), 0.0, 0.0
    end = sum(length for _, length in parts)
    for slots, length in parts:
        cut.add(slots, Seconds(now), Seconds(now + length), H)
        now += length
        whole += slot_seconds(slots, end - now + length, H) - slot_seconds(slots, end - now, H)

    assert cut.value == EXACT(whole, abs=1e-6)


def test_an_account_is_charged_for_the_slots_of_its_jobs() -> None:
    controller = shared(cluster_of(n1=4))
    training(controller, S0, S1)  # takes no time
    controller.now += H

    assert usage(controller) == EXACT(slot_seconds(2, H, H))
    controller.take(builders.cancelled(A))
    controller.now += H
    assert usage(controller) == EXACT(slot_seconds(2, H, H) / 2)


def test_an_account_that_has_just_begun_has_used_nothing() -> None:
    for number in range(1, 40):
        controller = shared(cluster_of(n1=4))
        controller.ledger()
        controller.now += H / 7.0 * number
        training(controller, S0, S1)

        assert usage(controller) == 0.0


def test_usage_is_kept_by_project_and_user() -> None:
    controller = shared(cluster_of(n1=4))
    training(controller, S0)
    controller.submit("b", user="bob", project="nlp")
    controller.place({controller.names[-1]: S1})
    controller.now += H

    one = EXACT(slot_seconds(1, H, H))
    assert controller.ledger().usage == {
        "ann/ann": one,
        "nlp/bob": one,
    }


def test_a_turn_begins_when_a_job_without_slots_gets_some() -> None:
    controller = shared(cluster_of(n1=2))
    began = controller.now
    running(controller, slots=(1, 2))
    controller.now += 50.0
    controller.take(builders.resized(A, 2))
    assert controller.state.began_at == {A: began}

    controller.take(paused(A))
    controller.take(builders.cancelled(A))
    assert controller.state.began_at == {}


def test_without_rules_nothing_is_charged_and_the_view_is_the_state_s() -> None:
    controller = running(cluster_of(n1=1))
    controller.now += H
    controller.take(builders.cancelled(A))
    seen = at_once(PlanCycle(lambda: controller.reactor).view(Seconds(controller.now)))

    assert (controller.state.usage, controller.state.began_at) == ({}, {})
    assert seen == controller.view()


def test_a_slot_of_a_job_under_an_override_counts_outside_the_view() -> None:
    controller = running(shared(cluster_of(n1=2)))
    controller.take(builders.resized(A, 1))

    assert controller.ledger().outside == {"ann/ann": 1}


def test_a_replay_and_a_snapshot_keep_rules_usage_and_turns() -> None:
    controller = running(shared(cluster_of(n1=1), turn_s=7.0))
    controller.now += 3 * H
    controller.submit("b")
    controller.take(builders.cancelled(A))

    restored: Reactor = reactor_from(image_of(controller.reactor))
    for state in (controller.replayed(), restored.state):
        assert state == controller.state
        assert state.usage["ann/ann"].value > 0.0
        assert state.sharing is not None
        assert state.sharing.turn_s == 7.0


def test_a_new_half_life_counts_from_now_on() -> None:
    controller = running(shared(cluster_of(n1=1)))
    controller.now += H
    controller.take(builders.cancelled(A))
    controller.now += H
    before = usage(controller)

    controller.take(SharingChanged(sharing=Sharing(half_life_s=2 * H)))

    def later() -> float:
        return controller.ledger().usage["ann/ann"]

    assert later() == EXACT(before)
    controller.now += 2 * H
    assert later() == EXACT(before / 2)
