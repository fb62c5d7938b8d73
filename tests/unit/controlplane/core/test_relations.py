"""What keeps a job from starting: holds, earliest starts, other jobs."""

from __future__ import annotations

from collections.abc import Callable
from signal import SIGTERM
from typing import Any

import msgspec
import pytest

from controlplane.core.inputs import NodeHeard, PlanProposed, StartDue
from controlplane.core.model.job_phases import Phase
from controlplane.policy.api import Plan, Reason
from schemas.ids import JobId
from schemas.relations import WAITS_TO
from tests.support import builders
from tests.support.builders import (
    N1,
    S0,
    S1,
    A,
    B,
    C,
    cancelled,
    exited,
    formed,
    held,
    proposal,
    ready,
    released,
    resized,
    started,
)
from tests.support.controller import Controller, cluster_of

COMMAND: dict[str, Any] = {
    "kind": "command", "command": ("make",), "slots": 1, "script": "", "batch_size": 1,
}  # fmt: skip


def shown(controller: Controller) -> list[str]:
    """Jobs that a policy or the division may start or change."""
    return [*controller.view().jobs, *(job.job for job in controller.rigid_views())]


def begin(controller: Controller, job: Any = A, slot: Any = S0, *, pid: int = 100) -> None:
    controller.place({job: {slot: 1}})
    for report in (started(job, pid=pid), ready(job), formed(job)):
        controller.tell(N1, report)


@pytest.mark.parametrize("spec", [{}, COMMAND], ids=["elastic", "command"])
def test_a_held_job_is_in_no_view_until_it_is_released(spec: dict[str, Any]) -> None:
    controller = cluster_of(n1=2)
    controller.submit("a", **spec)
    controller.submit("b", **spec)
    assert shown(controller) == [A, B]

    controller.take(held(A, "olga"))

    assert shown(controller) == [B]
    assert controller.job(A).reason == "held by olga"
    assert controller.asked
    controller.place({A: {S0: 1}})
    assert controller.job(A).phase is Phase.QUEUED

    controller.take(released(A, "ann"))

    assert shown(controller) == [A, B]
    assert controller.job(A).reason == "released by ann"
    controller.place({A: {S0: 1}})
    assert controller.job(A).phase is Phase.STARTING
    assert controller.replayed() == controller.state


def test_a_plan_that_is_older_than_the_hold_starts_nothing() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a")
    before = controller.state.version
    controller.take(held(A))
    controller.take(released(A))

    controller.take(proposal({A: {S0: 8}}, based_on=before))

    assert controller.job(A).phase is Phase.QUEUED


def test_a_held_job_keeps_its_slots_and_is_not_started_again() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a", **COMMAND, retries=1)
    begin(controller)

    controller.take(held(A))

    assert shown(controller) == [A]
    assert (controller.job(A).phase, controller.job(A).reason) == (Phase.RUNNING, "runs on 1 slot")
    controller.tell(N1, exited(A, 1, code=1))
    assert controller.job(A).phase is Phase.PAUSED
    assert shown(controller) == []


def test_an_order_of_an_operator_waits_for_the_release() -> None:
    controller = cluster_of(n1=2)
    controller.submit("a", slots=(1, 2))
    controller.take(held(A))

    controller.take(resized(A, 2))

    job = controller.job(A)
    assert (job.phase, job.override_wait_reason) == (Phase.QUEUED, "held by ann")
    controller.take(released(A))
    assert controller.job(A).phase is Phase.STARTING


# not_before of a job that is submitted at 1000 s -> its earliest start
STARTS = [
    ("+90s", 1090.0),
    ("+1.5m", 1090.0),
    ("+2h", 8200.0),
    ("+1d", 87_400.0),
    ("1970-01-01T00:20Z", 1200.0),
    ("1970-01-01T02:20+02:00", 1200.0),
    ("1970-01-01T00:00:30Z", 30.0),  # in the past
    ("2026-12-01T08:00Z", 1_796_112_000.0),
]


@pytest.mark.parametrize(("text", "at"), STARTS)
def test_a_job_starts_at_its_earliest_start_or_later(text: str, at: float) -> None:
    controller = cluster_of(n1=1)
    controller.submit("a", **COMMAND, not_before=text)

    past = at <= controller.now
    assert shown(controller) == [A] * past
    controller.place({A: {S0: 1}})
    assert controller.job(A).phase is (Phase.STARTING if past else Phase.QUEUED)
    assert (controller.job(A).gate_reason is None) is past
    if not past:
        controller.now = at - 0.5
        assert controller.due() == []
        controller.now = at
        assert controller.due() == [StartDue(job=A)]
        controller.take(StartDue(job=A))
        assert (shown(controller), controller.due()) == ([A], [])
        controller.place({A: {S0: 1}})
    assert controller.job(A).phase is Phase.STARTING
    assert controller.replayed() == controller.state


def test_an_order_of_an_operator_waits_for_the_earliest_start() -> None:
    controller = cluster_of(n1=2)
    controller.submit("a", not_before="+1h")
    controller.take(resized(A, 1))
    assert controller.job(A).override_wait_reason == (
        "starts at 1970-01-01T01:16:40Z or later (not_before)"
    )

    controller.now += 3600.0
    controller.take(StartDue(job=A))

    assert controller.job(A).phase is Phase.STARTING


def test_an_early_job_that_is_cancelled_is_not_due() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a", not_before="+1h")
    controller.take(cancelled(A))
    assert controller.due(3600.0) == []
    controller.take(StartDue(job=A))
    assert controller.job(A).phase is Phase.CANCELLED


def test_the_same_job_can_be_held_twice_and_released_once() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a")
    for event in (held(A, "ann"), held(A, "bob"), released(A), released(A)):
        controller.take(event)

    assert shown(controller) == [A]
    assert S1 not in controller.state.slot_index.slots()


# --- jobs that wait for others

Ends = Callable[[Controller], None]


def _succeeds(controller: Controller) -> None:
    begin(controller)
    controller.tell(N1, exited(A, 1, code=0))


def _fails(controller: Controller) -> None:
    begin(controller)
    controller.tell(N1, exited(A, 1, code=3))


def _is_cancelled(controller: Controller) -> None:
    begin(controller)
    controller.take(cancelled(A))
    controller.tell(N1, exited(A, 1, signal=SIGTERM))


def _never_starts(controller: Controller) -> None:
    controller.take(cancelled(A))


def _is_rejected(controller: Controller) -> None:
    plan = Plan(
        based_on=controller.state.version, local_batch={}, rejected={A: Reason("worth", "no")}
    )
    controller.take(PlanProposed(plan=plan, stats=None))


# how the parent ends -> its state, and the conditions that this meets
PARENTS: dict[str, tuple[Ends, str, set[str]]] = {
    "ok": (_succeeds, "succeeded", {"ok", "any"}),
    "failed": (_fails, "failed", {"failed", "any"}),
    "cancelled": (_is_cancelled, "was cancelled", {"failed", "any"}),
    "never started": (_never_starts, "was cancelled", {"failed", "any"}),
    "rejected": (_is_rejected, "was rejected", {"failed", "any"}),
}
WALK = [
    (how, condition, when)
    for how in PARENTS
    for condition in WAITS_TO
    for when in ("waits", "ended", "left")
]


@pytest.mark.parametrize(("how", "condition", "when"), WALK)
def test_the_end_of_the_parent_decides(how: str, condition: str, when: str) -> None:
    end, outcome, meets = PARENTS[how]
    controller = cluster_of(n1=1)
    controller.submit("a", **COMMAND)
    after = (f"{condition}:{A}",)
    if when == "waits":
        controller.submit("b", **COMMAND, after=after)
        waiting = controller.job(B)
        assert (waiting.phase, shown(controller)) == (Phase.QUEUED, [A])
        assert waiting.gate_reason == Reason("after", f"waits for {A} {WAITS_TO[condition]}")
        end(controller)
    else:
        end(controller)
        outcomes = {A: controller.job(A).phase.value}
        if when == "left":
            controller.take(NodeHeard(node=N1))
            assert A not in controller.state.jobs
        controller.asked = False
        submitted = builders.submission("b", **COMMAND, after=after)
        controller.take(msgspec.structs.replace(submitted, outcomes=outcomes))

    job = controller.job(B)
    if condition in meets:
        assert (job.phase, job.gated, B in shown(controller)) == (Phase.QUEUED, False, True)
        assert controller.asked
    else:
        reason = f"waited for {A} {WAITS_TO[condition]}, which {outcome}"
        assert (job.phase, job.reason) == (Phase.CANCELLED, reason)
    assert controller.replayed() == controller.state


def test_a_parent_whose_end_is_not_known_meets_nothing() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a", after=("any:x-9",))

    assert controller.job(A).reason == "waited for x-9 to end, which is not known any more"


def test_a_job_waits_for_all_of_its_parents() -> None:
    controller = cluster_of(n1=1)
    for name in ("a", "b"):
        controller.submit(name)
    controller.submit("c", after=(A, "any:b-2"))
    assert controller.job(C).gate_reason == Reason("after", "waits for a-1 to succeed, b-2 to end")

    controller.take(cancelled(B))
    assert controller.job(C).gate_reason == Reason("after", "waits for a-1 to succeed")
    controller.take(held(C, "bob"))
    controller.take(cancelled(A))

    assert controller.job(C).reason == "waited for a-1 to succeed, which was cancelled"
    assert controller.state.children == {}


def test_jobs_that_wait_for_a_cancelled_job_are_decided_with_the_same_input() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a")
    controller.submit("b", after=("ok:a-1",))
    controller.submit("c", after=("ok:b-2",))
    controller.submit("d", after=("failed:c-3",))

    controller.take(cancelled(A))

    assert [controller.job(JobId(name)).reason for name in ("b-2", "c-3", "d-4")] == [
        "waited for a-1 to succeed, which was cancelled",
        "waited for b-2 to succeed, which was cancelled",
        "c-3 was cancelled",
    ]
    assert shown(controller) == ["d-4"]
    assert controller.replayed() == controller.state


def test_a_job_that_waits_and_is_cancelled_is_forgotten_by_its_parent() -> None:
    controller = cluster_of(n1=1)
    controller.submit("a")
    controller.submit("b", after=(A,))
    controller.take(cancelled(B))

    assert controller.state.children == {}
    controller.take(cancelled(A))
    assert controller.job(B).reason == "cancelled by ann"


def test_an_order_of_an_operator_waits_for_the_parents() -> None:
    controller = cluster_of(n1=2)
    controller.submit("a")
    controller.submit("b", after=("any:a-1",))
    controller.take(resized(B, 1))
    assert controller.job(B).override_wait_reason == "waits for a-1 to end"

    controller.take(cancelled(A))

    assert controller.job(B).phase is Phase.STARTING
