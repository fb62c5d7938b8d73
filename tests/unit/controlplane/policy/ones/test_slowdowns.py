"""Slow-downs by shared cores, priors of speed-ups, and where jobs run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pytest
from numpy.random import default_rng

from controlplane.policy.api import Budget, ClusterView, JobEnded, JobView, StepsSeen
from controlplane.policy.ones.slowdowns import CoreDemand, LearnedSlowdowns, PlacementIndex
from controlplane.policy.registry import make
from controlplane.policy.search.observed_families import FamilyHistories, FamilyRecord
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import S0, S1, T0, T1, A, B, C, job_view
from tests.support.views import row_of, steps_seen, taken_slots, view_of
from tests.unit.controlplane.policy.ones.steady_cluster import SteadyCluster, a_job
from tests.unit.controlplane.policy.tables import cases

ALONE: Final = 64 / 5000  # seconds of a step of 64 samples on one slot
CROWDED: Final = {1: 1.0, 2: 1.7, 3: 4.0, 4: 10.0}  # times that by slots: 500 samples/s on four
PROMISE: Final = re.compile(r"expected: ([\d.]+) x its present speed")


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


def test_a_growth_that_loses_is_undone_after_three_seconds() -> None:
    cluster, slots = lived(cores=0)  # nobody said that the slots share any

    promised = [float(said) for *_, text in cluster.changes for said in PROMISE.findall(text)]
    assert max(promised) < 2.0
    assert slots.count(4) == 3
    assert slots[-1] == 2
    (shrunk,) = [text for *_, code, text in cluster.changes if code == "shrink"]
    took_back = "undoes its growth (measured: 0.25 x the former progress)"
    assert shrunk == f"{took_back}; goes on with 2 slots and batch 256"


@pytest.mark.parametrize("cores", [1, 2])
def test_a_job_does_not_grow_beyond_known_cores(cores: int) -> None:
    _, slots = lived(cores)

    assert set(slots) == set(range(1, cores + 1))


# --- who waits, and who wants a core


def telemetry(job: JobId, **known: Any) -> StepsSeen:
    return steps_seen(job, **{"family": "f", "step": 20, "samples_done": 1000, **known})


def crowd(*jobs: JobView, slots: int = 4, cores: int = 2) -> ClusterView:
    return view_of(list(taken_slots(row_of(slots, cores=cores), jobs)), *jobs)


def short(job: JobId, place: int) -> JobView:
    """Ten seconds are left of it."""
    return job_view(
        job, slots=(1, 4), batch_limit=512, local_limit=128, family="f", stop_samples=2000,
        samples_done=1000, epoch=1, epoch_samples=1000, epoch_at=Seconds(95.0),
        moved_at=Seconds(80.0), running_on={row_of(4)[place].slot: 64}, last_batch=64,
    )  # fmt: skip


def test_a_long_job_starts_beside_short_jobs_on_shared_cores() -> None:
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


SHORT = (short(A, 0), short(B, 1))
OF_SIX = job_view(A, slots=(1, 8), family="f", running_on={s.slot: 8 for s in row_of(8)[:6]})


@cases(
    "used, ended, view, cores",
    unknown=({}, False, crowd(*SHORT), 2),
    both_want_a_core=({A: 1.0, B: 1.0}, False, crowd(*SHORT), 2),
    one_that_wants_a_core_is_enough=({A: 0.05, B: 1.0}, False, crowd(*SHORT), 2),
    a_third_of_a_core=({A: 0.3, B: 0.05}, False, crowd(*SHORT), 4),
    hardly_any=({A: 0.05, B: 0.05}, False, crowd(*SHORT), 32),
    a_relative_hardly_uses_any=({A: 0.05}, False, crowd(*SHORT), 32),
    # Six workers of a job use a third of a core each: of two, as much as there is.
    a_busy_host=({A: 0.33}, False, crowd(OF_SIX, slots=8), 2),
    the_demand_of_a_family_outlives_its_jobs=({A: 0.05}, True, crowd(SHORT[1]), 32),
    slots_without_cores=({A: 0.05}, True, crowd(SHORT[1], cores=0), 0),
)
def test_workers_that_hardly_use_a_core_share_none(
    *, used: dict[JobId, float], ended: bool, view: ClusterView, cores: int
) -> None:
    demand = CoreDemand()
    for job, usage in used.items():
        demand.observe(telemetry(job, cpu_cores=usage))
        if ended:
            demand.observe(JobEnded(job=job, family="f", samples_done=1, succeeded=True))

    shown = demand.shown(view)

    assert {slot.cores for slot in shown.slots} == {cores}
    assert cores or shown is view


@pytest.mark.parametrize(("used", "most"), [(1.0, 2), (0.05, 4)])
def test_a_job_that_hardly_computes_grows_beyond_the_cores(used: float, most: int) -> None:
    class Sleeps(SteadyCluster):
        def _carry_out(self, view: ClusterView) -> None:
            for job in view.jobs.values():
                seen = telemetry(C, family=job.family, samples_per_s=0.0, cpu_cores=used)
                self.policy.observe(seen, Seconds(self.now))  # a relative
            super()._carry_out(view)

    cluster = Sleeps(row_of(4, cores=2), [a_job(1, most=4)], noise=0.02)
    cluster.run(120)

    assert max(len(job.running_on) for job in cluster.jobs.values()) == most


BATCH = 32


def seen(families: FamilyHistories, name: str, *steps: float) -> FamilyRecord:
    """A family that was measured on 1, 2, ... slots, with the same batch on each."""
    family = families[name]
    for slots, step_s in enumerate(steps, 1):
        family.add(1, slots, BATCH, step_s)
    family.speed_model(BATCH)
    return family


def speed_up(own: tuple[float, ...], *others: tuple[float, ...], few: int = 1) -> float:
    """On twice as many slots, with twice the batch, after such step times of all families."""
    families = FamilyHistories()
    family = seen(families, "f", *own)
    for number, steps in enumerate(others):
        seen(families, f"g{number}", *steps)
    LearnedSlowdowns(families).by_type(("",), ["f"])
    sizes = np.array([few, 2 * few])
    step = family.speed_model(BATCH).step_s(np.ones(2), sizes, np.full(2, float(BATCH)))
    return float(2 * step[0] / step[1])


@cases(
    "steps, scaling",
    one_size=((0.1,), (None, None)),
    twice_as_fast=((0.1, 0.1), (pytest.approx(1.0, abs=0.02), None)),
    as_fast=((0.1, 0.2), (pytest.approx(0.0, abs=0.02), None)),
    slower=((0.1, 0.4), (0.0, None)),
    less_beyond_two_slots=(
        (0.1, 0.1, 0.1, 0.1 * 2**0.5), (pytest.approx(1.0, abs=0.05), pytest.approx(0.5, abs=0.05))),
)  # fmt: skip
def test_a_family_has_a_scaling_after_several_sizes(steps: tuple[float, ...], scaling: Any) -> None:
    assert seen(FamilyHistories(), "f", *steps).scaling() == scaling


@cases(
    "others, few, exponent",
    the_prior=([], 1, 0.9),
    at_least_07=([(0.1, 0.2)], 1, 0.7),
    the_mean_with_the_prior=([(0.1, 0.2 / 2.0**0.6)], 1, 0.75),
    half_of_the_gain_is_lost_beyond_two_slots=([], 2, 0.5),
    the_mean_beyond_two_slots=([(0.1, 0.1, 0.1, 0.1)], 2, 0.75),
)
def test_a_new_family_is_expected_to_speed_up_as_other_families_did(
    others: list[tuple[float, ...]], few: int, exponent: float
) -> None:
    assert speed_up((0.1,), *others, few=few) == pytest.approx(2.0**exponent, rel=0.02)


def test_a_family_measured_on_two_slots_ignores_others() -> None:
    assert speed_up((0.1, 0.1), *[(0.1, 0.2)] * 5) == speed_up((0.1, 0.1))


D = JobId("d-4")


def on(job: JobId, *slots: SlotId, family: str = "f", **is_changing: Any) -> JobView:
    return job_view(job, family=family, running_on=dict.fromkeys(slots, 8), **is_changing)


def looked(*jobs: JobView, models: tuple[str, ...] = ("", "")) -> PlacementIndex:
    """Two nodes with two slots each."""
    where = PlacementIndex()
    where.update(view_of(row_of(2, 2, models=models), *jobs))
    return where


def test_before_the_first_view_no_job_has_a_place() -> None:
    where = PlacementIndex()

    assert (where.gpu_type(A), where.is_changing(A), where.types) == ("", False, ())


def test_the_type_of_a_job_is_that_of_its_slots_or_a_mixture_if_types_differ() -> None:
    where = looked(on(A, S0), on(B, T0), on(C, T1, S1), models=("v100", "a100"))
    alike = looked(on(A, S0), models=("a100", "a100"))

    assert [where.gpu_type(job) for job in (A, B, C, D)] == ["v100", "a100", "a100+v100", ""]
    assert where.types == ("v100", "a100")
    assert (alike.gpu_type(A), alike.types) == ("", ("a100",))


def test_a_new_view_replaces_the_former_one() -> None:
    where = looked(on(A, S0), models=("v100", "v100"))
    assert where.gpu_type(A) == ""

    where.update(view_of(row_of(2, 2, models=("v100", "a100")), on(A, S0)))
    assert where.gpu_type(A) == "v100"

    where.update(view_of([], on(A, S0)))  # lost slots have no nodes
    assert where.gpu_type(A) == ""


def test_a_job_that_may_not_move_is_changing() -> None:
    where = looked(on(A, S0, movable=False), on(B, T0))

    assert [where.is_changing(job) for job in (A, B, C)] == [True, False, False]
