"""Jobs that lost members grow back to their least slots, or stop and wait in line."""

from __future__ import annotations

import msgspec
import pytest

from controlplane.policy.api import ClusterView, JobView, Plan
from controlplane.policy.min_slots import fallback_plan
from controlplane.policy.registry import make
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import A, B, C, job_view
from tests.support.views import NOW, row_of, view_of

N1, N2 = (
    [SlotId(f"n1/{index}") for index in range(4)],
    [SlotId(f"n2/{index}") for index in range(4)],
)


def lost_one(name: JobId = A, have: tuple[SlotId, ...] = (N1[0],), **changes: object) -> JobView:
    """A job of at least two slots of which one is left."""
    return job_view(name, slots=(2, 2), running_on=dict.fromkeys(have, 8), **changes)


def planned(view: ClusterView, policy: str = "fifo") -> Plan:
    return make(policy).plan(view, NOW)


@pytest.mark.parametrize("policy", ["fifo", "fair", "tiresias", "ones", "goodput"])
def test_where_slots_are_free_it_grows_back_close_to_what_it_has(policy: str) -> None:
    view = view_of(row_of(2, 2), lost_one(have=(N2[0],)))

    plan = planned(view, policy)

    assert plan.local_batch == {A: {N2[0]: 32, N2[1]: 32}}
    assert (plan.reasons[A].code, plan.reasons[A].text) == (
        "restore",
        "grows back to 2 slots: it lost members, 1 of its least 2 slots left",
    )
    assert plan.reasons[A].numbers == {"slots_now": 1.0, "slots_then": 2.0, "least": 2.0}


def test_while_the_search_is_away_it_grows_back_too() -> None:
    plan = fallback_plan(view_of(row_of(2), lost_one()), NOW)

    assert plan.local_batch == {A: {N1[0]: 32, N1[1]: 32}}


def test_the_oldest_is_restored_first_and_before_those_that_wait() -> None:
    late, early = lost_one(B, (N1[0],), at=2.0), lost_one(A, (N1[1],), at=1.0)
    waits = job_view(C)

    plan = planned(view_of(row_of(3), waits, late, early))

    assert plan.local_batch == {A: {N1[1]: 32, N1[2]: 32}}
    assert {name: reason.code for name, reason in plan.reasons.items()} == {
        A: "restore",
        B: "pause",
        C: "waits",
    }


def test_where_none_are_free_it_stops_and_waits_in_line() -> None:
    other = job_view(B, running_on={N1[1]: 64})

    plan = planned(view_of(row_of(2), lost_one(), other))

    assert plan.local_batch == {B: {N1[1]: 64}}
    assert plan.reasons[A].text.startswith(
        "paused: it lost members, 1 of its least 2 slots left, and no others are free; waits for 2"
    )


def test_a_policy_may_make_room_for_it() -> None:
    other = job_view(B, at=1.0, slots=(1, 2), running_on={N1[1]: 32, N1[2]: 32})

    plan = planned(view_of(row_of(3), lost_one(), other), "fair")

    assert {name: len(placed) for name, placed in plan.local_batch.items()} == {A: 2, B: 1}
    assert N1[0] in plan.local_batch[A]


def test_a_gang_is_given_its_wanted_slots_again_where_they_are_free_else_its_least() -> None:
    gang = job_view(A, slots=(2, 4), wanted=4, running_on={N1[0]: 8})

    assert len(planned(view_of(row_of(4), gang)).local_batch[A]) == 4
    assert len(planned(view_of(row_of(2), gang)).local_batch[A]) == 2


def test_a_gang_that_has_its_least_goes_on_where_its_wanted_slots_are_not_free() -> None:
    gang = job_view(A, slots=(2, 4), wanted=4, running_on={N1[0]: 8, N1[1]: 8})

    other = job_view(B, running_on={N1[2]: 64})

    plan = planned(view_of(row_of(4), gang, other, job_view(C, running_on={N1[3]: 64})))

    assert (plan.local_batch[A], plan.reasons) == ({N1[0]: 8, N1[1]: 8}, {})


def test_one_that_waits_after_a_failed_change_is_asked_about_again_then() -> None:
    later = Seconds(NOW + 3.0)

    plan = planned(view_of(row_of(2), lost_one(retry_at=later)))

    assert (plan.local_batch, plan.wake_at) == ({A: {N1[0]: 8}}, later)


def test_one_that_changes_just_now_or_is_on_a_node_that_is_away_is_left_as_it_is() -> None:
    view = view_of(row_of(2), lost_one(movable=False))
    away = view_of([msgspec.structs.replace(s, up=False) for s in row_of(2)], lost_one())

    assert planned(view).local_batch == planned(away).local_batch == {A: {N1[0]: 8}}


def test_its_batch_is_what_its_user_asked_for_as_far_as_its_slots_can_hold_it() -> None:
    small = lost_one(local_limit=20)

    assert planned(view_of(row_of(2), small)).local_batch == {A: {N1[0]: 20, N1[1]: 20}}
