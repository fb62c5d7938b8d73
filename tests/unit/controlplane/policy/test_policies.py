"""What every policy keeps to, whatever it is shown and told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from controlplane.policy.api import Budget, ClusterView, JobView, Plan, Policy, PolicyEvent
from controlplane.policy.baselines.fifo import Fifo
from controlplane.policy.min_slots import MinSlotsPolicy, fallback_plan
from controlplane.policy.ones.policy import Ones
from controlplane.policy.options import OnesOptions
from controlplane.policy.placement.placers import PlacerName
from controlplane.policy.placement.slot_partition import split
from controlplane.policy.registry import POLICIES, check_options, entry, make
from schemas.errors import SettingsError
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import job_view
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
    """A new policy, with an oracle if it cannot do without."""
    return make(name, options, ToldOracle() if entry(name).oracle == "must" else None)


def asked(policy: Policy, told: Shown, now: float = NOW) -> Plan:
    """What it answers after the events and some thinking."""
    view, events = told
    for event in events:
        policy.observe(event, Seconds(now))
    policy.improve(view, Budget(generations=2), default_rng(0), Seconds(now))
    return policy.plan(view, Seconds(now))


def answer(name: str, told: Shown) -> Plan:
    """The plan of a policy; or of what stands in while a search is away."""
    return fallback_plan(told[0], NOW) if name == "fill" else asked(made(name), told)


def changed(plan: Plan, view: ClusterView) -> list[tuple[JobView, Mapping[SlotId, int]]]:
    """Jobs that get other slots or batches, and which; a job that stops or waits is not in it."""
    return [
        (view.jobs[name], placed)
        for name, placed in plan.local_batch.items()
        if placed and placed != view.jobs[name].running_on
    ]


# --- what each promises


def no_slot_is_given_twice_and_none_that_does_not_exist(view: ClusterView, plan: Plan) -> None:
    given_slots = [slot for placed in plan.local_batch.values() for slot in placed]
    assert len(given_slots) == len(set(given_slots))
    assert set(given_slots) <= {slot.slot for slot in view.slots}
    assert set(plan.local_batch) <= set(view.jobs)


def a_slot_is_nobodys_or_given_up_by_its_holder(view: ClusterView, plan: Plan) -> None:
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


def a_job_that_changes_runs_as_a_gang_within_its_bounds(view: ClusterView, plan: Plan) -> None:
    for job, placed in changed(plan, view):
        assert job.least <= len(placed) <= job.most


def the_batches_of_a_job_that_changes_are_within_its_bounds(view: ClusterView, plan: Plan) -> None:
    for job, placed in changed(plan, view):
        assert all(1 <= batch <= job.local_limit for batch in placed.values())
        assert sum(placed.values()) <= job.batch_limit


def a_job_that_nobody_may_move_is_kept_as_it_is(view: ClusterView, plan: Plan) -> None:
    for job in view.jobs.values():
        if not job.movable:
            assert plan.local_batch.get(job.job, {}) == job.running_on


def a_job_that_backs_off_is_not_started(view: ClusterView, plan: Plan) -> None:
    for job in view.jobs.values():
        if not job.running_on and job.ready_at > NOW:
            assert not plan.local_batch.get(job.job)


def a_running_job_whose_last_change_came_to_nothing_is_left_alone_for_a_while(
    view: ClusterView, plan: Plan
) -> None:
    for job in view.jobs.values():
        if job.running_on and job.retry_at > NOW:
            assert plan.local_batch[job.job] == job.running_on


def every_job_that_changes_or_waits_is_told_why_and_no_other(view: ClusterView, plan: Plan) -> None:
    concerned = {job.job for job in view.jobs.values() if job.movable or job.running_on}
    unchanged = {
        job.job
        for job in view.jobs.values()
        if job.running_on and plan.local_batch.get(job.job) == job.running_on
    }
    assert set(plan.reasons) == concerned - unchanged - plan.rejected.keys()
    said = (*plan.reasons.values(), *plan.rejected.values())
    assert all(reason.code and reason.text for reason in said)


def only_a_job_that_never_started_and_was_promised_nothing_is_rejected(
    view: ClusterView, plan: Plan
) -> None:
    assert all(view.jobs[name].undecided and view.jobs[name].movable for name in plan.rejected)
    assert not plan.rejected.keys() & (plan.local_batch.keys() | plan.promised.keys())


def promises_are_made_to_jobs_that_are_there(view: ClusterView, plan: Plan) -> None:
    assert plan.promised.keys() <= view.jobs.keys()
    assert all(math.isfinite(end) for end in plan.promised.values())


def starts_are_foretold_to_jobs_that_wait_and_not_of_the_past(
    view: ClusterView, plan: Plan
) -> None:
    assert not any(plan.local_batch.get(name) for name in plan.starts)
    assert plan.starts.keys() <= view.jobs.keys()
    for said in plan.starts.values():
        assert NOW <= said.earliest <= said.at <= said.latest < math.inf


def a_job_that_lost_members_has_its_least_again_or_stops(view: ClusterView, plan: Plan) -> None:
    up = {slot.slot for slot in view.slots if slot.up}
    for job in view.jobs.values():
        if job.movable and job.retry_at <= NOW and job.running_on.keys() <= up:
            placed = plan.local_batch.get(job.job, {})
            assert not placed or len(placed) >= job.least


def a_plan_says_which_view_it_is_based_on(view: ClusterView, plan: Plan) -> None:
    assert plan.based_on == view.version


PROMISES = (
    no_slot_is_given_twice_and_none_that_does_not_exist,
    a_slot_is_nobodys_or_given_up_by_its_holder,
    a_job_that_changes_runs_as_a_gang_within_its_bounds,
    the_batches_of_a_job_that_changes_are_within_its_bounds,
    a_job_that_nobody_may_move_is_kept_as_it_is,
    a_job_that_backs_off_is_not_started,
    a_running_job_whose_last_change_came_to_nothing_is_left_alone_for_a_while,
    every_job_that_changes_or_waits_is_told_why_and_no_other,
    only_a_job_that_never_started_and_was_promised_nothing_is_rejected,
    promises_are_made_to_jobs_that_are_there,
    starts_are_foretold_to_jobs_that_wait_and_not_of_the_past,
    a_job_that_lost_members_has_its_least_again_or_stops,
    a_plan_says_which_view_it_is_based_on,
)


OVER_TIME = tuple(
    promise
    for promise in PROMISES
    if not any(word in promise.__name__ for word in ("backs_off", "a_while", "lost_members"))
)


@settings(max_examples=examples(60), deadline=None)
@given(told=views_and_events)
def test_policies_keep_their_promises_and_give_the_same_bytes_again(told: Shown) -> None:
    """The same view, events, seed and budget, whatever they are; for each policy in turn."""
    for name in (*POLICIES, "fill"):
        note(name)

        plan = answer(name, told)

        assert msgspec.msgpack.encode(answer(name, told)) == msgspec.msgpack.encode(plan)
        for promise in PROMISES:
            promise(told[0], plan)


PLACING = [name for name in POLICIES if "placer" in check_options(name, {}).__struct_fields__]


@SIZE
@given(
    name=st.sampled_from(PLACING),
    placer=st.sampled_from(get_args(PlacerName)),
    told=views_and_events,
)
def test_whoever_places_policies_keep_their_promises(
    name: str, placer: PlacerName, told: Shown
) -> None:
    plan = asked(made(name, {"placer": placer}), told)

    assert asked(made(name, {"placer": placer}), told) == plan
    for promise in PROMISES:
        promise(told[0], plan)


@SIZE
@given(view=views())
def test_to_read_a_plan_out_changes_nothing(view: ClusterView) -> None:
    for name in POLICIES:
        note(name)
        policy = made(name)

        plans = [policy.plan(view, NOW), policy.plan(view, NOW), made(name).plan(view, NOW)]

        assert len({msgspec.msgpack.encode(plan) for plan in plans}) == 1


@SIZE
@given(view=views())
def test_policies_ask_to_be_woken_for_the_first_that_backs_off(view: ClusterView) -> None:
    backing_off = [
        job.ready_at
        for job in view.jobs.values()
        if job.movable and not job.running_on and job.least <= len(view.slots)
        if job.ready_at > NOW
    ]
    for name in POLICIES:
        note(name)

        plan = answer(name, (view, []))

        for ready_at in backing_off:
            assert plan.wake_at is not None
            assert NOW < plan.wake_at <= ready_at


# --- over time


@st.composite
def histories(draw: st.DrawFn) -> History:
    """One cluster and events of it at a few moments, whatever happened in between."""
    now, view, history = float(NOW), draw(views(most_jobs=4, nodes=[2, 3])), []
    for version in range(2, 2 + draw(st.integers(1, 4))):
        history.append((now, (view, draw(events_of(view, at_most=3)))))
        now += draw(st.sampled_from([0.0, 1.0, 60.0, 700.0]))
        view = draw(later(view, version))
    return history


@st.composite
def later(draw: st.DrawFn, view: ClusterView, version: int) -> ClusterView:
    """Some jobs of `view` ended, others came; any may have got other slots or none."""
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
def test_as_time_goes_by_promises_hold_and_neither_asking_twice_nor_again_shows(
    history: History,
) -> None:
    """The same history gives the same plans; to ask for one once more changes none after it."""
    for name in POLICIES:
        note(name)
        once, twice = made(name), made(name)

        plans = [asked(once, told, now) for now, told in history]

        for plan, (now, told) in zip(plans, history, strict=True):
            assert asked(twice, told, now) == plan
            assert twice.plan(told[0], Seconds(now)) == plan
            for promise in OVER_TIME:
                promise(told[0], plan)


@EACH_POLICY
@SIZE
@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(3, 90)), min_size=1, max_size=7
    ),
    ends=st.lists(st.booleans(), min_size=7, max_size=7),
)
def test_a_policy_comes_to_rest_when_its_plans_are_followed(
    name: str, jobs: list[tuple[int, int, int]], ends: list[bool]
) -> None:
    cluster = InstantCluster(made(name), row_of(2, 4))
    for number, ((least, more, batch), over) in enumerate(zip(jobs, ends, strict=False)):
        job = JobId(f"j-{number}")
        cluster.submit(
            job_view(
                job,
                at=cluster.now,
                slots=(least, least + more),
                wanted=min(batch, least + more),
                batch_size=batch,
                batch_limit=4 * batch,
                local_limit=2 * batch,
            )
        )
        cluster.at(cluster.now + 100.0)
        if over:
            cluster.end(job)
            cluster.at(cluster.now + 50.0)


ENDLESS = [
    ("fifo", {}),
    ("fair", {}),
    ("fair", {"quantum_s": 100.0}),
    ("slaq", {}),
    ("slaq", {"quantum_s": 0.0}),
    ("tiresias", {"limits": [400.0], "promote_after": 2.0}),
]


@pytest.mark.parametrize(("name", "options"), ENDLESS)
def test_a_large_job_is_served_however_many_small_ones_come(
    name: str, options: dict[str, Any]
) -> None:
    assert service_of_a_large_job(name, options) > 1000.0


def test_without_promotion_tiresias_lets_a_large_job_starve() -> None:
    assert service_of_a_large_job("tiresias", {"limits": [400.0]}) <= 800.0


def service_of_a_large_job(name: str, options: dict[str, Any]) -> float:
    """Slot seconds of a job of four slots on four, where two more of two come every 50 s."""
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


# --- the registry


@pytest.mark.parametrize(("name", "type_"), [("fifo", Fifo), ("ones", Ones)])
def test_a_policy_is_made_by_name(name: str, type_: type) -> None:
    made_by_name = make(name)

    assert isinstance(made_by_name, MinSlotsPolicy)
    assert type(made_by_name.policy) is type_


def test_a_policy_is_made_with_its_options_and_defaults_for_the_rest() -> None:
    made = make("ones", {"population": 4, "batch_caps": False})

    assert isinstance(made, MinSlotsPolicy)
    assert isinstance(made.policy, Ones)
    assert made.policy.options == OnesOptions(population=4, batch_caps=False)


def test_only_a_policy_that_searches_is_given_a_process() -> None:
    searching = {name for name in POLICIES if entry(name).searches}

    assert searching == {
        "drl",
        "ones",
        "ones-paper",
        "optimus",
        "goodput",
        "slaq",
        "oasis",
        "harmony",
        "harmony-drl",
    }


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        SettingsError,
        match=r"unknown policy 'lifo'; did you mean fifo\? choose one of drl, fair, fifo, g",
    ) as e:
        make("lifo")
    assert e.value.field == "policy"


def test_an_unknown_option_or_value_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"unknown field `speed`; known: placer") as unknown:
        check_options("fifo", {"speed": 1})
    with pytest.raises(SettingsError, match=r"'dense' .*; choose one of roomiest, con") as value:
        check_options("fifo", {"placer": "dense"})
    assert unknown.value.field == value.value.field == "policy.options"


@pytest.mark.parametrize(
    ("options", "field", "said"),
    [
        ({"speed": 1}, "policy.options", r"unknown field `speed`; known: seed, search, population"),
        ({"population": "many"}, "policy.options", r"\$\.population"),
        ({"length_model": "up"}, "policy.options", r"\$\.length_model"),
        ({"population": 1}, "policy.options.population", "population: 1 is below 2; raise it"),
        ({"growth": 0.5}, "policy.options.growth", "growth: 0.5 is below 1.0; raise it"),
        ({"mutation_rate": 1.5}, "policy.options.mutation_rate", "1.5 is above 1; lower it"),
        ({"patience_s": float("nan")}, "policy.options.patience_s", "patience_s: nan"),
        ({"change_margin": float("inf")}, "policy.options.change_margin", "change_margin: inf"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_its_name(
    options: dict[str, Any], field: str, said: str
) -> None:
    with pytest.raises(SettingsError, match=said) as refused:
        make("ones", options)
    assert refused.value.field == field
