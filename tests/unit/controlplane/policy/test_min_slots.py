"""Jobs that lost members, and the plan while no policy replies."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from controlplane.policy.api import ClusterView, JobView, Plan, Reason
from controlplane.policy.min_slots import fallback_plan
from controlplane.policy.registry import make
from schemas.ids import JobId, Seconds, SlotId
from schemas.jobs import Utility
from tests.support.builders import S0, A, B, C, job_view
from tests.support.views import NOW, row_of, view_of
from tests.unit.controlplane.policy.tables import cases

N1 = [SlotId(f"n1/{index}") for index in range(4)]
N2 = [SlotId(f"n2/{index}") for index in range(4)]


def lost_one(name: JobId = A, have: SlotId = N1[0], **changes: object) -> JobView:
    """A job of at least two slots of which one is left."""
    return job_view(name, slots=(2, 2), running_on={have: 8}, **changes)


def planned(view: ClusterView, policy: str = "fifo") -> Plan:
    return make(policy).plan(view, NOW)


@pytest.mark.parametrize("policy", ["fifo", "fair", "tiresias", "ones", "goodput"])
def test_a_job_grows_back_close_to_its_slots(policy: str) -> None:
    view = view_of(row_of(2, 2), lost_one(have=N2[0]))

    for plan in (planned(view, policy), fallback_plan(view, NOW)):
        assert plan.local_batch == {A: {N2[0]: 32, N2[1]: 32}}
        assert plan.reasons == {
            A: Reason(
                "restore", "grows back to 2 slots: it lost members, 1 of at least 2 slots left",
                {"slots_now": 1.0, "slots_then": 2.0, "least": 2.0},
            )
        }  # fmt: skip


def test_the_oldest_job_is_restored_first_and_before_waiting_jobs() -> None:
    late, early = lost_one(B, N1[0], at=2.0), lost_one(A, N1[1], at=1.0)

    plan = planned(view_of(row_of(3), job_view(C), late, early))

    assert plan.local_batch == {A: {N1[1]: 32, N1[2]: 32}}
    codes = {name: reason.code for name, reason in plan.reasons.items()}
    assert codes == {A: "restore", B: "pause", C: "waits"}


def test_without_free_slots_a_job_stops_unless_the_policy_makes_room() -> None:
    other = job_view(B, running_on={N1[1]: 64})
    shrinks = job_view(B, at=1.0, slots=(1, 2), running_on={N1[1]: 32, N1[2]: 32})

    stops = planned(view_of(row_of(2), lost_one(), other))
    restored = planned(view_of(row_of(3), lost_one(), shrinks), "fair").local_batch

    assert stops.local_batch == {B: {N1[1]: 64}}
    assert stops.reasons[A].text.startswith(
        "paused: it lost members, 1 of at least 2 slots left, and no others are free; waits for 2"
    )
    assert {name: len(placed) for name, placed in restored.items()} == {A: 2, B: 1}
    assert N1[0] in restored[A]


GANG: dict[str, Any] = {"slots": (2, 4), "wanted": 4}
OTHERS = (job_view(B, running_on={N1[2]: 64}), job_view(C, running_on={N1[3]: 64}))


@cases(
    "jobs, slots, placed",
    its_wanted_slots=((job_view(A, **GANG, running_on={N1[0]: 8}),), 4, [16] * 4),
    its_minimum=((job_view(A, **GANG, running_on={N1[0]: 8}),), 2, [32, 32]),
    it_has_its_minimum=((job_view(A, **GANG, running_on={N1[0]: 8, N1[1]: 8}), *OTHERS), 4, [8, 8]),
    as_much_as_the_slots_can_hold=((lost_one(local_limit=20),), 2, [20, 20]),
)  # fmt: skip
def test_a_job_gets_its_wanted_slots_back_if_free_else_its_minimum_with_the_users_batch(
    jobs: tuple[JobView, ...], slots: int, placed: list[int]
) -> None:
    plan = planned(view_of(row_of(slots), *jobs))

    assert list(plan.local_batch[A].values()) == placed
    assert [*plan.reasons] == [A] * (placed != list(jobs[0].running_on.values()))


def test_a_job_that_may_not_change_now_stays_as_it_is() -> None:
    later = Seconds(NOW + 3.0)
    view = view_of(row_of(2), lost_one(movable=False))
    away = view_of([msgspec.structs.replace(s, up=False) for s in row_of(2)], lost_one())

    failed = planned(view_of(row_of(2), lost_one(retry_at=later)))

    assert (failed.local_batch, failed.wake_at) == ({A: {N1[0]: 8}}, later)
    assert planned(view).local_batch == planned(away).local_batch == {A: {N1[0]: 8}}


# --- without a policy


def test_running_jobs_stay_and_the_oldest_waiting_job_starts() -> None:
    runs = job_view(A, running_on={S0: 64})
    late, early = job_view(B, submitted_at=Seconds(2.0)), job_view(C, submitted_at=Seconds(1.0))

    plan = fallback_plan(view_of(row_of(2), runs, late, early), NOW)

    assert [*plan.local_batch] == [A, C]
    text = "waits for 1 slot, 0 free; the policy does not answer yet"
    assert plan.reasons[C].code == "fill"
    assert plan.reasons[B] == Reason("waits", text, {"needs": 1, "free": 0})


@cases(
    "slots, job, code, wake_at",
    backing_off=(1, job_view(A, ready_at=Seconds(NOW + 3.0)), "backing_off", NOW + 3.0),
    too_large=(2, job_view(A, slots=(3, 3)), "too_large", None),
    no_slots=(0, job_view(A, slots=(3, 3)), "no_slots", None),
)
def test_jobs_that_cannot_start_have_a_reason(
    slots: int, job: JobView, code: str, wake_at: float | None
) -> None:
    plan = fallback_plan(view_of(row_of(slots), job), NOW)

    assert (plan.local_batch, plan.wake_at, plan.reasons[A].code) == ({}, wake_at, code)


def test_a_job_that_has_to_be_admitted_waits_for_the_policy() -> None:
    worth = Utility(value=2.0, deadline_s=60.0, decay=0.1)
    undecided, admitted = job_view(A, utility=worth), job_view(B, utility=worth, promised_at=NOW)
    view = view_of(row_of(3), undecided, admitted, job_view(C, utility=worth, last_batch=64))

    admits = fallback_plan(view, NOW, admits=True)

    assert [*admits.local_batch] == [B, C]
    assert admits.reasons[A].text.startswith("waits to be admitted")
    assert [*fallback_plan(view, NOW).local_batch] == [A, B, C]
