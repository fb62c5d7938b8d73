"""A family that nobody knows, on a host with fewer cores than slots: what is promised, what comes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import pytest
from numpy.random import default_rng

from controlplane.policy.api import Budget, ClusterView, JobEnded, JobView, StepsSeen
from controlplane.policy.ones.slowdowns import CoreDemand
from controlplane.policy.registry import make
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import A, B, C, job_view
from tests.support.views import row_of, taken_slots, view_of
from tests.unit.controlplane.policy.ones.steady_cluster import SteadyCluster, a_job

ALONE: Final = 64 / 5000  # seconds of a step of 64 samples on one slot
CROWDED: Final = {1: 1.0, 2: 1.7, 3: 4.0, 4: 10.0}  # times that by slots: 500 samples/s on four
PROMISE: Final = re.compile(r"([\d.]+) x the speed expected")


class FewCores(SteadyCluster):
    """Four slots share two cores."""

    def speed(self, on: Mapping[SlotId, int]) -> float:
        batch, slots = sum(on.values()), len(on)
        return batch / (ALONE * (0.5 + 0.5 * batch / slots / 64) * CROWDED[slots])


def lived(cores: int) -> tuple[FewCores, list[int]]:
    """A minute of one job, and the slots that it had in each second."""
    cluster = FewCores(row_of(4, cores=cores), [a_job(1, most=4)], noise=0.02)
    slots = []
    for _ in range(60):
        cluster.run(1)
        slots += [len(job.running_on) for job in cluster.jobs.values()]
    return cluster, slots


def test_a_growth_that_makes_a_job_five_times_slower_is_gone_after_three_seconds() -> None:
    cluster, slots = lived(cores=0)  # nobody said that the slots share any

    promised = [float(said) for *_, text in cluster.changes for said in PROMISE.findall(text)]
    assert max(promised) < 2.0
    assert slots.count(4) == 3
    assert slots[-1] == 2
    (shrunk,) = [text for *_, code, text in cluster.changes if code == "shrink"]
    took_back = "undoes its growth, which made 0.25 x the progress of before"
    assert shrunk == f"{took_back}; goes on with 2 slots and batch 256"


@pytest.mark.parametrize("cores", [1, 2])
def test_where_cores_are_known_it_is_not_even_tried(cores: int) -> None:
    _, slots = lived(cores)

    assert set(slots) == set(range(1, cores + 1))


# --- who waits, and who wants a core


def telemetry(job: JobId, **known: Any) -> StepsSeen:
    return StepsSeen(
        job=job, group=1, slots=1, nodes=1, global_batch=64, step=20,
        **{"family": "f", "samples_done": 1000, "samples_per_s": 100.0, **known},
    )  # fmt: skip


def crowd(*jobs: JobView, slots: int = 4, cores: int = 2) -> ClusterView:
    return view_of(list(taken_slots(row_of(slots, cores=cores), jobs)), *jobs)


def short(job: JobId, place: int) -> JobView:
    """Ten seconds are left of it."""
    return job_view(
        job, slots=(1, 4), batch_limit=512, local_limit=128, family="f", stop_samples=2000,
        samples_done=1000, epoch=1, epoch_samples=1000, epoch_at=Seconds(95.0),
        moved_at=Seconds(80.0), running_on={row_of(4)[place].slot: 64}, last_batch=64,
    )  # fmt: skip


def test_a_long_job_does_not_wait_beside_free_slots_because_it_would_slow_down_short_ones() -> None:
    policy = make("ones", {})
    running = [short(A, 0), short(B, 1)]
    for done in range(1000, 1300, 64):
        for job, family in ((A, "f"), (B, "f"), (JobId("x"), "g")):  # x: a relative of the long one
            policy.observe(telemetry(job, family=family, samples_done=done), Seconds(90.0))
    long = job_view(C, 99.0, slots=(1, 4), family="g", stop_samples=1_000_000)
    view = crowd(*running, long)

    policy.improve(view, Budget(generations=20), default_rng(0), Seconds(100.0))
    plan = policy.plan(view, Seconds(100.0))

    assert {job: len(placed) for job, placed in plan.local_batch.items()} == {A: 1, B: 1, C: 1}


@pytest.mark.parametrize(
    ("used", "cores"),
    [
        ({}, 2),  # nobody knows
        ({A: 1.0, B: 1.0}, 2),
        ({A: 0.05, B: 1.0}, 2),  # one that wants a core is enough
        ({A: 0.3, B: 0.05}, 4),
        ({A: 0.05, B: 0.05}, 32),
        ({A: 0.05}, 32),  # B is a relative
    ],
)
def test_workers_that_wait_for_something_else_share_cores_with_nobody(
    used: dict[JobId, float], cores: int
) -> None:
    demand = CoreDemand()
    for job, usage in used.items():
        demand.observe(telemetry(job, cpu_cores=usage))
    view = crowd(short(A, 0), short(B, 1))

    assert {slot.cores for slot in demand.shown(view).slots} == {cores}


def test_on_a_host_without_a_core_to_spare_nobody_can_tell_what_workers_want() -> None:
    """Six workers of a job use a third of a core each: of two, as much as there is."""
    demand = CoreDemand()
    demand.observe(telemetry(A, cpu_cores=0.33))
    slots = row_of(8, cores=2)
    job = job_view(A, slots=(1, 8), family="f", running_on={s.slot: 8 for s in slots[:6]})

    assert {slot.cores for slot in demand.shown(crowd(job, slots=8)).slots} == {2}


def test_a_relative_that_ended_is_remembered_and_gpus_have_no_cores() -> None:
    demand = CoreDemand()
    demand.observe(telemetry(A, cpu_cores=0.05))
    demand.observe(JobEnded(job=A, family="f", samples_done=1, succeeded=True))
    of_gpus = crowd(short(B, 1), cores=0)

    assert {slot.cores for slot in demand.shown(crowd(short(B, 1))).slots} == {32}
    assert demand.shown(of_gpus) is of_gpus


@pytest.mark.parametrize(("used", "most"), [(1.0, 2), (0.05, 4)])
def test_a_job_that_sleeps_grows_beyond_the_cores_of_its_host(used: float, most: int) -> None:
    class Sleeps(SteadyCluster):
        def _carry_out(self, view: ClusterView) -> None:
            for job in view.jobs.values():
                seen = telemetry(C, family=job.family, samples_per_s=0.0, cpu_cores=used)
                self.policy.observe(seen, Seconds(self.now))  # a relative
            super()._carry_out(view)

    cluster = Sleeps(row_of(4, cores=2), [a_job(1, most=4)], noise=0.02)
    cluster.run(120)

    assert max(len(job.running_on) for job in cluster.jobs.values()) == most
