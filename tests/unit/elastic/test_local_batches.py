"""Who takes which samples: any batch, any group, any order of changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.sample_stream import (
    SampleStream,
    Schedule,
    ScheduleRow,
    TrainingPosition,
    passes,
    share,
    split,
)
from tests.support.sample_steps import steps_of

SPLITS = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(lambda row: sum(row) > 0)


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_a_split_differs_by_at_most_one_and_favours_low_ranks(batch: int, workers: int) -> None:
    found = split(batch, workers)

    assert (len(found), sum(found)) == (workers, batch)
    assert found[0] - found[-1] <= 1
    assert list(found) == sorted(found, reverse=True)


@given(st.integers(0, 10_000), st.integers(1, 200))
def test_passes_are_as_few_as_fit_and_of_nearly_equal_size(count: int, bound: int) -> None:
    found = passes(count, bound)

    assert sum(found) == count
    assert max(found) <= bound
    assert len(found) == max(1, -(-count // bound))
    assert max(found) - min(found) <= 1


@given(st.integers(0, 10_000), st.integers(2, 200))
def test_no_pass_has_one_sample_where_a_model_needs_two(count: int, bound: int) -> None:
    found = passes(count, bound, 2)

    assert sum(found) == count
    assert min(found) >= min(2, count)
    assert max(found) <= bound + (bound == 2)  # an odd count is no sum of twos
    if bound > 2:
        assert found == passes(count, bound)


def test_five_samples_of_which_four_fit_are_three_and_two() -> None:
    assert passes(5, 4, 2) == (3, 2)
    assert passes(5, 2, 2) == (3, 2)
    assert passes(5, 2) == (2, 2, 1)


@given(
    st.integers(0, 49),
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 60)), min_size=1, max_size=5),
    st.builds(SampleStream, st.just(1), st.integers(1, 50), st.integers(1, 3), st.booleans()),
)
def test_where_the_stream_stands_is_where_drawing_leads(
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


def test_the_row_of_a_step_is_the_last_that_has_begun() -> None:
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
    st.integers(0, 2**40),
    st.integers(1, 120),
    st.lists(st.tuples(st.integers(1, 4), SPLITS), min_size=1, max_size=8),
)
def test_every_sample_comes_once_through_any_rows(
    seed: int, size: int, changes: list[tuple[int, list[int]]]
) -> None:
    schedule, step = Schedule(ScheduleRow(1, (3, 2), 0)), 0
    order = SampleStream(seed, size).order(1)
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
