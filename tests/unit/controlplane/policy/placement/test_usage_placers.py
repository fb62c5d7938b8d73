"""Placers by resource usage: `tetris-resources`, `lif-linear` and `lif-quadratic`."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from controlplane.policy.api import JobEnded, JobView, StepsSeen
from controlplane.policy.placement.free_slots import Placer
from controlplane.policy.placement.placers import PlacerName, make_placer
from controlplane.policy.placement.slot_partition import partition_of
from controlplane.policy.placement.usage_placers import UNKNOWN, WorkerUsage, WorkerUsages
from controlplane.policy.registry import hears_steps
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import A, B, C, job_view
from tests.support.views import NOW, row_of, steps_seen, view_of

EACH = pytest.mark.parametrize("name", ["lif-linear", "lif-quadratic"])
BUSY = {"cores": 6.0, "sent": 0.0}


def used(job: JobId, family: str, speed: float = 100.0, **use: Any) -> StepsSeen:
    return steps_seen(job, family=family, samples_per_s=speed, cpu_cores=use["cores"],
                      sent_bytes_per_s=use["sent"])  # fmt: skip


def running(job: JobId, family: str, slot: str) -> JobView:
    return job_view(job, family=family, slots=(1, 4), running_on={SlotId(slot): 64})


def chosen(
    placer: Placer, *jobs: JobView, nodes: tuple[int, ...] = (2, 2), now: float = NOW
) -> Any:
    """Return the slots of C, of the family of A, beside these on nodes of 8 cores."""
    slots = [msgspec.structs.replace(slot, host_cores=8) for slot in row_of(*nodes)]
    view = view_of(slots, *jobs, job_view(C, family="busy"))
    return placer.place(partition_of(view, Seconds(now)), dict.fromkeys(view.jobs, 1))[C]


BOTH = (running(A, "busy", "n1/0"), running(B, "chatty", "n2/0"))


# --- tetris-resources


def packing(cores: float, sent: float) -> Placer:
    """A uses 6 cores, B sends 1 GB/s, and a relative of C what is given."""
    placer = make_placer("tetris-resources")
    placer.observe(used(A, "a", **BUSY), NOW)
    placer.observe(used(B, "b", cores=1.0, sent=1e9), NOW)
    placer.observe(used(JobId("d-4"), "busy", cores=cores, sent=sent), NOW)
    return placer


@pytest.mark.parametrize(
    ("cores", "sent", "slot"),
    [(4.0, 0.0, "n2/1"), (2.0, 0.0, "n2/1"), (7.5, 0.0, "n3/0"), (1.0, 1e9, "n1/1")],
    ids=["cores have room", "best aligned", "no room on a node in use", "bandwidth is used up"],
)
def test_workers_are_packed_by_all_resources(cores: float, sent: float, slot: str) -> None:
    placer = packing(cores, sent)
    placer.place(partition_of(view_of(row_of(2, 2, 2), *BOTH), NOW), {A: 1, B: 1})

    assert chosen(placer, *BOTH, nodes=(2, 2, 2)) == [slot]
    assert chosen(make_placer("tetris-resources"), *BOTH, nodes=(2, 2, 2)) == ["n1/1"]  # no report


# --- least interference first


@EACH
def test_before_measurements_a_job_goes_where_neighbours_use_less(name: PlacerName) -> None:
    placer = make_placer(name)
    placer.observe(used(A, "busy", **BUSY), Seconds(0.0))
    placer.observe(used(B, "chatty", cores=0.5, sent=1e8), Seconds(0.0))

    assert chosen(placer, *BOTH) == ["n2/1"]
    alone = [BOTH[0], job_view(B, family="busy", slots=(2, 2))]
    partition = partition_of(view_of(row_of(2, 2), *alone), NOW)
    assert placer.place(partition, {A: 1, B: 2})[B] == ["n2/0", "n2/1"]  # two workers stay together


@EACH
@pytest.mark.parametrize(
    ("wait_s", "usual", "slow", "then"),
    [
        (60.0, 100.0, 50.0, "n1/1"),
        (20.0, 100.0, 50.0, "n2/1"),  # neighbours that just came
        *((60.0, speed, speed, "n2/1") for speed in (0.0, -5.0, float("nan"), float("inf"))),
    ],
)
def test_slow_downs_are_learnt_from_plausible_speeds_beside_settled_neighbours(
    name: PlacerName, wait_s: float, usual: float, slow: float, then: str
) -> None:
    """Guests train beside A, beside B, which is chatty, and alone.

    Each reports its speed `wait_s` after it came: `slow` beside B.
    """
    placer = make_placer(name)
    placer.observe(used(A, "busy", **BUSY), Seconds(0.0))
    placer.observe(used(B, "chatty", cores=0.5, sent=1e9), Seconds(0.0))
    assert chosen(placer, *BOTH, now=0.0) == ["n2/1"]
    for number in range(12):
        guest, now = JobId(f"g-{number}"), Seconds(100.0 * (number + 1))
        at, speed = (("n1/1", usual), ("n2/1", slow), ("n3/0", usual))[number % 3]
        jobs = (*BOTH, running(guest, "quiet", at))
        placer.place(
            partition_of(view_of(row_of(2, 2, 1), *jobs), now), {job.job: 1 for job in jobs}
        )
        seen = used(guest, "quiet", speed, cores=0.0, sent=0.0)
        placer.observe(seen, Seconds(now + wait_s))

    assert chosen(placer, *BOTH, now=2000.0) == [then]


def test_usage_comes_from_the_job_its_relatives_or_all_families() -> None:
    usages = WorkerUsages()
    assert usages.of(A, "busy") == UNKNOWN
    for cores, sent in ((4.0, 1e9), (None, 5e9), (9.0, 1e9)):
        usages.observe(used(A, "busy", cores=cores, sent=sent))
    usages.observe(used(B, "chatty", cores=1.0, sent=3e9))
    usages.observe(JobEnded(job=A, family="busy", samples_done=0, succeeded=True))

    assert usages.of(A, "busy") == WorkerUsage(5.0, 1e9)
    assert usages.of(C, "other") == WorkerUsage(3.0, 2e9)


@EACH
def test_a_policy_with_a_learning_placer_receives_telemetry(name: PlacerName) -> None:
    assert hears_steps("fifo", {"placer": name})
    assert not hears_steps("fifo", {})
