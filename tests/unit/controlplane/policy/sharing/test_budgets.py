"""Budgets of accounts: whole slots, guarantees first, then by weight and past usage."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from controlplane.policy.sharing.budgets import (
    Claim,
    account_budgets,
    level_fair_shares,
    split_slots,
)
from controlplane.policy.sharing.caps import deal_caps
from schemas.ids import JobId
from schemas.sharing import Project, Sharing, UserShare
from tests.support.builders import job_view
from tests.support.sizes import examples

SIZE = settings(max_examples=examples(200), deadline=None)
HALF_LIFE_S = 1000.0


def wants(*demands: int, **given: float) -> dict[str, Claim]:
    """One account of its own project for each demand: a/a, b/b, ..."""
    return {
        f"{user}/{user}": Claim(demand=demand, order=place, usage=given.get(user, 0.0))
        for place, (user, demand) in enumerate(zip("abcdefgh", demands, strict=False))
    }


def budgets(claims: Mapping[str, Claim], capacity: int = 8, **rules: object) -> list[int]:
    sharing = Sharing(half_life_s=HALF_LIFE_S, **rules)  # type: ignore[arg-type] # named by callers
    return list(account_budgets(claims, sharing, capacity).values())


@pytest.mark.parametrize(
    ("demands", "capacity", "then"),
    [
        ((10, 1), 8, [7, 1]),
        ((10, 4), 8, [4, 4]),
        ((10, 10), 8, [4, 4]),
        ((3, 2), 8, [3, 2]),
        ((9, 9, 9), 8, [3, 3, 2]),
        ((9, 1, 9), 8, [4, 1, 3]),
        ((2, 2, 2, 2), 2, [1, 1, 0, 0]),
        ((5,), 0, [0]),
    ],
)
def test_equal_accounts_share_equally_up_to_their_demand(
    demands: tuple[int, ...], capacity: int, then: list[int]
) -> None:
    assert budgets(wants(*demands), capacity) == then


def test_weights_of_projects_share_the_cluster_and_those_of_users_their_project() -> None:
    claims = {name: Claim(demand=12) for name in ("vision/ann", "vision/bob", "nlp/cid")}
    vision = Project(weight=2.0, users={"ann": UserShare(weight=3.0)})

    assert budgets(claims, 12, projects={"vision": vision}) == [6, 2, 4]


def test_a_guarantee_comes_before_shares_by_weight() -> None:
    assert budgets(wants(20, 20), 8, projects={"a": Project(guaranteed=6)}) == [7, 1]


def test_guarantees_above_the_capacity_are_scaled_down() -> None:
    rules = {"a": Project(guaranteed=12), "b": Project(guaranteed=4)}

    assert budgets(wants(20, 20, 20), 8, projects=rules) == [6, 2, 0]


def test_limits_bound_projects_and_users() -> None:
    claims = {name: Claim(demand=9) for name in ("vision/ann", "vision/bob", "nlp/cid")}
    rules = {"vision": Project(limit=3, users={"ann": UserShare(limit=1)}), "nlp": Project(limit=2)}

    assert budgets(claims, 12, projects=rules) == [1, 2, 2]


def test_slots_that_cannot_be_given_up_count_first() -> None:
    claims = wants(1, 1, 1)
    claims["c/c"] = replace(claims["c/c"], floor=1)

    assert budgets(claims, 2) == [1, 0, 1]


def test_the_odd_slot_goes_to_the_account_that_used_less() -> None:
    assert budgets(wants(9, 9, a=5.0), 3) == [1, 2]


def test_past_usage_moves_slots_only_within_bounds() -> None:
    much = 1e9

    assert budgets(wants(40, 40, a=much), 34) == [4, 30]  # factors 1/2 and 4
    assert level_fair_shares(list(wants(9, 9).values()), 8, HALF_LIFE_S) == [1.0, 1.0]


def test_a_minute_in_a_new_cluster_hardly_moves_the_weights() -> None:
    claims = list(wants(9, 9, a=8 * 60.0).values())

    first, second = level_fair_shares(claims, 8, 7 * 86_400.0)

    assert first == pytest.approx(1.0, abs=0.01)
    assert second == pytest.approx(1.0, abs=0.01)


def test_without_fair_share_only_limits_and_guarantees_of_others_bound() -> None:
    rules = {"b": Project(guaranteed=3), "c": Project(limit=2)}

    assert budgets(wants(9, 9, 9), 8, fair_share=False, projects=rules) == [5, 8, 2]


# --- properties

claims_of_one = st.builds(
    Claim,
    demand=st.integers(0, 12),
    floor=st.integers(0, 2),
    guaranteed=st.integers(0, 6),
    weight=st.sampled_from([0.5, 1.0, 1.0, 2.0, 7.0]),
    usage=st.sampled_from([0.0, 10.0, 5000.0]),
)
some_claims = st.lists(claims_of_one, min_size=1, max_size=6).map(
    lambda claims: [replace(claim, order=place) for place, claim in enumerate(claims)]
)


@SIZE
@given(some_claims, st.integers(0, 30))
def test_the_sum_is_the_smaller_of_capacity_and_demand(claims: list[Claim], room: int) -> None:
    slots = split_slots(room, claims)

    assert sum(slots) == min(room, sum(claim.demand for claim in claims))
    assert all(0 <= many <= claim.demand for many, claim in zip(slots, claims, strict=True))


@SIZE
@given(some_claims, st.integers(0, 30), st.sampled_from(["demand", "weight", "guaranteed"]))
def test_more_demand_weight_or_guarantee_never_costs_a_slot(
    claims: list[Claim], room: int, field: str
) -> None:
    raised = [replace(claims[0], **{field: getattr(claims[0], field) + 1}), *claims[1:]]

    assert split_slots(room, raised)[0] >= split_slots(room, claims)[0]


@SIZE
@given(some_claims, st.integers(0, 30))
def test_one_more_slot_never_costs_an_account_one(claims: list[Claim], room: int) -> None:
    claims = [replace(claim, floor=0) for claim in claims]
    now, then = split_slots(room, claims), split_slots(room + 1, claims)

    assert all(more >= less for more, less in zip(then, now, strict=True))


@SIZE
@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0.0, 1e6)), min_size=1, max_size=6))
def test_renamed_users_and_doubled_weights_change_no_budget(told: list[tuple[int, float]]) -> None:
    def named(prefix: str) -> dict[str, Claim]:
        return {
            f"p/{prefix}{place}": Claim(demand=demand, usage=usage, order=place)
            for place, (demand, usage) in enumerate(told)
        }

    heavy = {"p": Project(users={f"u{place}": UserShare(weight=2.0) for place in range(len(told))})}

    assert budgets(named("u")) == budgets(named("z")) == budgets(named("u"), projects=heavy)


def one_by_one(room: int, demands: list[int], weights: list[float]) -> list[int]:
    """Sainte-Lague as it is defined: always to the smallest (slots + 1/2) / weight."""
    got = [0] * len(demands)
    for _ in range(min(room, sum(demands))):
        some = [i for i, demand in enumerate(demands) if got[i] < demand]
        got[min(some, key=lambda i: ((got[i] + 0.5) / weights[i], i))] += 1
    return got


@SIZE
@given(
    st.integers(0, 300),
    st.lists(
        st.tuples(st.integers(0, 200), st.sampled_from([1.0, 2.0]) | st.floats(0.05, 20.0)),
        max_size=8,
    ),
)
def test_slots_are_split_as_if_they_were_dealt_one_by_one(
    room: int, wanting: list[tuple[int, float]]
) -> None:
    demands, weights = [demand for demand, _ in wanting], [weight for _, weight in wanting]
    claims = [
        Claim(demand=demand, weight=weight, order=place)
        for place, (demand, weight) in enumerate(wanting)
    ]

    assert split_slots(room, claims) == one_by_one(room, demands, weights)


@SIZE
@given(
    st.integers(0, 60),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 20)), max_size=8),
)
def test_caps_grow_as_if_slots_were_dealt_one_by_one_to_the_smallest_job(
    budget: int, sizes: list[tuple[int, int]]
) -> None:
    jobs = [job_view(JobId(f"j-{at}"), slots=(least, 20)) for at, (least, _) in enumerate(sizes)]
    useful = {job.job: most for job, (_, most) in zip(jobs, sizes, strict=True)}
    caps, room = dict[JobId, int](), budget
    for job in jobs:
        size = min(job.least, useful[job.job])
        caps[job.job] = size if size <= room else 0
        room -= caps[job.job]
    while room and (growing := [name for name in caps if 0 < caps[name] < useful[name]]):
        caps[min(growing, key=caps.__getitem__)] += 1
        room -= 1

    assert deal_caps(jobs, budget, useful, gangs=False) == caps
