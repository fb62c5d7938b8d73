"""Which slots jobs get, once it is known how many."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policy.api import JobView
from controlplane.policy.placement.free_slots import Mode, Placer, with_user_batches
from controlplane.policy.placement.placers import PlacerName, SlotPlacer, make_placer
from controlplane.policy.placement.slot_partition import consolidate, partition_of
from schemas.ids import JobId, SlotId, node_of
from tests.support.builders import S0, S1, T0, T1, A, B, C, job_view
from tests.support.sizes import examples
from tests.support.views import NOW, row_of, view_of

PLACERS: tuple[PlacerName, ...] = get_args(PlacerName)
D = JobId("d-4")


def on(*names: str) -> dict[SlotId, int]:
    """A job of batch 64 on slots written as in n1/0."""
    return dict.fromkeys(map(SlotId, names), 64 // len(names))


def where(
    placer: SlotPlacer, nodes: tuple[int, ...], jobs: list[JobView], sizes: dict[JobId, int]
) -> dict[JobId, list[SlotId]]:
    return placer.place(partition_of(view_of(row_of(*nodes), *jobs), NOW), sizes)


# --- by example: n1 has 4 slots, of which A has 3; n2 has 4, of which B has 2; n3 is empty


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
def test_a_start_goes_where_its_mode_says(mode: Mode, size: int, chosen: list[str]) -> None:
    jobs = [*BUSY, job_view(C, slots=(1, 8))]

    placed = where(Placer(mode), (4, 4, 4), jobs, {A: 3, B: 2, C: size})

    assert placed == {A: list(BUSY[0].running_on), B: list(BUSY[1].running_on), C: chosen}


def test_tetris_fills_a_node_in_use_before_a_smaller_empty_one() -> None:
    jobs = [job_view(A, running_on=on("n1/0")), job_view(B)]

    tetris = where(Placer("tetris"), (4, 2), jobs, {A: 1, B: 2})
    tight = where(Placer("consolidate"), (4, 2), jobs, {A: 1, B: 2})

    assert (tetris[B], tight[B]) == (["n1/1", "n1/2"], ["n2/0", "n2/1"])


def test_load_is_balanced_by_the_share_of_slots_that_workers_use() -> None:
    """Half of n1 is in use: B takes one of n2 and all of n3, and then stays on n2 among equals."""
    jobs = [job_view(A, running_on=on("n1/0", "n1/1")), job_view(B, slots=(1, 8)), job_view(C)]

    placed = where(make_placer("load-balancing"), (4, 2, 1), jobs, {A: 2, B: 3, C: 1})

    assert placed == {A: ["n1/0", "n1/1"], B: ["n2/0", "n2/1", "n3/0"], C: ["n1/2"]}


def test_a_job_that_grows_adds_slots_on_its_own_node_among_equals() -> None:
    jobs = [job_view(A, slots=(1, 8), running_on=on("n2/0")), job_view(B, running_on=on("n1/0"))]

    placed = where(make_placer("load-balancing"), (2, 2), jobs, {A: 2, B: 1})

    assert placed == {A: ["n2/0", "n2/1"], B: ["n1/0"]}


def test_the_emptiest_node_is_looked_for_again_for_every_job() -> None:
    jobs = [job_view(A), job_view(B), job_view(C)]

    placed = where(Placer("emptiest"), (2, 2), jobs, {A: 1, B: 1, C: 1})

    assert placed == {A: [S0], B: [T0], C: [S1]}


def test_a_growing_job_keeps_its_slots_and_adds_the_closest() -> None:
    jobs = [job_view(A, slots=(1, 8), running_on=on("n2/1", "n1/0"))]

    placed = where(Placer("consolidate"), (2, 3, 4), jobs, {A: 4})

    assert placed == {A: ["n2/1", "n2/0", "n2/2", "n1/0"]}


def test_a_growing_job_stays_on_its_node_though_another_would_fit_more_tightly() -> None:
    jobs = [job_view(A, slots=(1, 8), running_on=on("n2/1"))]

    assert where(Placer(), (1, 4), jobs, {A: 2}) == {A: ["n2/1", "n2/0"]}


def test_a_start_has_its_choice_before_a_job_that_grows() -> None:
    """One slot is free and one is left by A: B can be prepared for that while A is still there."""
    jobs = [
        job_view(A, slots=(1, 8), running_on=on("n1/0", "n1/1")),
        job_view(B, slots=(1, 8), running_on=on("n1/2")),
        job_view(C),
    ]

    placed = where(Placer(), (4,), jobs, {A: 1, B: 2, C: 1})

    assert placed == {A: ["n1/0"], B: ["n1/2", "n1/1"], C: ["n1/3"]}


def test_tetris_counts_a_node_as_in_use_from_its_first_job_on() -> None:
    placed = where(Placer("tetris"), (5, 1), [job_view(A), job_view(B)], {A: 3, B: 1})

    assert placed == {A: ["n1/0", "n1/1", "n1/2"], B: ["n1/3"]}


def test_slots_that_are_being_left_may_be_given_out_and_usable_ones_go_first() -> None:
    slots = row_of(3)
    slots[0] = msgspec.structs.replace(slots[0], usable=False, leaving=True)
    slots[1] = msgspec.structs.replace(slots[1], usable=False)
    partition = partition_of(view_of(slots, job_view(A)), NOW)

    assert (partition.room, Placer().place(partition, {A: 2})) == (2, {A: ["n1/2", "n1/0"]})


def test_a_shrinking_job_gives_up_slots_where_it_has_fewest() -> None:
    jobs = [job_view(A, slots=(1, 8), running_on=on("n1/0", "n2/0", "n2/1", "n1/1", "n2/2"))]

    placed = where(Placer("consolidate"), (3, 3), jobs, {A: 3})

    assert placed == {A: ["n2/0", "n2/1", "n2/2"]}


@pytest.mark.parametrize(
    ("size", "placed"),
    [
        (2, ["n1/0", "n1/1"]),
        (3, ["n1/0", "n1/1", "n1/2"]),
        (4, ["n3/0", "n3/1", "n3/2", "n3/3"]),
        (5, ["n3/0", "n3/1", "n3/2", "n3/3", "n2/0"]),
    ],
)
def test_a_packed_job_goes_where_it_spans_fewest_nodes_its_own_first(
    size: int, placed: list[str]
) -> None:
    job = job_view(A, slots=(1, 8), running_on=on("n1/0", "n2/0"))
    partition = partition_of(view_of(row_of(3, 2, 4), job), NOW)

    assert Placer().place(partition, {A: size}, {A}) == {A: placed}


def test_with_restart_a_job_of_another_size_is_placed_anew_after_those_that_stay() -> None:
    jobs = [
        job_view(A, slots=(1, 8), running_on=on("n1/0", "n1/1")),
        job_view(B, slots=(1, 8), running_on=on("n2/0")),
        job_view(C, slots=(1, 8)),
    ]
    placer = Placer("emptiest", "restart")
    partition = partition_of(view_of(row_of(2, 2), *jobs), NOW)

    placed = placer.place(partition, {A: 1, C: 1, B: 1})

    assert placed == {B: [T0], A: [S0], C: [S1]}
    assert placer.restarts(partition, placed) == (A,)


def test_what_was_promised_is_kept_when_the_slots_come_free() -> None:
    """C is promised n1/1 while A still has it. By then D has ended and n2 looks better."""
    placer = Placer("emptiest")
    first = [
        job_view(A, running_on=on("n1/0", "n1/1")),
        job_view(D, running_on=on("n2/0", "n2/1")),
        job_view(C),
    ]

    promised = where(placer, (2, 2), first, {D: 2, C: 1})[C]
    then = where(placer, (2, 2), [job_view(A), job_view(C)], {A: 1, C: 1})

    assert promised == [S0]
    assert then == {A: [T0], C: [S0]}


def test_a_promise_of_a_slot_that_is_taken_is_forgotten() -> None:
    placer = Placer("consolidate")

    where(placer, (2, 2), [job_view(A)], {A: 1})
    placed = where(placer, (2, 2), [job_view(A), job_view(B, running_on=on("n1/0"))], {B: 1, A: 1})

    assert placed == {B: [S0], A: [S1]}


def test_a_batch_is_dealt_out_anew_only_where_slots_change() -> None:
    jobs = [
        job_view(A, running_on={S0: 30, S1: 20}, batch_size=64),
        job_view(B, batch_size=65, slots=(2, 2)),
    ]
    partition = partition_of(view_of(row_of(2, 2), *jobs), NOW)

    assert with_user_batches(partition, {A: [S0, S1], B: [T0, T1]}) == {
        A: {S0: 30, S1: 20},
        B: {T0: 33, T1: 32},
    }


# --- whatever is asked for


@settings(max_examples=examples(150), deadline=None)
@given(
    name=st.sampled_from(PLACERS),
    moves=st.sampled_from(["elastic", "restart"]),
    nodes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    data=st.data(),
)
def test_every_job_gets_its_size_in_slots_of_its_own(
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
def test_the_roomiest_nodes_are_those_of_the_shared_rule_for_packing(
    nodes: list[int], data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, sum(nodes)))

    placed = where(Placer("roomiest"), tuple(nodes), [job_view(A)], {A: size})[A]

    assert placed == [slot.slot for slot in consolidate(row_of(*nodes), size)]


@settings(max_examples=examples(100), deadline=None)
@given(nodes=st.lists(st.integers(1, 4), min_size=1, max_size=5), data=st.data())
def test_consolidated_jobs_span_as_few_nodes_as_there_can_be(
    nodes: list[int], data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, sum(nodes)))

    placed = where(Placer("consolidate"), tuple(nodes), [job_view(A)], {A: size})[A]

    largest, fewest = sorted(nodes, reverse=True), 0
    while sum(largest[:fewest]) < size:
        fewest += 1
    assert len({node_of(slot) for slot in placed}) == fewest
