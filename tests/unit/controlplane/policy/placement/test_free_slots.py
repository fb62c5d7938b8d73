"""Slots of jobs whose sizes are decided."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policy.api import JobView
from controlplane.policy.placement.free_slots import Mode, Placer, with_user_batches
from controlplane.policy.placement.placers import PlacerName, make_placer
from controlplane.policy.placement.slot_partition import consolidate, partition_of
from schemas.ids import JobId, NodeId, SlotId, node_of
from tests.support.builders import S0, S1, T0, T1, A, B, C, job_view
from tests.support.sizes import examples
from tests.support.views import NOW, row_of, view_of

PLACERS: tuple[PlacerName, ...] = get_args(PlacerName)
D = JobId("d-4")


def on(*names: str) -> dict[SlotId, int]:
    """Local batches of a job of batch 64."""
    return dict.fromkeys(map(SlotId, names), 64 // len(names))


def where(
    placer: Placer, nodes: tuple[int, ...], jobs: list[JobView], sizes: dict[JobId, int]
) -> dict[JobId, list[SlotId]]:
    return placer.place(partition_of(view_of(row_of(*nodes), *jobs), NOW), sizes)


# --- n1 has 4 slots, of which A has 3; n2 has 4, of which B has 2; n3 is empty


BUSY = [
    job_view(A, slots=(1, 8), running_on=on("n1/0", "n1/1", "n1/2")),
    job_view(B, slots=(1, 8), running_on=on("n2/0", "n2/1")),
]


@pytest.mark.parametrize(
    ("mode", "size", "chosen"),
    [
        ("consolidate", 1, ["n1/3"]),
        ("consolidate", 2, ["n2/2", "n2/3"]),
        ("consolidate", 3, ["n3/0", "n3/1", "n3/2"]),
        ("consolidate", 5, ["n3/0", "n3/1", "n3/2", "n3/3", "n1/3"]),
        ("tetris", 1, ["n1/3"]),
        ("tetris", 3, ["n3/0", "n3/1", "n3/2"]),
        ("spread", 2, ["n3/0", "n2/2"]),
        ("spread", 5, ["n3/0", "n3/1", "n2/2", "n2/3", "n1/3"]),
        ("emptiest", 1, ["n3/0"]),
        ("emptiest", 5, ["n3/0", "n3/1", "n3/2", "n3/3", "n2/2"]),
    ],
)
def test_a_start_takes_the_nodes_of_its_mode(mode: Mode, size: int, chosen: list[str]) -> None:
    jobs = [*BUSY, job_view(C, slots=(1, 8))]

    placed = where(Placer(mode), (4, 4, 4), jobs, {A: 3, B: 2, C: size})

    assert placed == {A: list(BUSY[0].running_on), B: list(BUSY[1].running_on), C: chosen}


GROWS = job_view(A, slots=(1, 8), running_on=on("n2/1", "n1/0"))
ON_N1 = job_view(A, slots=(1, 8), running_on=on("n1/0", "n1/1"))


@pytest.mark.parametrize(
    ("name", "nodes", "jobs", "sizes", "placed"),
    [
        ("tetris", (4, 2), [job_view(A, running_on=on("n1/0")), job_view(B)], {A: 1, B: 2},
         {A: ["n1/0"], B: ["n1/1", "n1/2"]}),
        ("consolidate", (4, 2), [job_view(A, running_on=on("n1/0")), job_view(B)], {A: 1, B: 2},
         {A: ["n1/0"], B: ["n2/0", "n2/1"]}),
        ("tetris", (5, 1), [job_view(A), job_view(B)], {A: 3, B: 1},
         {A: ["n1/0", "n1/1", "n1/2"], B: ["n1/3"]}),
        ("load-balancing", (4, 2, 1),
         [job_view(A, running_on=on("n1/0", "n1/1")), job_view(B, slots=(1, 8)), job_view(C)],
         {A: 2, B: 3, C: 1}, {A: ["n1/0", "n1/1"], B: ["n2/0", "n2/1", "n3/0"], C: ["n1/2"]}),
        ("load-balancing", (2, 2),
         [job_view(A, slots=(1, 8), running_on=on("n2/0")), job_view(B, running_on=on("n1/0"))],
         {A: 2, B: 1}, {A: ["n2/0", "n2/1"], B: ["n1/0"]}),
        ("emptiest", (2, 2), [job_view(A), job_view(B), job_view(C)], {A: 1, B: 1, C: 1},
         {A: [S0], B: [T0], C: [S1]}),
        ("consolidate", (2, 3, 4), [GROWS], {A: 4}, {A: ["n2/1", "n2/0", "n2/2", "n1/0"]}),
        ("consolidate", (1, 4), [job_view(A, slots=(1, 8), running_on=on("n2/1"))], {A: 2},
         {A: ["n2/1", "n2/0"]}),
        ("consolidate", (4,), [ON_N1, job_view(B, slots=(1, 8), running_on=on("n1/2")), job_view(C)],
         {A: 1, B: 2, C: 1}, {A: ["n1/0"], B: ["n1/2", "n1/1"], C: ["n1/3"]}),
        ("consolidate", (3, 3),
         [job_view(A, slots=(1, 8), running_on=on("n1/0", "n2/0", "n2/1", "n1/1", "n2/2"))],
         {A: 3}, {A: ["n2/0", "n2/1", "n2/2"]}),
    ],
    ids=[
        "tetris prefers a node in use to a smaller empty one", "consolidate does not",
        "a node is in use from its first job on", "load is the share of slots that workers use",
        "a job that grows prefers its own node among equals", "the emptiest node for each job",
        "a job that grows adds the closest slots", "its own node before a tighter one",
        "a start takes a free slot before a job that grows",
        "a job that shrinks leaves nodes where it has fewest slots",
    ],
)  # fmt: skip
def test_slots_by_example(
    name: PlacerName, nodes: tuple[int, ...], jobs: list[JobView], sizes: Any, placed: Any
) -> None:
    assert where(make_placer(name), nodes, jobs, sizes) == placed


def test_slots_of_exiting_processes_are_given_out_after_usable_ones() -> None:
    slots = row_of(3)
    slots[0] = msgspec.structs.replace(slots[0], usable=False, leaving=True)
    slots[1] = msgspec.structs.replace(slots[1], usable=False)
    partition = partition_of(view_of(slots, job_view(A)), NOW)

    assert (partition.room, Placer().place(partition, {A: 2})) == (2, {A: ["n1/2", "n1/0"]})


@pytest.mark.parametrize(
    ("size", "placed"),
    [
        (2, ["n1/0", "n1/1"]),
        (3, ["n1/0", "n1/1", "n1/2"]),
        (4, ["n3/0", "n3/1", "n3/2", "n3/3"]),
        (5, ["n3/0", "n3/1", "n3/2", "n3/3", "n2/0"]),
    ],
)
def test_a_packed_job_spans_few_nodes_and_prefers_its_own(size: int, placed: list[str]) -> None:
    job = job_view(A, slots=(1, 8), running_on=on("n1/0", "n2/0"))
    partition = partition_of(view_of(row_of(3, 2, 4), job), NOW)

    assert Placer().place(partition, {A: size}, {A}) == {A: placed}


def test_with_restart_a_job_of_another_size_is_placed_again() -> None:
    jobs = [ON_N1, job_view(B, slots=(1, 8), running_on=on("n2/0")), job_view(C, slots=(1, 8))]
    placer = Placer("emptiest", "restart")
    partition = partition_of(view_of(row_of(2, 2), *jobs), NOW)

    placed = placer.place(partition, {A: 1, C: 1, B: 1})

    assert placed == {B: [T0], A: [S0], C: [S1]}
    assert placer.restarts(partition, placed) == (A,)


def test_a_reserved_slot_is_given_to_its_job_unless_it_was_taken() -> None:
    """C waits for n1/0, which A still has. Then D has ended and n2 looks better."""
    placer, other = Placer("emptiest"), Placer("consolidate")
    first = [ON_N1, job_view(D, running_on=on("n2/0", "n2/1")), job_view(C)]

    assert where(placer, (2, 2), first, {D: 2, C: 1})[C] == [S0]
    then = where(placer, (2, 2), [job_view(A), job_view(C)], {A: 1, C: 1})
    assert then == {A: [T0], C: [S0]}
    where(other, (2, 2), [job_view(A)], {A: 1})
    taken = where(other, (2, 2), [job_view(A), job_view(B, running_on=on("n1/0"))], {B: 1, A: 1})
    assert taken == {B: [S0], A: [S1]}


def test_a_batch_is_split_again_only_where_slots_change() -> None:
    jobs = [
        job_view(A, running_on={S0: 30, S1: 20}, batch_size=64),
        job_view(B, batch_size=65, slots=(2, 2)),
    ]
    partition = partition_of(view_of(row_of(2, 2), *jobs), NOW)

    assert with_user_batches(partition, {A: [S0, S1], B: [T0, T1]}) == {
        A: {S0: 30, S1: 20},
        B: {T0: 33, T1: 32},
    }


@pytest.mark.parametrize("name", PLACERS)
def test_a_given_slot_is_no_longer_free(name: PlacerName) -> None:
    slots = row_of(4)
    partition = partition_of(view_of(slots, job_view(A)), NOW)

    ((taken,),) = make_placer(name, "elastic").place(partition, {A: 1}).values()

    assert partition.free == {NodeId("n1"): [s.slot for s in slots if s.slot != taken]}


# --- properties


@settings(max_examples=examples(150), deadline=None)
@given(
    name=st.sampled_from(PLACERS),
    moves=st.sampled_from(["elastic", "restart"]),
    nodes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    data=st.data(),
)
def test_every_job_gets_its_size_and_shares_no_slot(
    name: PlacerName, moves: str, nodes: list[int], data: st.DataObject
) -> None:
    slots = [slot.slot for slot in row_of(*nodes)]
    free = list(data.draw(st.permutations(slots)))
    jobs, sizes, left = [], {}, len(slots)
    for job in (A, B, C, D):
        have = data.draw(st.integers(0, len(free)))
        here, free = free[:have], free[have:]
        jobs.append(job_view(job, slots=(1, 16), running_on=dict.fromkeys(here, 1)))
        sizes[job] = data.draw(st.integers(0, left))
        left -= sizes[job]
    placer = make_placer(name, moves)  # type: ignore[arg-type]  # drawn from its values

    for _ in range(2):
        placed = where(placer, tuple(nodes), jobs, sizes)

        assert {job: len(got) for job, got in placed.items()} == {
            job: size for job, size in sizes.items() if size
        }
        given_out = [slot for got in placed.values() for slot in got]
        assert len(given_out) == len(set(given_out))
        assert set(given_out) <= set(slots)
        for view in jobs:
            got, had = placed.get(view.job, []), list(view.running_on)
            if len(got) == len(had):
                assert got == had
            elif moves == "elastic" and got:
                assert set(got) <= set(had) or set(had) <= set(got)


@settings(max_examples=examples(100), deadline=None)
@given(nodes=st.lists(st.integers(1, 4), min_size=1, max_size=5), data=st.data())
def test_consolidated_jobs_span_as_few_nodes_as_possible(
    nodes: list[int], data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, sum(nodes)))

    placed = where(Placer("consolidate"), tuple(nodes), [job_view(A)], {A: size})[A]
    roomiest = where(Placer("roomiest"), tuple(nodes), [job_view(A)], {A: size})[A]

    largest, fewest = sorted(nodes, reverse=True), 0
    while sum(largest[:fewest]) < size:
        fewest += 1
    assert len({node_of(slot) for slot in placed}) == fewest
    assert roomiest == [slot.slot for slot in consolidate(row_of(*nodes), size)]
