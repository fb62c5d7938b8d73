"""The plan while the policy does not answer."""

from __future__ import annotations

import msgspec

from controlplane.policy.api import Reason
from controlplane.policy.min_slots import fallback_plan
from schemas.ids import Seconds
from schemas.jobs import Utility
from tests.support.builders import S0, A, B, C, job_view
from tests.support.views import NOW, row_of, view_of


def test_what_runs_goes_on_and_free_slots_are_given_to_the_oldest() -> None:
    runs = job_view(A, running_on={S0: 64})
    late, early = job_view(B, submitted_at=Seconds(2.0)), job_view(C, submitted_at=Seconds(1.0))

    plan = fallback_plan(view_of(row_of(2), runs, late, early), NOW)

    assert [*plan.local_batch] == [A, C]
    assert plan.reasons[C].code == "fill"
    waits = Reason(
        "waits", "waits for 1 slot, 0 free; the policy does not answer yet", {"needs": 1, "free": 0}
    )
    assert plan.reasons[B] == waits


def test_who_backs_off_is_asked_about_again_then() -> None:
    plan = fallback_plan(view_of(row_of(1), job_view(A, ready_at=Seconds(NOW + 3.0))), NOW)

    assert (plan.local_batch, plan.wake_at) == ({}, NOW + 3.0)
    assert plan.reasons[A].code == "backing_off"


def test_a_job_that_the_cluster_can_never_hold_is_told_so() -> None:
    large = msgspec.structs.replace(job_view(A), least=3, most=3)

    assert fallback_plan(view_of(row_of(2), large), NOW).reasons[A].code == "too_large"
    assert fallback_plan(view_of([], large), NOW).reasons[A].code == "no_slots"


def test_who_has_to_be_admitted_waits_for_the_search_and_the_others_start() -> None:
    worth = Utility(value=2.0, deadline_s=60.0, decay=0.1)
    undecided, admitted = job_view(A, utility=worth), job_view(B, utility=worth, promised_at=NOW)
    begun = job_view(C, utility=worth, last_batch=64)
    view = view_of(row_of(3), undecided, admitted, begun)

    assert [*fallback_plan(view, NOW, admits=True).local_batch] == [B, C]
    assert fallback_plan(view, NOW, admits=True).reasons[A].text.startswith("waits to be admitted")
    assert [*fallback_plan(view, NOW).local_batch] == [A, B, C]
