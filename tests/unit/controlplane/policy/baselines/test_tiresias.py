"""Policy `tiresias`."""

from __future__ import annotations

from typing import Any

from controlplane.policy.api import JobView
from controlplane.policy.registry import make
from schemas.ids import JobId, Seconds
from tests.support.builders import S0, S1, A, B, C, job_view
from tests.support.views import InstantCluster, row_of, view_of

LIMITS = {"limits": [100.0, 300.0]}


def gang(job: JobId, at: float, size: int, **changes: Any) -> JobView:
    return job_view(job, at, slots=(size, size), **changes)


def cluster(*nodes: int, **options: Any) -> InstantCluster:
    return InstantCluster(make("tiresias", LIMITS | options), row_of(*nodes))


def test_plans_agree_with_a_trace_by_hand() -> None:
    """Four slots; limits of 100 and 300 slot seconds.

    |  t | event                 | served then   | queues (1 / 2 / 3) | run     | next limit     |
    |----|-----------------------|---------------|--------------------|---------|----------------|
    |  0 | A wants 4             | A 0           | A / - / -          | A       | 0 + 100/4 = 25 |
    | 10 | B wants 2             | A 40          | A B / - / -        | A       | 10 + 60/4 = 25 |
    | 25 | A reaches 100         | A 100, B 0    | B / A / -          | B       | 25 + 100/2 = 75|
    | 30 | C wants 2             | B 10          | B C / A / -        | B C     | 30 + 90/2 = 75 |
    | 75 | B reaches 100         | B 100, C 90   | C / A B / -        | C B     | 75 + 10/2 = 80 |
    | 80 | C reaches 100         | B 110, C 100  | - / A B C / -      | A       | 80 + 200/4=130 |
    |130 | A reaches 300         | A 300         | - / B C / A        | B C     | 130 + 190/2    |
    """
    it = cluster(4)

    def then(now: float) -> tuple[dict[JobId, int], float | None]:
        return it.sizes(now), it.plans[-1].wake_at

    it.submit(gang(A, 0.0, 4))
    assert then(0.0) == ({A: 4}, 25.0)
    it.submit(gang(B, 10.0, 2))
    assert then(10.0) == ({A: 4}, 25.0)
    assert then(25.0) == ({B: 2}, 75.0)
    it.submit(gang(C, 30.0, 2))
    assert then(30.0) == ({B: 2, C: 2}, 75.0)
    assert then(75.0) == ({B: 2, C: 2}, 80.0)
    assert then(80.0) == ({A: 4}, 130.0)
    assert then(130.0) == ({B: 2, C: 2}, 225.0)


def test_smaller_jobs_overtake_a_job_that_does_not_fit() -> None:
    it = cluster(4)
    it.submit(gang(A, 0.0, 3), gang(B, 1.0, 2), gang(C, 2.0, 1))

    assert it.sizes(2.0) == {A: 3, C: 1}


def test_jobs_that_fall_in_the_same_plan_keep_their_order() -> None:
    """B reached its limit before A did, between two plans."""
    it = cluster(3)
    it.submit(gang(A, 0.0, 1), gang(B, 0.0, 2))
    it.at(0.0)
    it.at(200.0)
    it.submit(gang(C, 200.0, 1))

    assert it.sizes(200.0) == {C: 1, A: 1}


def test_jobs_of_the_second_queue_are_served_in_the_order_of_falling() -> None:
    it = cluster(3)
    it.submit(gang(A, 0.0, 1), gang(B, 0.0, 2))
    it.at(0.0)
    it.at(50.0)  # B has 100
    it.at(100.0)  # A has 100
    it.submit(gang(C, 100.0, 1))

    assert it.sizes(100.0) == {C: 1, B: 2}


def test_a_job_that_waited_too_long_returns_to_the_first_queue() -> None:
    """A ran 25 s until it fell, and is promoted when it has waited for 2 x 25 s."""
    it = cluster(4, promote_after=2.0)
    it.submit(gang(A, 0.0, 4))
    it.at(0.0)
    it.submit(gang(B, 20.0, 1))
    assert it.sizes(25.0) == {B: 1}
    assert it.plans[-1].wake_at == 75.0

    assert it.sizes(75.0) == {A: 4}
    assert it.plans[-1].wake_at == 100.0  # A has another 100 slot seconds until it falls


def test_service_before_a_restart_of_the_controller_counts() -> None:
    view = view_of(
        row_of(2), gang(A, 0.0, 2, slot_s=250.0), gang(B, 1.0, 1, slot_s=120.0), gang(C, 2.0, 1)
    )

    plan = make("tiresias", LIMITS).plan(view, Seconds(5.0))

    assert plan.local_batch == {C: {S0: 64}, B: {S1: 64}}
    assert plan.reasons[A].text == (
        "waits: in queue 2 after 250 slot seconds; needs 2 slots, those before it leave 0 of 2"
    )
    assert plan.reasons[A].numbers == {
        "slots_now": 0.0, "slots_then": 0.0, "queue": 2.0, "served": 250.0, "needs": 2.0, "left": 0.0,
    }  # fmt: skip


def test_a_job_on_a_node_that_is_not_up_keeps_its_slots() -> None:
    slots = row_of(2, 2)
    first = slots[0]
    slots[0] = type(first)(slot=first.slot, node=first.node, kind="cpu", usable=False, up=False)
    view = view_of(slots, gang(A, 1.0, 1, running_on={S0: 64}, slot_s=250.0), gang(B, 0.0, 4))

    plan = make("tiresias", LIMITS).plan(view, Seconds(5.0))

    assert plan.local_batch == {A: {S0: 64}}
    assert plan.reasons[B].numbers["left"] == 3.0
