"""Every sample once per epoch, for any batch, group and order of changes."""

from __future__ import annotations

import json
from collections import deque
from itertools import pairwise
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from elastic.reporting import SampleRecords
from elastic.sample_stream import (
    LargeOrder,
    SampleStream,
    Schedule,
    ScheduleRow,
    TrainingPosition,
    passes,
    rest_of_epoch,
    share,
    share_sizes,
    split,
)
from schemas.ids import WorkerId
from tests.support.sample_steps import steps_of


@given(
    st.builds(SampleStream, st.just(1), st.integers(1, 90), st.integers(1, 3), st.booleans()),
    st.integers(1, 100),
)
@example(SampleStream(1, 2, 2), 1)  # the last step takes two that are no whole steps
def test_steps_are_counted_as_they_are_drawn(stream: SampleStream, batch: int) -> None:
    drawn = [cursor for cursor, _ in steps_of(stream, 1, 0, [batch], 0)]

    assert [stream.steps(cursor, batch) for cursor in drawn] == list(range(1, len(drawn) + 1))
    assert stream.steps(0, batch) == 0
    assert stream.steps(stream.size, batch) == len(drawn)


@given(st.integers(1, 200), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_a_short_step_is_split_evenly(left: int, split: list[int]) -> None:
    step = list(range(min(left, sum(split))))
    shares = [share(step, split, rank) for rank in range(len(split))]

    assert [sample for part in shares for sample in part] == step
    if len(step) < sum(split):
        sizes = [len(part) for part in shares]
        taking = [size for size in sizes if size]
        assert max(taking) - min(taking) <= 1
        assert min(taking) >= min(2, len(step))


ROWS = st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(lambda row: sum(row) > 0)


@given(ROWS, st.integers(1, 3), st.integers(-40, 3))
@example([2, 1, 1, 1], 2, 0)
def test_no_rank_takes_less_than_the_model_needs(
    row: list[int], min_samples: int, more: int
) -> None:
    step = list(range(max(min_samples, sum(row) + more)))
    shares = [share(step, row, rank, min_samples) for rank in range(len(row))]
    sizes = [len(part) for part in shares]

    assert [sample for part in shares for sample in part] == step
    assert [size for size in sizes if 0 < size < min_samples] == []
    assert all(size == 0 for size, batch in zip(sizes, row, strict=True) if not batch)


@given(ROWS, st.integers(1, 3))
def test_a_whole_step_is_split_again_only_if_needed(row: list[int], min_samples: int) -> None:
    sizes = share_sizes(sum(row), row, min_samples)

    if min(batch for batch in row if batch) >= min_samples:
        assert list(sizes) == row
    elif sum(row) >= min_samples:
        takers = min(sum(1 for batch in row if batch), sum(row) // max(2, min_samples))
        assert sum(1 for size in sizes if size) == max(1, takers)
        assert max(sizes) == -(-sum(row) // max(1, takers))  # the least that this many can have


def test_five_samples_are_split_into_three_and_two() -> None:
    assert [passes(5, 4, 2), passes(5, 2, 2), passes(5, 2)] == [(3, 2), (3, 2), (2, 2, 1)]
    assert share_sizes(5, (2, 1, 1, 1), 2) == (3, 2, 0, 0)
    assert share_sizes(5, (2, 1, 1, 1)) == (2, 1, 1, 1)
    assert share_sizes(17, (8, 8, 1), 2) == (6, 6, 5)
    assert share_sizes(2, (1, 1, 0), 2) == (2, 0, 0)


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    orders = [
        SampleStream(seed, 8).order(epoch) for seed, epoch in ((7, 1), (7, 1), (7, 2), (8, 1))
    ]

    assert orders[0] == orders[1] == [4, 5, 3, 0, 7, 1, 6, 2]
    assert len({tuple(order) for order in orders}) == 3


@given(st.integers(0, 2**62), st.integers(1, 5000), st.integers(1, 9000), st.integers(0, 5000))
def test_a_large_order_has_every_sample_once_in_any_parts(
    seed: int, size: int, part: int, at: int
) -> None:
    order = LargeOrder(seed, size)
    whole = [order[start : start + part] for start in range(0, size, part)]

    ids = [sample for each in whole for sample in each]
    assert sorted(ids) == list(range(size))
    assert (order[at : at + 3], order[size - 1]) == (ids[at : at + 3], ids[-1])


def test_a_large_order_mixes_all_samples() -> None:
    orders = [LargeOrder(seed, 10**12)[at : at + 1000] for seed in (1, 2) for at in (0, 10**9)]
    shares = [sum(sample >= 10**12 // 2 for sample in each) for each in orders]
    rises = [sum(a < b for a, b in pairwise(each)) for each in orders]

    assert all(450 < share < 550 for share in shares + rises)
    assert len({sample for each in orders for sample in each}) == 4000
    assert SampleStream(7, 10**12).order(2)[5:7] == SampleStream(7, 10**12).order(2)[:9][5:7]


def test_unshuffled_data_keep_their_order() -> None:
    stream = SampleStream(7, 8, shuffled=False)

    assert [ids for _, ids in steps_of(stream, 1, 2, [2, 1], 0)] == [[2, 3], [5, 6]]
    assert [ids for _, ids in steps_of(stream, 2, 2, [2, 1], 1)] == [[4], [7]]


SPLITS = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(lambda row: sum(row) > 0)


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_a_split_differs_by_at_most_one(batch: int, workers: int) -> None:
    found = split(batch, workers)

    assert (len(found), sum(found)) == (workers, batch)
    assert found[0] - found[-1] <= 1
    assert list(found) == sorted(found, reverse=True)


@given(st.integers(0, 10_000), st.integers(1, 200))
def test_passes_are_few_and_of_equal_size(count: int, bound: int) -> None:
    found = passes(count, bound)

    assert sum(found) == count
    assert max(found) <= bound
    assert len(found) == max(1, -(-count // bound))
    assert max(found) - min(found) <= 1


@given(st.integers(0, 10_000), st.integers(2, 200))
def test_no_pass_has_less_than_the_model_needs(count: int, bound: int) -> None:
    found = passes(count, bound, 2)

    assert sum(found) == count
    assert min(found) >= min(2, count)
    assert max(found) <= bound + (bound == 2)  # an odd count is no sum of twos
    if bound > 2:
        assert found == passes(count, bound)


@given(
    st.integers(0, 49),
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 60)), min_size=1, max_size=5),
    st.builds(SampleStream, st.just(1), st.integers(1, 50), st.integers(1, 3), st.booleans()),
)
def test_a_position_advances_as_steps_are_drawn(
    cursor: int, legs: list[tuple[int, int]], stream: SampleStream
) -> None:
    position = drawn = TrainingPosition(3, cursor % stream.size, 7, 100)
    for steps, batch in legs:
        position = position.advanced(steps, batch, stream)
        if steps == 0 and not stream.taken(drawn.cursor, batch):
            drawn = drawn.next_epoch()
        for _ in range(steps):
            if not stream.taken(drawn.cursor, batch):  # as the batch is now
                drawn = drawn.next_epoch()
            after, ids = next(steps_of(stream, drawn.epoch, drawn.cursor, [batch], 0))
            assert len(ids) == after - drawn.cursor
            drawn = drawn.after_step(drawn.step + 1, after)
            if not stream.taken(after, batch):
                drawn = drawn.next_epoch()

    assert position == drawn


def test_a_step_has_the_latest_started_row() -> None:
    old, zeros, new = (
        ScheduleRow(1, (8,), 0),
        ScheduleRow(10, (8, 0), 0),
        ScheduleRow(12, (4, 4), 0),
    )
    schedule = Schedule(old)
    schedule.announce([zeros, new])

    assert [schedule.at(step) for step in (1, 9, 10, 11, 12, 99)] == [
        old, old, zeros, zeros, new, new,
    ]  # fmt: skip
    assert [row.batch for row in (old, zeros, new)] == [8, 8, 8]
    schedule.forget(11)
    assert schedule.at(1) == zeros
    other = ScheduleRow(12, (8,), 0)
    schedule.announce([other])
    assert [schedule.at(step) for step in (11, 12)] == [zeros, other]


@given(
    st.integers(0, 2**62),
    st.integers(1, 400),
    st.integers(1, 50),
    st.lists(st.tuples(st.integers(1, 4), SPLITS), min_size=1, max_size=8),
)
def test_changing_rows_take_every_sample_once(
    seed: int, size: int, epoch: int, changes: list[tuple[int, list[int]]]
) -> None:
    schedule, step = Schedule(ScheduleRow(1, (3, 2), 0)), 0
    order = SampleStream(seed, size).order(epoch)
    pending = list(changes)
    taken: list[int] = []
    while len(taken) < size:
        step += 1
        if pending and step % 2:
            lead, row = pending.pop()
            schedule.announce([ScheduleRow(step + lead, tuple(row), 0)])
        schedule.forget(step - 1)
        local = schedule.at(step).local_batches
        ids = order[len(taken) : len(taken) + sum(local)]
        shares = [share(ids, local, rank) for rank in range(len(local))]
        assert [sample for part in shares for sample in part] == ids
        assert all(not part for part, batch in zip(shares, local, strict=True) if not batch)
        taken += ids

    assert sorted(taken) == list(range(size))


A, B, C = (WorkerId(name) for name in "abc")


def test_survivors_write_the_records_of_lost_members(tmp_path: Path) -> None:
    stream = SampleStream(seed=1, size=12, min_samples=2)
    schedule = Schedule(ScheduleRow(1, (2, 1, 1), 1))
    first = next(rest_of_epoch(TrainingPosition(), stream, schedule, bound=4))
    records = SampleRecords(deque(), lambda: stream)
    records.open(tmp_path / "samples")
    records.add(first, (A, B, C))
    records.write()
    records.write_for_lost(frozenset({B}))

    written = [json.loads(line) for line in (tmp_path / "samples").read_text().splitlines()]
    order = stream.order(1)
    assert [(entry["rank"], entry["ids"]) for entry in written] == [(1, order[2:4]), (0, order[:2])]
