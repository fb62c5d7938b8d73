"""Every sample once, whatever the batch and the split."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from elastic.sample_stream import SampleStream, share, share_sizes
from tests.support.sample_steps import steps_of


@given(
    st.builds(SampleStream, st.just(1), st.integers(1, 90), st.integers(1, 3), st.booleans()),
    st.integers(1, 100),
)
@example(SampleStream(1, 2, 2), 1)  # the last step takes two that are no whole steps
def test_steps_of_one_batch_are_counted_as_they_are_drawn(stream: SampleStream, batch: int) -> None:
    drawn = [cursor for cursor, _ in steps_of(stream, 1, 0, [batch], 0)]

    assert [stream.steps(cursor, batch) for cursor in drawn] == list(range(1, len(drawn) + 1))
    assert stream.steps(0, batch) == 0
    assert stream.steps(stream.size, batch) == len(drawn)


@given(
    st.integers(0, 2**62),
    st.integers(1, 400),
    st.integers(1, 50),
    st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=5), min_size=1, max_size=6),
)
def test_an_epoch_that_changes_batch_and_split_takes_every_sample_once(
    seed: int, size: int, epoch: int, splits: list[list[int]]
) -> None:
    stream = SampleStream(seed, size)
    taken: list[int] = []
    cursor = 0
    change = 0
    while cursor < size:
        split = splits[change % len(splits)]
        change += 1
        ranks = [steps_of(stream, epoch, cursor, split, rank) for rank in range(len(split))]
        steps = [next(rank) for rank in ranks]
        assert len({behind for behind, _ in steps}) == 1
        cursor = steps[0][0]
        for _, ids in steps:
            taken.extend(ids)

    assert sorted(taken) == list(range(size))


@given(st.integers(1, 200), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_a_short_last_step_is_dealt_out_evenly(left: int, split: list[int]) -> None:
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
def test_nobody_takes_less_than_a_model_needs(row: list[int], min_samples: int, more: int) -> None:
    step = list(range(max(min_samples, sum(row) + more)))
    shares = [share(step, row, rank, min_samples) for rank in range(len(row))]
    sizes = [len(part) for part in shares]

    assert [sample for part in shares for sample in part] == step
    assert [size for size in sizes if 0 < size < min_samples] == []
    assert all(size == 0 for size, batch in zip(sizes, row, strict=True) if not batch)


@given(ROWS, st.integers(1, 3))
def test_a_whole_step_is_dealt_anew_only_where_somebody_has_too_little(
    row: list[int], min_samples: int
) -> None:
    sizes = share_sizes(sum(row), row, min_samples)

    if min(batch for batch in row if batch) >= min_samples:
        assert list(sizes) == row
    elif sum(row) >= min_samples:
        takers = min(sum(1 for batch in row if batch), sum(row) // max(2, min_samples))
        assert sum(1 for size in sizes if size) == max(1, takers)
        assert max(sizes) == -(-sum(row) // max(1, takers))  # the least that this many can have


def test_five_samples_of_four_ranks_go_to_two_where_a_model_needs_two() -> None:
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


def test_data_with_an_order_of_its_own_keeps_it() -> None:
    stream = SampleStream(7, 8, shuffled=False)

    assert [ids for _, ids in steps_of(stream, 1, 2, [2, 1], 0)] == [[2, 3], [5, 6]]
    assert [ids for _, ids in steps_of(stream, 2, 2, [2, 1], 1)] == [[4], [7]]
