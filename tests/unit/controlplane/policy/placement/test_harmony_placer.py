"""Costs of neighbours, learnt from speeds with known costs; search for layouts."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from controlplane.policy.placement.harmony_placer import (
    LayoutSearch,
    NeighbourCosts,
    Occupancy,
    OwnWorkers,
    all_shares,
    crowds_of,
    gain_of,
)
from schemas.ids import JobId, NodeId
from schemas.wire.client import NodeCrowd
from tests.support.sizes import examples

COST = {("a", "b"): 0.5, ("a", "c"): 0.1, ("b", "a"): 0.0, ("b", "c"): 0.3}
SOLO_S = {1: 0.1, 2: 0.12}
BATCH = 32
NODES = [NodeId(f"n{number}") for number in range(3)]
PRIOR = math.log(1 / 0.7)


def new() -> NeighbourCosts:
    return NeighbourCosts(prior=0.3, ridge=0.5, spread=0.1)


def tell(
    costs: NeighbourCosts, family: str, *nodes: NodeCrowd, times: int = 20, off: float = 1.0
) -> None:
    """Report speeds of a job beside these by `COST`, times `off`."""
    slots = sum(own for own, _ in nodes)
    worst = max(sum(COST[family, other] for other in others) for _, others in nodes)
    speed = BATCH * slots / (SOLO_S[slots] * math.exp(worst))
    for _ in range(times):
        costs.add(family, (slots, BATCH, "", tuple(sorted(nodes))), BATCH * slots, off * speed)


# --- what neighbours cost


def test_costs_of_neighbours_are_learnt_and_the_worst_node_counts() -> None:
    costs, spread = new(), new()
    for crowd in ((), ("b",), ("c",), ("b", "c")):
        tell(costs, "a", (1, crowd))
    for nodes in (((1, ()), (1, ())), ((1, ("b",)), (1, ("c",))), ((1, ()), (1, ("c",)))):
        tell(spread, "a", *nodes)

    for found, tolerance in ((costs, 0.02), (spread, 0.06)):
        assert found.cost("a", "b") == pytest.approx(0.5, abs=tolerance)
        assert found.cost("a", "c") == pytest.approx(0.1, abs=tolerance)
    assert costs.step_s("a", 1, BATCH) == pytest.approx(0.1, rel=0.02)


def test_an_unmeasured_pair_uses_the_mean_of_the_others() -> None:
    costs = new()
    assert costs.cost("a", "b") == pytest.approx(PRIOR)

    tell(costs, "a", (1, ()))
    tell(costs, "a", (1, ("c",)))

    assert costs.cost("b", "d") == pytest.approx(PRIOR)  # without any measurement
    assert costs.cost("b", "c") == pytest.approx((PRIOR + (PRIOR + 0.1) / 2) / 2, abs=0.02)
    assert costs.cost("a", "d") == pytest.approx((PRIOR + (PRIOR + 0.1) / 2) / 2, abs=0.02)


def test_costs_of_own_workers_are_learnt() -> None:
    costs = new()
    for _ in range(20):
        costs.add("a", (2, BATCH, "", ((2, ()),)), 2 * BATCH, 100.0)
        costs.add("a", (2, BATCH, "", ((1, ()), (1, ()))), 2 * BATCH, 50.0)

    apart = costs.cost("a", OwnWorkers.SPREAD) - costs.cost("a", OwnWorkers.BESIDE)
    assert apart == pytest.approx(math.log(2.0), abs=0.06)


# --- implausible speeds


@pytest.mark.parametrize("speed", [0.0, -5.0, math.nan, math.inf, -math.inf, 1e300, 1e-300])
def test_an_implausible_speed_is_dropped_and_recorded_once(speed: float) -> None:
    taught, fooled = new(), new()
    for crowd in ((), ("b",)):
        tell(taught, "a", (1, crowd))
        fooled.add("a", (1, BATCH, "", ((1, crowd),)), BATCH, speed)
        tell(fooled, "a", (1, crowd))
        fooled.add("a", (1, BATCH, "", ((1, crowd),)), BATCH, speed)

    assert fooled.cost("a", "b") == taught.cost("a", "b")
    assert fooled.step_s("a", 1, BATCH) == taught.step_s("a", 1, BATCH)
    assert list(fooled.dropped) == ["a"]
    assert fooled.dropped["a"] == pytest.approx(speed, nan_ok=True)


def test_an_outlier_counts_only_if_it_is_repeated() -> None:
    costs = new()
    tell(costs, "a", (1, ()))

    tell(costs, "a", (1, ()), times=1, off=1e4)
    assert costs.step_s("a", 1, BATCH) == pytest.approx(0.1, rel=0.01)

    tell(costs, "a", (1, ()), times=1, off=1e4)
    assert costs.step_s("a", 1, BATCH) == pytest.approx(1e-5, rel=0.01)


# --- properties

speeds = st.floats() | st.floats(1.0, 1e4)
crowds = st.lists(st.sampled_from("abc"), max_size=3).map(lambda names: tuple(sorted(names)))


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3), crowds, speeds), max_size=30))
def test_every_cost_is_a_small_number_from_0_on(
    told: list[tuple[str, int, tuple[str, ...], float]],
) -> None:
    costs = new()
    for family, own, crowd, speed in told:
        costs.add(family, (own, BATCH, "", ((own, crowd),)), BATCH, speed)

    others = ("a", "b", "c", "new", *OwnWorkers)
    found = [costs.cost(family, other) for family in ("a", "b", "new") for other in others]
    assert all(math.isfinite(cost) and 0.0 <= cost <= 2.0 for cost in found)


def somewhere(seed: int, jobs: int = 4) -> Occupancy:
    """Jobs with one to three workers on random nodes."""
    rng = default_rng(seed)
    names = [JobId(f"{'abc'[number % 3]}-{number}") for number in range(jobs)]
    where = Occupancy({name: name[0] for name in (*names, JobId("a-9"))})
    for name in names:
        chosen = rng.integers(len(NODES), size=rng.integers(1, 4)).tolist()
        where.put(name, Counter(NODES[number] for number in chosen))
    return where


@settings(max_examples=examples(60))
@given(st.integers(0, 10**6))
def test_a_gain_is_the_difference_of_all_speeds(seed: int) -> None:
    where, costs = somewhere(seed), new()
    before = all_shares(where, costs)
    first, layout = next(iter(where.nodes)), {NODES[seed % 3]: 2}

    gain = gain_of({first: layout}, where, costs)
    known = gain_of({first: layout}, where, costs, before)
    assert all_shares(where, costs) == before
    where.put(first, layout)

    assert gain == pytest.approx(sum(all_shares(where, costs).values()) - sum(before.values()))
    assert known == pytest.approx(gain)


@settings(max_examples=examples(60))
@given(st.integers(0, 10**6), st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_a_worker_goes_to_the_best_node(seed: int, rooms: list[int]) -> None:
    where, costs, job = somewhere(seed), new(), JobId("a-9")
    tell(costs, "a", (1, ()))
    tell(costs, "a", (1, ("b",)))
    free = {node: room for node, room in zip(NODES, rooms, strict=True) if room}
    if not free:
        return

    found = LayoutSearch(free, where, costs).best(job, 1)

    gains = {node: gain_of({job: {node: 1}}, where, costs) for node in free}
    assert gain_of({job: found}, where, costs) == pytest.approx(max(gains.values()), abs=1e-5)


def test_crowds_name_each_other_job_once() -> None:
    where = Occupancy({JobId(name): name[0] for name in ("a-1", "b-1", "b-2")})
    where.put(JobId("a-1"), {NODES[0]: 2, NODES[1]: 1})
    where.put(JobId("b-1"), {NODES[0]: 3})
    where.put(JobId("b-2"), {NODES[0]: 1})

    assert crowds_of(JobId("a-1"), where) == ((1, ()), (2, ("b", "b")))
