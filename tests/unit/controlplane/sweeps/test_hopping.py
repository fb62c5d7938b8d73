"""Every model sees every partition, one unit at a time, and partitions have their nodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from controlplane.sweeps.configurations import stream
from controlplane.sweeps.hopping import (
    GreedyOrder,
    HopProblem,
    Model,
    Slot,
    Unit,
    Visit,
    makespan_bound,
    partitions,
)
from controlplane.sweeps.replicas import partition_holders
from controlplane.sweeps.visit_order import RandomOrder, best_weights, makespan
from schemas.ids import NodeId
from tests.support.sizes import examples


def problem(
    costs: list[float], slowness: list[float], *, epochs: int = 1,
    replicas: list[list[int]] | None = None,
) -> HopProblem:  # fmt: skip
    """A partition for each slot; `replicas` are those that each slot holds beside its own."""
    everything = partitions(range(len(slowness)))
    held = replicas or [[] for _ in slowness]
    return HopProblem(
        models=[Model(cost, everything, epochs - 1) for cost in costs],
        slots=[
            Slot(partitions([at]), partitions([p for p in some if p != at]), slow)
            for at, (slow, some) in enumerate(zip(slowness, held, strict=True))
        ],
        sizes=[1.0] * len(slowness),
    )


@st.composite
def problems(draw: st.DrawFn) -> HopProblem:
    slots = draw(st.integers(1, 5))
    many = draw(st.integers(slots, slots + 2))  # partitions
    homes = [p % slots for p in range(many)]
    replicas = draw(st.lists(st.sets(st.integers(0, many - 1)), min_size=slots, max_size=slots))
    positive, some = st.floats(0.1, 5.0), st.integers(0, 2**many - 1)
    model = st.builds(Model, positive, some, st.integers(0, 2))
    found = HopProblem(
        models=draw(st.lists(model, max_size=6)),
        slots=[
            Slot(
                own := partitions([p for p in range(many) if homes[p] == at]),
                partitions(sorted(replicas[at])) & ~own, draw(positive),
            ) for at in range(slots)
        ],
        sizes=draw(st.lists(positive, min_size=many, max_size=many)),
    )  # fmt: skip
    models = [at for at, one in enumerate(found.models) if one.todo & 1]
    if draw(st.booleans()) and models:  # one of them is at its first partition
        running = [Unit(Visit(models[0], 0, homes[0]), draw(positive))]
        return HopProblem(found.models, found.slots, found.sizes, running)
    return found


def orders(seed: int) -> list[Callable[[HopProblem], GreedyOrder]]:
    return [GreedyOrder, lambda one: RandomOrder(one, stream(seed))]


@settings(max_examples=examples(150), deadline=None)
@given(problems(), st.integers(0, 99))
def test_each_model_visits_each_partition_once_an_epoch_and_nothing_overlaps(
    given_problem: HopProblem, seed: int
) -> None:
    for order in orders(seed):
        rng = stream(seed)
        left = [(model.todo, model.epochs_left) for model in given_problem.models]
        play = order(given_problem)
        running = {unit.visit for unit in given_problem.running}
        begun = list(running)
        while True:
            begun += (new := play.begin_units())
            running |= set(new)
            assert len({visit.model for visit in running}) == len(running)
            assert len({visit.slot for visit in running}) == len(running)
            for visit in new:
                slot = given_problem.slots[visit.slot]
                assert (slot.primary | slot.replicas) >> visit.partition & 1
            if not running:
                break
            over = sorted(running)[rng.randrange(len(running))]
            running.remove(over)
            play.end(over)
        for at, (todo, epochs_left) in enumerate(left):
            visited = [visit.partition for visit in begun if visit.model == at]
            if not todo:
                assert visited == [], "it waits for the searcher"
                continue
            first = todo.bit_count()
            assert partitions(visited[:first]) == todo
            many = len(given_problem.sizes)
            later = [visited[i : i + many] for i in range(first, len(visited), many)]
            assert [sorted(one) for one in later] == [list(range(many))] * epochs_left


@settings(max_examples=examples(100), deadline=None)
@given(problems())
def test_no_order_beats_the_bound(one: HopProblem) -> None:
    waits = any(model.todo == 0 and model.epochs_left for model in one.models)
    if not waits:
        assert makespan(one) >= makespan_bound(one) * (1 - 1e-9)


@pytest.mark.parametrize("models", [4, 8, 12])
def test_equal_models_end_without_a_gap(models: int) -> None:
    assert makespan(problem([1.0] * models, [1.0] * 4)) == models


@pytest.mark.parametrize("seed", range(3))
def test_the_order_is_within_ten_percent_of_the_optimum(seed: int) -> None:
    rng = stream(seed)
    one = problem([rng.choice([1.0, 2.0, 3.0]) for _ in range(4)], [1.0, 1.0, 2.0])

    least = shortest(one)

    assert makespan_bound(one) <= least * (1 + 1e-6)
    assert least * (1 - 1e-6) <= makespan(one, best_weights(one, 20, stream(0))) <= least * 1.1


@settings(max_examples=examples(30), deadline=None)
@given(problems(), st.integers(0, 99))
def test_rollouts_never_lengthen_the_order(one: HopProblem, seed: int) -> None:
    assert makespan(one, best_weights(one, 5, stream(seed))) <= makespan(one)


def test_twice_as_many_models_as_slots_end_close_to_the_bound_where_slots_differ() -> None:
    lost = []
    for seed in range(5):
        rng = stream(seed)
        one = problem(
            [min(21.0, max(0.36, rng.lognormvariate(1.4, 0.9))) for _ in range(16)],
            [12.1 / rng.choice([12.1, 5.6, 11.3, 9.5]) for _ in range(8)],
        )
        lost.append(makespan(one, best_weights(one, 20, rng)) / makespan_bound(one))

    assert max(lost) <= 1.03
    assert sum(lost) / len(lost) <= 1.005


def test_a_slot_serves_its_own_partition_before_a_replica() -> None:
    one = problem([1.0, 1.0], [1.0, 1.0], replicas=[[1], [0]])

    assert sorted(GreedyOrder(one).begin_units()) == [Visit(0, 0, 0), Visit(1, 1, 1)]


def test_a_slot_without_own_work_uses_replicas() -> None:
    models = [Model(1.0, partitions([0]))] * 2
    slots = [Slot(partitions([0])), Slot(partitions([1]), replicas=partitions([0]))]

    assert makespan(HopProblem(models, slots, [1.0, 1.0])) == 1.0


def test_a_model_whose_state_is_on_the_slot_is_preferred() -> None:
    models = [Model(1.0, partitions([0])), Model(1.0, partitions([0]), at=0)]

    begun = GreedyOrder(HopProblem(models, [Slot(partitions([0]))], [1.0])).begin_units()

    assert begun == [Visit(1, 0, 0)]


def test_random_durations_cost_no_time_without_a_barrier() -> None:
    one, rng = problem([1.0] * 16, [1.0] * 8, epochs=8), stream(0)
    busy = [0.0] * 8

    def seconds(visit: Visit) -> float:
        took = rng.uniform(0.8, 1.2)
        busy[visit.slot] += took
        return took

    assert makespan(one, None, seconds) <= 1.01 * max(busy)


def shortest(one: HopProblem) -> float:
    """The least makespan of an open shop, by mixed-integer programming over pairs' orders."""
    units = [(m, s) for m in range(len(one.models)) for s in range(len(one.slots))]
    takes = [one.seconds(Visit(m, s, s)) for m, s in units]
    pairs = [
        (a, b)
        for a in range(len(units))
        for b in range(a)
        if units[a][0] == units[b][0] or units[a][1] == units[b][1]
    ]
    late = sum(takes)
    columns = len(units) + len(pairs) + 1  # begins, whether a is first, the end of all
    rows, least = [], []
    for at, took in enumerate(takes):
        row = np.zeros(columns)
        row[-1], row[at] = 1.0, -1.0
        rows.append(row)
        least.append(took)
    for at, (a, b) in enumerate(pairs, start=len(units)):
        first, second = np.zeros(columns), np.zeros(columns)
        first[b], first[a], first[at] = 1.0, -1.0, -late
        second[a], second[b], second[at] = 1.0, -1.0, late
        rows += [first, second]
        least += [takes[a] - late, takes[b]]
    whole = np.zeros(columns)
    whole[len(units) : -1] = 1
    upper = np.where(whole > 0, 1.0, late)
    found = milp(
        c=np.eye(columns)[-1], constraints=LinearConstraint(np.array(rows), np.array(least)),
        integrality=whole, bounds=Bounds(np.zeros(columns), upper), options={"mip_rel_gap": 0.0},
    )  # fmt: skip
    assert found.success, found.message
    return float(found.fun)


N0, N1, N2 = NodeId("n0"), NodeId("n1"), NodeId("n2")
workers = st.dictionaries(st.sampled_from([N0, N1, N2]), st.integers(1, 4), min_size=1)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(workers, min_size=1, max_size=5), st.integers(1, 12), st.integers(1, 4))
def test_each_partition_has_its_replicas_and_loads_are_even(
    changes: list[dict[NodeId, int]], partitions: int, replicas: int
) -> None:
    held: dict[NodeId, set[int]] = {}
    for now in changes:
        before, held = held, partition_holders(now, partitions, replicas, held)

        holders = [[n for n in now if p in held[n]] for p in range(partitions)]
        assert [len(some) for some in holders] == [min(replicas, len(now))] * partitions
        if replicas == 1:
            for one in now:
                for other in now:
                    more = (len(held[other]) + 1) / now[other]
                    assert len(held[one]) / now[one] <= max(more, len(held[other]) / now[other])
        if now.keys() == before.keys():
            assert partition_holders(now, partitions, replicas, held) == held, "nothing moves"


def test_partitions_follow_the_number_of_workers_and_leave_lost_and_unable_nodes() -> None:
    held = partition_holders({N0: 1, N1: 1, N2: 1}, 6, 1, {})
    after = partition_holders({N0: 1, N1: 1}, 6, 1, held)
    assert {node: len(some) for node, some in after.items()} == {N0: 3, N1: 3}
    assert all(held[node] <= after[node] for node in after)

    held = partition_holders({N0: 4, N1: 2}, 6, 1, {})
    assert {node: len(some) for node, some in held.items()} == {N0: 4, N1: 2}

    held = partition_holders({N0: 1, N1: 1}, 2, 2, {}, lambda node, p: (node, p) != (N1, 0))
    assert held == {N0: {0, 1}, N1: {1}}
