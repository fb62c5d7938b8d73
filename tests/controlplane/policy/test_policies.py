"""What every policy keeps to, whatever it is shown and told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from controlplane.policy.api import ClusterView, JobView, News, Plan
from controlplane.policy.fifo import Fifo
from controlplane.policy.fill import fill
from controlplane.policy.ones.options import OnesOptions
from controlplane.policy.ones.policy import Ones
from controlplane.policy.registry import POLICIES, check_options, entry, make
from schemas.errors import SettingsError
from schemas.ids import SlotId
from tests.support.views import NOW, planned, views, views_and_news

Told = tuple[ClusterView, list[News]]
EACH_POLICY = pytest.mark.parametrize("name", POLICIES)
SIZE = settings(max_examples=30, deadline=None)


def answer(name: str, told: Told) -> Plan:
    """The plan of a policy; or of what stands in while a search is away."""
    view, news = told
    return fill(view, NOW) if name == "fill" else planned(name, view, news)


def changed(plan: Plan, view: ClusterView) -> list[tuple[JobView, dict[SlotId, int]]]:
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
    assert set(plan.reasons) == concerned - unchanged
    assert all(reason.code and reason.text for reason in plan.reasons.values())


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
    a_plan_says_which_view_it_is_based_on,
)


@pytest.mark.parametrize("name", [*POLICIES, "fill"])
@settings(max_examples=60, deadline=None)
@given(told=views_and_news)
def test_a_policy_keeps_its_promises_whatever_it_is_shown_and_told(name: str, told: Told) -> None:
    view, _ = told

    plan = answer(name, told)

    for promise in PROMISES:
        promise(view, plan)


@EACH_POLICY
@SIZE
@given(told=views_and_news)
def test_the_same_view_news_seed_and_budget_give_the_same_bytes(name: str, told: Told) -> None:
    assert msgspec.msgpack.encode(answer(name, told)) == msgspec.msgpack.encode(answer(name, told))


@EACH_POLICY
@SIZE
@given(view=views())
def test_to_read_a_plan_out_changes_nothing(name: str, view: ClusterView) -> None:
    policy = make(name)

    plans = [policy.plan(view, NOW), policy.plan(view, NOW), make(name).plan(view, NOW)]

    assert len({msgspec.msgpack.encode(plan) for plan in plans}) == 1


@EACH_POLICY
@SIZE
@given(view=views())
def test_a_policy_asks_to_be_woken_for_the_first_that_backs_off(
    name: str, view: ClusterView
) -> None:
    plan = planned(name, view)

    for job in view.jobs.values():
        fits = job.movable and not job.running_on and job.least <= len(view.slots)
        if fits and job.ready_at > NOW:
            assert plan.wake_at is not None
            assert NOW < plan.wake_at <= job.ready_at


# --- the registry


@pytest.mark.parametrize(("name", "type_"), [("fifo", Fifo), ("ones", Ones)])
def test_a_policy_is_made_by_name(name: str, type_: type) -> None:
    assert type(make(name)) is type_


def test_a_policy_is_made_with_its_options_and_defaults_for_the_rest() -> None:
    made = make("ones", {"population": 4, "scale_down": "off"})

    assert isinstance(made, Ones)
    assert made.options == OnesOptions(population=4, scale_down="off")


def test_only_a_policy_that_searches_is_given_a_process() -> None:
    assert {name: entry(name).searches for name in POLICIES} == {"fifo": False, "ones": True}


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        SettingsError, match=r"unknown policy 'lifo'; choose one of fifo, ones"
    ) as e:
        make("lifo")
    assert e.value.field == "policy"


def test_an_option_of_a_policy_without_any_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"fifo has no options; leave out speed") as refused:
        check_options("fifo", {"speed": 1})
    assert refused.value.field == "policy.options"


@pytest.mark.parametrize(
    ("options", "field", "said"),
    [
        ({"speed": 1}, "policy.options", r"unknown field `speed`; known: seed, population"),
        ({"population": "many"}, "policy.options", r"\$\.population"),
        ({"scale_down": "up"}, "policy.options", r"\$\.scale_down"),
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
