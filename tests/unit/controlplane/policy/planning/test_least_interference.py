"""Least interference first, learnt from what workers report."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.policy.api import JobView, StepsSeen
from controlplane.policy.placement.placers import PlacerName, SlotPlacer, make_placer
from controlplane.policy.placement.slot_partition import partition_of
from controlplane.policy.placement.usage_placers import UNKNOWN, WorkerUsage, WorkerUsages
from controlplane.policy.registry import hears_steps
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import A, B, C, job_view
from tests.support.views import row_of, view_of

LIF: tuple[PlacerName, ...] = ("lif-linear", "lif-quadratic")
EACH = pytest.mark.parametrize("name", LIF)
BUSY, CHATTY = {"cores": 6.0, "sent": 0.0}, {"cores": 0.5, "sent": 1e9}


def steps(
    job: JobId, family: str, *, cores: float | None, sent: float | None, speed: float = 100.0,
    **said: Any,
) -> StepsSeen:  # fmt: skip
    return StepsSeen(
        job=job, family=family, group=said.get("group", 1), slots=1, nodes=1, global_batch=64,
        step=1, samples_done=64, samples_per_s=speed, cpu_cores=cores, sent_bytes_per_s=sent,
    )  # fmt: skip


def running(job: JobId, family: str, *slots: str) -> JobView:
    return job_view(
        job, family=family, slots=(1, 4), running_on={SlotId(slot): 64 for slot in slots}
    )


def chosen(placer: SlotPlacer, now: float, *jobs: JobView) -> list[SlotId]:
    """Where C, of the family of A, goes beside these on two nodes of two slots."""
    everybody = (*jobs, job_view(C, family="busy"))
    sizes = {job.job: max(1, len(job.running_on)) for job in everybody}
    partition = partition_of(view_of(row_of(2, 2), *everybody), Seconds(now))
    return placer.place(partition, sizes)[C]


BOTH = (running(A, "busy", "n1/0"), running(B, "chatty", "n2/0"))


@EACH
def test_before_anything_is_measured_a_job_goes_where_neighbours_use_less(name: PlacerName) -> None:
    placer = make_placer(name)
    placer.observe(steps(A, "busy", **BUSY), Seconds(0.0))
    placer.observe(steps(B, "chatty", cores=0.5, sent=1e8), Seconds(0.0))

    assert chosen(placer, 100.0, *BOTH) == ["n2/1"]


def after_guests(
    name: PlacerName, *, wait_s: float, usual: float = 100.0, slow: float = 50.0
) -> tuple[list[SlotId], list[SlotId]]:
    """Where C goes before and after guests trained beside A, beside B, and alone.

    Each reports its speed `wait_s` after it came: `slow` beside B, the chatty one.
    """
    placer = make_placer(name)
    placer.observe(steps(A, "busy", **BUSY), Seconds(0.0))
    placer.observe(steps(B, "chatty", **CHATTY), Seconds(0.0))
    first = chosen(placer, 0.0, *BOTH)
    for number in range(12):
        guest, now = JobId(f"g-{number}"), Seconds(100.0 * (number + 1))
        at, speed = (("n1/1", usual), ("n2/1", slow), ("n3/0", usual))[number % 3]
        jobs = (*BOTH, running(guest, "quiet", at))
        sizes = {job.job: 1 for job in jobs}
        placer.place(partition_of(view_of(row_of(2, 2, 1), *jobs), now), sizes)
        seen = steps(guest, "quiet", cores=0.0, sent=0.0, speed=speed)
        placer.observe(seen, Seconds(now + wait_s))
    return first, chosen(placer, 2000.0, *BOTH)


@EACH
def test_what_speeds_tell_is_learnt(name: PlacerName) -> None:
    assert after_guests(name, wait_s=60.0) == (["n2/1"], ["n1/1"])


@EACH
def test_speeds_beside_neighbours_that_just_came_teach_nothing(name: PlacerName) -> None:
    assert after_guests(name, wait_s=20.0) == (["n2/1"], ["n2/1"])


@EACH
@pytest.mark.parametrize("nonsense", [0.0, -5.0, float("nan"), float("inf")])
def test_speeds_that_are_none_teach_nothing(name: PlacerName, nonsense: float) -> None:
    assert after_guests(name, wait_s=60.0, usual=nonsense, slow=nonsense) == (["n2/1"], ["n2/1"])


@EACH
def test_a_job_of_two_workers_stays_together_where_nobody_is(name: PlacerName) -> None:
    placer = make_placer(name)
    placer.observe(steps(A, "busy", **BUSY), Seconds(0.0))
    jobs = [running(A, "busy", "n1/0"), job_view(B, family="busy", slots=(2, 2))]

    partition = partition_of(view_of(row_of(2, 2), *jobs), Seconds(0.0))
    assert placer.place(partition, {A: 1, B: 2})[B] == ["n2/0", "n2/1"]


def test_usage_is_that_of_the_job_of_its_relatives_or_of_anybody() -> None:
    usages = WorkerUsages()
    assert usages.of(A, "busy") == UNKNOWN
    usages.take(steps(A, "busy", cores=4.0, sent=1e9))
    usages.take(steps(A, "busy", cores=None, sent=5e9))
    usages.take(steps(A, "busy", cores=9.0, sent=1e9))
    usages.take(steps(B, "chatty", cores=1.0, sent=3e9))
    usages.forget(A)

    assert usages.of(A, "busy") == WorkerUsage(5.0, 1e9)
    assert usages.of(C, "other") == WorkerUsage(3.0, 2e9)


@EACH
def test_a_policy_with_a_placer_that_learns_hears_of_steps(name: PlacerName) -> None:
    assert hears_steps("fifo", {"placer": name})
    assert not hears_steps("fifo", {})
