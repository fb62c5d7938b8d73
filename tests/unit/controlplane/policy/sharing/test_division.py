"""Division: a policy sees a view in which no account can exceed its budget."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from controlplane.policy.api import (
    Budget,
    ClusterView,
    JobView,
    Plan,
    Policy,
    PolicyEvent,
    Reason,
    StartForecast,
)
from controlplane.policy.min_slots import fallback_plan
from controlplane.policy.placement.slot_partition import split
from controlplane.policy.registry import POLICIES, entry, make
from controlplane.policy.sharing.caps import Ledger, useful_slots
from controlplane.policy.sharing.division import NEVER, Divided, Division
from schemas.ids import JobId, Seconds
from schemas.sharing import Project, Sharing, UserShare
from tests.support.builders import job_view
from tests.support.sizes import examples
from tests.support.views import NOW, ToldOracle, divide, events_of, row_of, view_of, views

TURN_S = 1800.0
SHARING = Sharing()
SIZE = settings(max_examples=examples(30), deadline=None)
ROW = row_of(4, 4)
SLOTS = [slot.slot for slot in ROW]


def a_job(name: str, user: str, on: slice = slice(0, 0), **changes: Any) -> JobView:
    """A job of 1 to 8 slots, or of these; it runs on a slice of the eight slots."""
    held = SLOTS[on]
    usual = {"batch_size": 64, "batch_limit": 512, "local_limit": 64, "slots": (1, 8)}
    placed = split(64 * len(held), held) if held else {}
    account = user if "/" in user else f"{user}/{user}"
    given = {**usual, "moved_at": NOW, **changes}
    return job_view(JobId(name), account=account, running_on=placed, **given)


def divided(
    *jobs: JobView, now: float = NOW, gangs: bool = False, rules: Sharing = SHARING, **known: Any
) -> Divided:
    division = Division(gangs=gangs)
    return divide(division, view_of(ROW, *jobs), rules, Ledger(**known), Seconds(now))


def most_of(found: Divided) -> dict[str, int]:
    """The most slots that a policy can give to each job of the shown view."""
    return {name: 0 if job.ready_at == NEVER else job.most for name, job in found.view.jobs.items()}


# --- who is bounded


def test_a_view_with_one_account_is_returned_as_it_is() -> None:
    view = view_of(ROW, *(a_job(f"a-{n}", "ann", priority=7.0) for n in range(1, 20)))

    found = divide(Division(), view, SHARING, Ledger(usage={"bob/bob": 9.0}), NOW)

    assert found.view is view
    plan = make("fair").plan(view, NOW)
    assert Division().merge(found, plan) is plan


def test_accounts_that_together_fit_are_not_bounded() -> None:
    jobs = (a_job("a-1", "ann", slots=(1, 4)), a_job("b-2", "bob", slots=(1, 4)))
    view = view_of(ROW, *jobs)

    assert divide(Division(), view, SHARING, Ledger(), NOW).view is view


def test_only_the_account_that_wants_more_than_its_budget_is_bounded() -> None:
    jobs = [a_job(f"a-{n}", "ann", slots=(1, 1)) for n in range(1, 11)]
    found = divided(*jobs, waits := a_job("b-11", "bob", slots=(1, 1)))

    assert found.budgets == {"ann/ann": 7}
    assert list(most_of(found).values()) == [1] * 7 + [0] * 3 + [1]
    assert found.view.jobs[waits.job] is waits


def test_the_budget_goes_to_minimum_slots_first_and_then_to_the_smallest_jobs() -> None:
    found = divided(
        a_job("a-1", "ann", slots=(3, 8)), a_job("a-2", "ann"), a_job("b-3", "bob", slots=(1, 2))
    )

    assert most_of(found) == {"a-1": 3, "a-2": 3, "b-3": 2}


def test_jobs_of_fixed_sizes_have_all_their_slots_or_wait() -> None:
    jobs = [a_job(f"a-{n}", "ann", wanted=3) for n in range(1, 4)]
    found = divided(*jobs, a_job("b-4", "bob", wanted=4), gangs=True)

    assert {name: job.wanted for name, job in found.view.jobs.items() if most_of(found)[name]} == {
        "a-1": 3,
        "b-4": 4,
    }
    assert found.budgets["ann/ann"] < 9


def test_slots_that_no_job_of_an_account_can_use_go_to_others() -> None:
    found = divided(a_job("a-1", "ann", slots=(6, 8)), a_job("b-2", "bob"))

    assert most_of(found) == {"a-1": 0, "b-2": 8}


def test_of_jobs_that_need_all_slots_the_one_of_the_user_who_used_less_gets_them() -> None:
    jobs = [a_job(f"{user[0]}-1", user, slots=(8, 8)) for user in ("ann", "bob", "cid")]
    usage = {"ann/ann": 9.0, "bob/bob": 3.0, "cid/cid": 5.0}

    assert most_of(divided(*jobs, usage=usage)) == {"a-1": 0, "b-1": 8, "c-1": 0}


def test_slots_of_jobs_under_an_override_count_in_their_account() -> None:
    found = divided(a_job("a-1", "ann"), a_job("b-2", "bob", slice(0, 4)), outside={"ann/ann": 2})

    assert found.budgets == {"ann/ann": 4, "bob/bob": 4}
    assert most_of(found) == {"a-1": 2, "b-2": 4}


def test_a_limit_bounds_even_a_lone_account() -> None:
    rules = Sharing(projects={"ann": Project(users={"ann": UserShare(limit=2)})})

    assert most_of(divided(a_job("a-1", "ann"), rules=rules)) == {"a-1": 2}


def test_a_lone_account_that_wants_more_than_the_cluster_is_not_bounded() -> None:
    rules = Sharing(projects={"bob": Project(limit=2)})

    assert divided(a_job("a-1", "ann"), a_job("a-2", "ann"), rules=rules).budgets == {}


def test_a_job_that_is_too_large_for_the_cluster_is_left_to_the_policy() -> None:
    large = a_job("a-1", "ann", slots=(9, 9))
    found = divided(large, a_job("a-2", "ann"), a_job("b-3", "bob"))

    assert found.view.jobs[large.job] is large
    assert found.reasons == {}


def test_a_priority_counts_only_within_its_account() -> None:
    found = divided(
        a_job("a-1", "ann", priority=100.0),
        a_job("b-2", "bob", priority=3.0),
        a_job("b-3", "bob", priority=1.0),
    )

    shown = [found.view.jobs[JobId(name)].priority for name in ("a-1", "b-2", "b-3")]
    assert shown == [1.0, 1.5, 0.5]


# --- giving slots back


def test_a_job_above_its_cap_is_shown_with_the_slots_that_it_keeps() -> None:
    found = divided(a_job("a-1", "ann", slice(2, 8)), a_job("b-2", "bob"))

    shown = found.view.jobs[JobId("a-1")]
    assert list(shown.running_on) == SLOTS[4:]  # on the node where it has most
    assert (shown.most, shown.movable) == (4, False)
    leaving = [slot.slot for slot in found.view.slots if slot.leaving]
    assert leaving == SLOTS[2:4]


def test_the_last_running_job_of_an_account_has_its_turn_first() -> None:
    first = a_job("a-1", "ann", slice(0, 8), slots=(8, 8))
    other = a_job("b-2", "bob", slots=(8, 8))
    usage = {"ann/ann": 1e7}

    def shown(began_s_ago: float) -> Divided:
        began = {first.job: Seconds(NOW - began_s_ago)}
        return divided(first, other, began_at=began, usage=usage)

    assert most_of(shown(TURN_S - 1.0)) == {"a-1": 8, "b-2": 0}
    assert shown(TURN_S - 1.0).wake_at == NOW + 1.0
    assert most_of(shown(TURN_S)) == {"a-1": 0, "b-2": 8}


def test_a_job_that_needs_more_than_its_budget_gets_a_turn_after_a_turn() -> None:
    large = a_job("a-1", "ann", slots=(8, 8), moved_at=NOW - TURN_S)
    small = a_job("b-2", "bob", slice(0, 4), slots=(4, 4))

    def who(began_s_ago: float, **changes: Any) -> dict[str, int]:
        began = {small.job: Seconds(NOW - began_s_ago)}
        return most_of(divided(msgspec.structs.replace(large, **changes), small, began_at=began))

    assert who(TURN_S) == {"a-1": 8, "b-2": 0}
    assert who(TURN_S - 1.0) == {"a-1": 0, "b-2": 4}
    assert who(TURN_S, moved_at=NOW - 1.0) == {"a-1": 0, "b-2": 4}


def test_a_paused_job_gets_a_turn_after_a_turn() -> None:
    runs = a_job("a-1", "ann", slice(0, 4), slots=(4, 4))
    paused = a_job("a-2", "ann", slots=(4, 4), last_batch=64, moved_at=NOW - TURN_S)
    other = a_job("b-3", "bob", slice(4, 8))

    def who(began_s_ago: float, **changes: Any) -> dict[str, int]:
        began = {runs.job: Seconds(NOW - began_s_ago)}
        job = msgspec.structs.replace(paused, **changes)
        return most_of(divided(runs, job, other, began_at=began))

    assert who(TURN_S) == {"a-1": 0, "a-2": 4, "b-3": 4}
    assert who(TURN_S - 1.0) == {"a-1": 4, "a-2": 0, "b-3": 4}
    assert who(TURN_S, moved_at=NOW - 1.0) == {"a-1": 4, "a-2": 0, "b-3": 4}
    assert who(TURN_S, last_batch=0) == {"a-1": 4, "a-2": 0, "b-3": 4}


@pytest.mark.parametrize("why", [{"movable": False}, {"retry_at": Seconds(NOW + 5.0)}])
def test_a_job_that_cannot_be_changed_now_is_shown_as_it_is(why: dict[str, Any]) -> None:
    job = a_job("a-1", "ann", slice(0, 8), **why)
    found = divided(job, a_job("b-2", "bob"))

    assert found.view.jobs[job.job] is job
    assert found.wake_at == why.get("retry_at", NOW + TURN_S)


def test_the_usage_counts_anew_once_a_turn() -> None:
    division, jobs = Division(), (a_job("a-1", "ann"), a_job("b-2", "bob"), a_job("c-3", "cid"))
    view = view_of(ROW, *jobs)

    def at(now: float, least_used: str) -> list[int]:
        usage = {f"{user}/{user}": 5.0 * (user != least_used) for user in ("ann", "bob", "cid")}
        found = divide(division, view, SHARING, Ledger(usage=usage), Seconds(now))
        return list(found.budgets.values())

    assert at(0.0, "ann")[0] == 3
    assert at(TURN_S - 1.0, "cid") == at(0.0, "ann")
    assert at(TURN_S, "cid")[2] == 3


# --- reasons and plans


def test_reasons_name_who_has_what_and_who_wants_or_takes_it() -> None:
    jobs = [
        a_job("a-1", "vision/ann", slice(0, 6)),
        a_job("a-2", "vision/ann", slots=(4, 4)),
        a_job("b-3", "bob"),
    ]
    found = divided(*jobs)

    assert found.reasons == {
        "a-1": Reason(
            "gave_back",
            "gives back 2 slots to user bob: user ann of project vision has 6 slots and may have 4",
            {"account_slots": 6, "account_budget": 4, "slots_now": 6, "slots_then": 4},
        ),
        "a-2": Reason(
            "budget",
            "waits: user ann of project vision has 6 of its 4 slots; user bob wants the rest",
            {"account_slots": 6, "account_budget": 4, "slots_now": 0, "slots_then": 0},
        ),
    }


def test_a_plan_gets_the_reasons_and_loses_jobs_that_must_wait() -> None:
    jobs = [
        a_job("a-1", "ann", slots=(4, 4)),
        a_job("a-2", "ann", slots=(4, 4)),
        a_job("b-3", "bob"),
    ]
    found = divided(*jobs)
    late = {JobId("a-2"): split(64, SLOTS[:4]), JobId("b-3"): split(64, SLOTS[4:])}
    soon = StartForecast(at=NOW, earliest=NOW, latest=NOW)
    plan = Plan(based_on=0, local_batch=late, wake_at=NEVER, starts={JobId("a-2"): soon})

    merged = Division().merge(found, plan)

    assert merged.local_batch == {"b-3": late[JobId("b-3")]}
    assert merged.reasons.keys() == {"a-2"}
    assert merged.starts == {}
    assert merged.wake_at == NOW + TURN_S


# --- properties


@st.composite
def shared_views(draw: st.DrawFn) -> ClusterView:
    """Any cluster, its jobs in up to three accounts of two projects."""
    view = draw(views(most_jobs=8))
    accounts = st.sampled_from(["p/ann", "p/bob", "q/cid"])
    jobs = {name: msgspec.structs.replace(job, account=draw(accounts), priority=draw(
        st.sampled_from([1.0, 1.0, 5.0]))) for name, job in view.jobs.items()}  # fmt: skip
    return msgspec.structs.replace(view, jobs=jobs)


def plan_of(name: str, view: ClusterView, events: list[PolicyEvent]) -> Plan:
    if name == "fill":
        return fallback_plan(view, NOW)
    policy: Policy = make(name, None, ToldOracle() if entry(name).oracle == "must" else None)
    for event in events:
        policy.observe(event, NOW)
    policy.improve(view, Budget(generations=2), default_rng(0), NOW)
    return policy.plan(view, NOW)


def is_fixed(job: JobView) -> bool:
    """A plan cannot change the job now."""
    return not job.movable or (bool(job.running_on) and job.retry_at > NOW)


def assert_budgets_are_kept(found: Divided, view: ClusterView, plan: Plan) -> None:
    """Jobs that a plan cannot change may hold more than their part, and nothing else may."""
    for account, budget in found.budgets.items():
        jobs = [job for job in view.jobs.values() if job.account == account]
        fixed = [job for job in jobs if is_fixed(job)]
        held = sum(len(job.running_on) for job in fixed)
        then = sum(len(plan.local_batch.get(job.job, {})) for job in jobs)
        assert then <= budget + held


@pytest.mark.parametrize("name", [*POLICIES, "fill"])
@SIZE
@given(shared_views().flatmap(lambda view: st.tuples(st.just(view), events_of(view))))
def test_no_plan_of_any_policy_exceeds_a_budget(
    name: str, told: tuple[ClusterView, list[PolicyEvent]]
) -> None:
    view, events = told
    division = Division(gangs=name in POLICIES and entry(name).gangs)
    found = divide(division, view, SHARING, Ledger(), NOW)

    plan = division.merge(found, plan_of(name, found.view, events))

    assert_budgets_are_kept(found, view, plan)
    assert not found.waiting & {job for job, on in plan.local_batch.items() if on}


@SIZE
@given(shared_views(), st.booleans())
def test_the_caps_of_an_account_add_up_to_its_budget_at_most(
    view: ClusterView,
    gangs: bool,  # noqa: FBT001 - hypothesis draws it
) -> None:
    found = divide(Division(gangs=gangs), view, SHARING, Ledger(), NOW)

    for account, budget in found.budgets.items():
        jobs = [job for job in found.view.jobs.values() if job.account == account]
        free = [job for job in jobs if job.ready_at != NEVER and not is_fixed(view.jobs[job.job])]
        assert sum(useful_slots(job, len(view.slots), gangs=gangs) for job in free) <= budget


@SIZE
@given(shared_views())
def test_the_same_question_has_the_same_answer(view: ClusterView) -> None:
    division = Division()
    first = divide(division, view, SHARING, Ledger(), NOW)
    again = divide(division, view, SHARING, Ledger(), NOW)

    assert again == first == divide(Division(), view, SHARING, Ledger(), NOW)
    for name, job in first.view.jobs.items():
        assert again.view.jobs[name] is job
    assert all(a is b for a, b in zip(first.view.slots, again.view.slots, strict=True))


@SIZE
@given(st.lists(st.tuples(shared_views(), st.sampled_from([0.0, 1.0, TURN_S])), max_size=6))
def test_what_is_kept_from_earlier_views_changes_no_answer(
    steps: list[tuple[ClusterView, float]],
) -> None:
    division, now = Division(), NOW
    for view, passed_s in steps:
        now = Seconds(now + passed_s)
        began = {name: job.moved_at for name, job in view.jobs.items() if job.running_on}
        ledger = Ledger(began_at=began, usage={"p/ann": 100.0})
        found = divide(division, view, SHARING, ledger, now)
        fresh = divide(Division(), view, SHARING, ledger, now)

        wake_at = found.wake_at  # it depends on the begin of a turn
        assert found == msgspec.structs.replace(fresh, wake_at=wake_at)


@SIZE
@given(shared_views())
def test_a_shown_view_is_within_the_budgets_already(view: ClusterView) -> None:
    shown = divide(Division(), view, SHARING, Ledger(), NOW).view
    again = divide(Division(), shown, SHARING, Ledger(), NOW).view

    sizes = {name: len(job.running_on) for name, job in shown.jobs.items()}
    assert {name: len(job.running_on) for name, job in again.jobs.items()} == sizes


@SIZE
@given(shared_views())
def test_renamed_users_get_the_same(view: ClusterView) -> None:
    names = {"p/ann": "x/zoe", "p/bob": "x/ann", "q/cid": "a/bob"}
    renamed = msgspec.structs.replace(view, jobs={
        name: msgspec.structs.replace(job, account=names[job.account])
        for name, job in view.jobs.items()})  # fmt: skip

    one, other = (divide(Division(), each, SHARING, Ledger(), NOW) for each in (view, renamed))

    assert {names[account]: many for account, many in one.budgets.items()} == other.budgets
    assert most_of(one) == most_of(other)
