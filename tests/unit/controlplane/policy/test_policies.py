"""Properties of all policies."""

from __future__ import annotations

import math
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from controlplane.policy.api import Budget, ClusterView, Plan, Policy, PolicyEvent
from controlplane.policy.min_slots import fallback_plan
from controlplane.policy.placement.placers import PlacerName
from controlplane.policy.placement.slot_partition import split
from controlplane.policy.registry import POLICIES, check_options, entry, make
from schemas.ids import JobId, Seconds
from tests.support.builders import cluster_view, job_view
from tests.support.sizes import examples
from tests.support.views import (
    NOW,
    InstantCluster,
    ToldOracle,
    a_job,
    events_of,
    row_of,
    view_of,
    views,
    views_and_events,
)

Shown = tuple[ClusterView, list[PolicyEvent]]
History = list[tuple[float, Shown]]
EACH_POLICY = pytest.mark.parametrize("name", POLICIES)
SIZE = settings(max_examples=examples(30), deadline=None)


def made(name: str, options: dict[str, Any] | None = None) -> Policy:
    """New policy, with an oracle if it needs one."""
    return make(name, options, ToldOracle() if entry(name).oracle == "must" else None)


def asked(policy: Policy, told: Shown, now: float = NOW) -> Plan:
    """Plan after the events and a short search."""
    view, events = told
    for event in events:
        policy.observe(event, Seconds(now))
    policy.improve(view, Budget(generations=2), default_rng(0), Seconds(now))
    return policy.plan(view, Seconds(now))


def answer(name: str, told: Shown) -> Plan:
    """Plan of a policy, or the fallback plan."""
    return fallback_plan(told[0], NOW) if name == "fill" else asked(made(name), told)


# --- properties of a plan


def slots_exist_and_are_given_once(view: ClusterView, plan: Plan) -> None:
    given_slots = [slot for placed in plan.local_batch.values() for slot in placed]
    assert len(given_slots) == len(set(given_slots))
    assert set(given_slots) <= {slot.slot for slot in view.slots}
    assert set(plan.local_batch) <= set(view.jobs)


def slots_are_free_or_given_up(view: ClusterView, plan: Plan) -> None:
    open_ = {slot.slot for slot in view.slots if slot.usable or slot.leaving}
    given_up = {
        slot
        for job in view.jobs.values()
        if job.movable
        for slot in job.running_on
        if slot not in plan.local_batch.get(job.job, {})
    }
    for job, placed in plan.local_batch.items():
        assert placed.keys() <= open_ | given_up | view.jobs[job].running_on.keys()


def changed_jobs_are_within_bounds(view: ClusterView, plan: Plan) -> None:
    for name, placed in plan.local_batch.items():
        job = view.jobs[name]
        if placed and placed != job.running_on:
            assert job.least <= len(placed) <= job.most
            assert all(1 <= batch <= job.local_limit for batch in placed.values())
            assert sum(placed.values()) <= job.batch_limit


def immovable_jobs_stay(view: ClusterView, plan: Plan) -> None:
    for job in view.jobs.values():
        if not job.movable:
            assert plan.local_batch.get(job.job, {}) == job.running_on


def jobs_wait_while_they_back_off_or_may_not_change(view: ClusterView, plan: Plan) -> None:
    for job in view.jobs.values():
        if not job.running_on and job.ready_at > NOW:
            assert not plan.local_batch.get(job.job)
        if job.running_on and job.retry_at > NOW:
            assert plan.local_batch[job.job] == job.running_on


CODES = {
    "start", "resume", "grow", "shrink", "pause", "pack", "move", "batch", "restart",
    "waits", "backing_off", "too_large", "no_slots", "restore", "fill", "next_in_line", "rejected",
}  # fmt: skip


def only_jobs_that_change_or_wait_have_reasons(view: ClusterView, plan: Plan) -> None:
    concerned = {job.job for job in view.jobs.values() if job.movable or job.running_on}
    unchanged = {
        job.job
        for job in view.jobs.values()
        if job.running_on and plan.local_batch.get(job.job) == job.running_on
    }
    assert set(plan.reasons) == concerned - unchanged - plan.rejected.keys()
    for reason in (*plan.reasons.values(), *plan.rejected.values()):
        assert reason.code in CODES
        assert reason.text
        assert all(map(math.isfinite, reason.numbers.values()))


def only_undecided_jobs_are_rejected(view: ClusterView, plan: Plan) -> None:
    assert all(view.jobs[name].undecided and view.jobs[name].movable for name in plan.rejected)
    assert not plan.rejected.keys() & (plan.local_batch.keys() | plan.promised.keys())


def promises_and_forecasts_are_for_jobs_of_the_view(view: ClusterView, plan: Plan) -> None:
    assert plan.based_on == view.version
    assert plan.promised.keys() <= view.jobs.keys()
    assert all(math.isfinite(end) for end in plan.promised.values())
    assert not any(plan.local_batch.get(name) for name in plan.starts)
    assert plan.starts.keys() <= view.jobs.keys()
    for start in plan.starts.values():
        assert NOW <= start.earliest <= start.at <= start.latest < math.inf


def jobs_that_lost_members_wait_or_grow_back_or_stop(view: ClusterView, plan: Plan) -> None:
    up = {slot.slot for slot in view.slots if slot.up}
    for job in view.jobs.values():
        if job.movable and job.retry_at <= NOW and job.running_on.keys() <= up:
            placed = plan.local_batch.get(job.job, {})
            assert not placed or len(placed) >= job.least


PROPERTIES = (
    slots_exist_and_are_given_once,
    slots_are_free_or_given_up,
    changed_jobs_are_within_bounds,
    immovable_jobs_stay,
    jobs_wait_while_they_back_off_or_may_not_change,
    only_jobs_that_change_or_wait_have_reasons,
    only_undecided_jobs_are_rejected,
    promises_and_forecasts_are_for_jobs_of_the_view,
    jobs_that_lost_members_wait_or_grow_back_or_stop,
)
OVER_TIME = tuple(holds for holds in PROPERTIES if not holds.__name__.startswith("jobs_"))


@settings(max_examples=examples(60), deadline=None)
@given(told=views_and_events)
def test_plans_are_valid_and_reproducible(told: Shown) -> None:
    """For each policy in turn, with the same view, events, seed and budget."""
    for name in (*POLICIES, "fill"):
        note(name)

        plan = answer(name, told)

        assert msgspec.msgpack.encode(answer(name, told)) == msgspec.msgpack.encode(plan)
        for holds in PROPERTIES:
            holds(told[0], plan)


PLACING = [name for name in POLICIES if "placer" in check_options(name, {}).__struct_fields__]


@SIZE
@given(
    name=st.sampled_from(PLACING),
    placer=st.sampled_from(get_args(PlacerName)),
    told=views_and_events,
)
def test_plans_are_valid_with_every_placer(name: str, placer: PlacerName, told: Shown) -> None:
    plan = asked(made(name, {"placer": placer}), told)

    assert asked(made(name, {"placer": placer}), told) == plan
    for holds in PROPERTIES:
        holds(told[0], plan)


@EACH_POLICY
def test_the_plan_of_an_empty_cluster_is_empty(name: str) -> None:
    assert made(name).plan(cluster_view(version=7), NOW) == Plan(based_on=7)


@SIZE
@given(view=views())
def test_reading_a_plan_changes_nothing_and_a_back_off_wakes_it(view: ClusterView) -> None:
    backing_off = [
        job.ready_at
        for job in view.jobs.values()
        if job.movable and not job.running_on and job.least <= len(view.slots)
        if job.ready_at > NOW
    ]
    for name in POLICIES:
        note(name)
        policy = made(name)
        plans = [policy.plan(view, NOW), policy.plan(view, NOW), made(name).plan(view, NOW)]
        assert len({msgspec.msgpack.encode(plan) for plan in plans}) == 1

        plan = answer(name, (view, []))

        for ready_at in backing_off:
            assert plan.wake_at is not None
            assert NOW < plan.wake_at <= ready_at


# --- over time


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Views and events of one cluster at a few moments."""
    now, view, history = float(NOW), draw(views(most_jobs=4, nodes=[2, 3])), []
    for version in range(2, 2 + draw(st.integers(1, 4))):
        history.append((now, (view, draw(events_of(view, at_most=3)))))
        now += draw(st.sampled_from([0.0, 1.0, 60.0, 700.0]))
        view = draw(later(view, version))
    return history


@st.composite
def later(draw: st.DrawFn, view: ClusterView, version: int) -> ClusterView:
    """A later view: jobs ended, arrived, or have other slots."""
    slots = row_of(2, 3)
    free = list(draw(st.permutations([slot.slot for slot in slots])))
    jobs = []
    for job in view.jobs.values():
        size = draw(st.sampled_from([0, job.least, min(job.most, job.batch_size)]))
        here, free = (free[:size], free[size:]) if size <= len(free) else ([], free)
        placed = split(job.batch_size, here) if here else {}
        how = draw(st.sampled_from(["moves", "moves", "hangs", "ends"]))
        if how != "ends":
            jobs.append(msgspec.structs.replace(job, running_on=placed, movable=how != "hangs"))
    if draw(st.booleans()):
        jobs.append(draw(a_job(10 * version, free)))
    return view_of(slots, *jobs, version=version)


@SIZE
@given(history=histories())
def test_plans_over_time_are_valid_and_reproducible(history: History) -> None:
    """A repeated request does not change later plans."""
    for name in POLICIES:
        note(name)
        once, twice = made(name), made(name)

        plans = [asked(once, told, now) for now, told in history]

        for plan, (now, told) in zip(plans, history, strict=True):
            assert asked(twice, told, now) == plan
            assert twice.plan(told[0], Seconds(now)) == plan
            for holds in OVER_TIME:
                holds(told[0], plan)


@EACH_POLICY
@SIZE
@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(3, 90)), min_size=1, max_size=7
    ),
    ends=st.lists(st.booleans(), min_size=7, max_size=7),
)
def test_a_policy_converges_when_its_plans_are_followed(
    name: str, jobs: list[tuple[int, int, int]], ends: list[bool]
) -> None:
    cluster = InstantCluster(made(name), row_of(2, 4))
    for number, ((least, more, batch), over) in enumerate(zip(jobs, ends, strict=False)):
        job = JobId(f"j-{number}")
        limits = {"batch_size": batch, "batch_limit": 4 * batch, "local_limit": 2 * batch}
        most = least + more
        cluster.submit(
            job_view(job, cluster.now, slots=(least, most), wanted=min(batch, most), **limits)
        )
        cluster.at(cluster.now + 100.0)
        if over:
            cluster.end(job)
            cluster.at(cluster.now + 50.0)


ENDLESS = [
    *((name, {}) for name in ("fifo", "fair", "slaq")),
    ("fair", {"quantum_s": 100.0}),
    ("slaq", {"quantum_s": 0.0}),
    ("tiresias", {"limits": [400.0], "promote_after": 2.0}),
]


@pytest.mark.parametrize(("name", "options"), ENDLESS)
def test_a_large_job_is_served_among_small_ones(name: str, options: dict[str, Any]) -> None:
    assert service_of_a_large_job(name, options) > 1000.0


def test_without_promotion_a_large_job_starves_under_tiresias() -> None:
    assert service_of_a_large_job("tiresias", {"limits": [400.0]}) <= 800.0


def service_of_a_large_job(name: str, options: dict[str, Any]) -> float:
    """Slot seconds of a job of four slots on four; two jobs of two arrive every 50 s."""
    large, small = JobId("large-0"), 0
    cluster = InstantCluster(made(name, options), row_of(4))
    cluster.submit(job_view(large, at=0.0, slots=(4, 4)))
    for now in range(0, 5000, 50):
        for view in list(cluster.jobs.values()):
            if view.job != large and view.served(Seconds(now)) >= 200.0:
                cluster.end(view.job)
        for _ in range(2):
            small += 1
            cluster.submit(job_view(JobId(f"small-{small}"), at=now, slots=(2, 2)))
        cluster.at(now)
    return cluster.jobs[large].served(cluster.now)
