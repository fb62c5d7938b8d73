"""Limits of users and classes on elastic jobs: a policy sees a view in which they hold."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from controlplane.policy.api import Reason
from controlplane.policy.registry import make
from controlplane.policy.sharing.caps import Ledger, turn_order
from controlplane.policy.sharing.division import Division
from schemas.ids import JobId, Seconds
from schemas.sharing import PriorityClass, Project, Sharing, UserLimits
from tests.support.sizes import examples
from tests.support.views import NOW, divide, view_of
from tests.unit.controlplane.policy.sharing.test_division import ROW, a_job, divided, most_of

TWO = Sharing(user_limits=UserLimits(running=2))


def test_a_job_beyond_the_running_jobs_of_its_user_waits_and_says_so() -> None:
    jobs = (a_job("a-1", "ann", slice(0, 2)), a_job("a-2", "ann", slice(2, 4)), a_job("a-3", "ann"))

    found = divided(*jobs, rules=TWO)

    assert most_of(found) == {"a-1": 8, "a-2": 8, "a-3": 0}
    text = "user ann runs 2 jobs, as many as one user may"
    assert found.reasons == {JobId("a-3"): Reason("user_limit", text, {"limit": 2.0, "has": 2.0})}
    assert found.waiting == {"a-3"}


def test_programs_count_towards_the_limits_of_elastic_jobs() -> None:
    holders = {JobId("g-7"): ("q/ann", 2), JobId("h-8"): ("q/ann", 1)}

    found = divided(a_job("a-1", "ann"), a_job("b-2", "bob"), rules=TWO, holders=holders)

    assert found.waiting == {"a-1"}


def test_a_job_that_is_alone_is_bounded_by_the_slots_of_its_user() -> None:
    rules = Sharing(user_limits=UserLimits(slots=3))

    assert most_of(divided(a_job("a-1", "ann"), rules=rules)) == {"a-1": 3}
    own = replace(rules, users={"ann": UserLimits(slots=5)})
    assert most_of(divided(a_job("a-1", "ann"), rules=own)) == {"a-1": 5}


def test_a_smaller_limit_takes_slots_back() -> None:
    rules = Sharing(user_limits=UserLimits(slots=3))

    found = divided(a_job("a-1", "ann", slice(0, 8)), rules=rules)

    assert len(found.view.jobs[JobId("a-1")].running_on) == 3
    text = "gives back 5 slots: its user or class has as many as it may"
    numbers = {"slots_now": 8.0, "slots_then": 3.0}
    assert found.reasons == {JobId("a-1"): Reason("gave_back", text, numbers)}


def test_a_limit_of_jobs_pauses_the_job_that_started_last() -> None:
    rules = Sharing(user_limits=UserLimits(running=1))
    began = {JobId("a-1"): Seconds(NOW - 60.0), JobId("a-2"): Seconds(NOW - 50.0)}
    jobs = (a_job("a-1", "ann", slice(0, 4)), a_job("a-2", "ann", slice(4, 8)))

    found = divided(*jobs, rules=rules, began_at=began)

    text = "paused: gives back 4 slots: user ann runs 1 job, as many as one user may"
    assert found.reasons[JobId("a-2")].text == text


def test_the_limit_of_a_class_bounds_its_elastic_jobs() -> None:
    rules = Sharing(classes={"urgent": PriorityClass(rank=10, limit=3)})
    classes = {JobId("a-1"): "urgent", JobId("b-2"): "urgent"}
    jobs = (a_job("a-1", "ann"), a_job("b-2", "bob"), a_job("c-3", "cat"))

    found = most_of(divided(*jobs, rules=rules, classes=classes))

    assert found["a-1"] + found["b-2"] == 3
    assert found["c-3"] > 3


def test_in_an_account_a_class_goes_first_and_is_paused_last() -> None:
    began = {JobId("a-1"): NOW, JobId("a-2"): Seconds(NOW - 10.0)}
    jobs = [a_job("a-1", "ann", slice(0, 4)), a_job("a-2", "ann", slice(4, 8)), a_job("a-3", "ann")]
    ledger = Ledger(began_at=began, ranks={JobId("a-3"): 1, JobId("a-2"): -1})

    order = turn_order(jobs, ledger, NOW, 1800.0)

    assert [job.job for job in order] == ["a-3", "a-1", "a-2"]


@st.composite
def crowds(draw: st.DrawFn) -> tuple[Sharing, list[tuple[str, str, int, int]]]:
    """Rules with limits, and jobs: account, class, minimum and slots that it has now."""
    number = st.none() | st.integers(0, 5)
    rules = Sharing(
        user_limits=UserLimits(running=draw(number), slots=draw(number)),
        users=draw(st.dictionaries(st.just("ann"), st.builds(UserLimits, slots=number))),
        classes={"urgent": PriorityClass(rank=3, limit=draw(number))},
        projects=draw(st.dictionaries(st.just("p"), st.builds(Project, limit=number))),
        fair_share=draw(st.booleans()),
    )
    account = st.sampled_from(["p/ann", "q/ann", "p/bob", "bob/bob"])
    kind, least, has = st.sampled_from(["", "urgent"]), st.integers(1, 3), st.integers(0, 3)
    return rules, draw(st.lists(st.tuples(account, kind, least, has), max_size=6))


@given(crowds(), st.sampled_from(["fair", "fifo", "tiresias"]))
@settings(max_examples=examples(60), deadline=None)
def test_no_plan_of_a_policy_exceeds_the_limits_of_users_and_classes(
    crowd: tuple[Sharing, list[tuple[str, str, int, int]]], policy: str
) -> None:
    rules, drawn = crowd
    jobs, classes, free = [], {}, 0
    for place, (account, kind, least, has) in enumerate(drawn):
        on = slice(free, free + (has if has >= least else 0))
        free = min(8, on.stop)
        jobs.append(a_job(f"j-{place}", account, on, slots=(least, 8)))
        classes |= {JobId(f"j-{place}"): kind} if kind else {}
    gangs = policy == "tiresias"
    division, view = Division(gangs=gangs), view_of(ROW, *jobs)
    found = divide(division, view, rules, Ledger(classes=classes), NOW)

    plan = division.merge(found, make(policy).plan(found.view, NOW))

    running, slots = Counter[str](), Counter[str]()
    for name, on in plan.local_batch.items():
        user = view.jobs[name].account.partition("/")[2]
        running[user] += bool(on)
        slots[user] += len(on)
        slots[classes.get(name, "")] += len(on)
    for user in ("ann", "bob"):
        limits = rules.limits_of(user)
        assert limits.running is None or running[user] <= limits.running
        assert limits.slots is None or slots[user] <= limits.slots
    limit = rules.classes["urgent"].limit
    assert limit is None or slots["urgent"] <= limit
