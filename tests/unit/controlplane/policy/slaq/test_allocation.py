"""Slot by slot to whoever gains most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policy.slaq.policy import allocate
from tests.support.sizes import examples


@dataclass
class Table:
    """Gains of the second slot, the third, ... of each job."""

    rows: Sequence[Sequence[float]]

    def step(self, row: int, size: int) -> float:
        return self.rows[row][size - 1]


# Gains of the second, third and fourth slot.
HAND = Table([[6.0, 3.0, 2.0], [4.0, 2.5, 1.0], [1.0, 0.5, 0.0]])


def test_a_round_worked_out_by_hand() -> None:
    """Eight slots for three jobs: one each, then 6 to A, 4 to B, 3 to A, 2.5 to B, 2 to A."""
    assert allocate(HAND, [(1, 4)] * 3, [0, 0, 0], room=8, margin=0.0) == [4, 3, 1]


def test_sizes_of_now_are_kept_where_a_move_gains_less_than_the_margin() -> None:
    """A's third slot gains 3, B's third 2.5: a fifth less."""
    now = [2, 3, 1]

    assert allocate(HAND, [(1, 4)] * 3, now, room=6, margin=0.25) == now
    assert allocate(HAND, [(1, 4)] * 3, now, room=6, margin=0.15) == [3, 2, 1]


def test_who_must_give_gives_where_it_is_missed_least() -> None:
    assert allocate(HAND, [(1, 4)] * 3, [4, 4, 2], room=7, margin=9.0) == [3, 3, 1]


@pytest.mark.parametrize("room", [3, 5, 30])
def test_bounds_hold_and_nothing_is_given_for_nothing(room: int) -> None:
    assert sum(allocate(HAND, [(1, 4), (1, 2), (1, 4)], [0] * 3, room, 0.0)) == min(room, 9)
    assert allocate(HAND, [(1, 4), (1, 2), (1, 4)], [0] * 3, 30, 0.0) == [4, 2, 3]


tables = st.lists(
    st.lists(st.integers(0, 9), min_size=3, max_size=3).map(lambda row: sorted(row)[::-1]),
    min_size=1,
    max_size=4,
)


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=tables, have=st.lists(st.integers(0, 4), min_size=4, max_size=4), more=st.integers(0, 9)
)
def test_without_a_margin_no_other_sizes_gain_more_wherever_it_begins(
    rows: list[list[int]], have: list[int], more: int
) -> None:
    table, room = Table(rows), len(rows) + more

    found = allocate(table, [(1, 4)] * len(rows), have[: len(rows)], room, margin=0.0)

    def gain(sizes: Sequence[int]) -> float:
        return sum(sum(row[: size - 1]) for row, size in zip(rows, sizes, strict=True))

    others = product(range(1, 5), repeat=len(rows))
    assert sum(found) <= room
    assert gain(found) == max(gain(sizes) for sizes in others if sum(sizes) <= room)


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), min_size=1, max_size=4),
    have=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    more=st.integers(0, 9),
    margin=st.sampled_from([0.0, 0.25, 2.0]),
)
def test_whatever_slots_gain_what_was_found_is_found_again_from_there(
    rows: list[list[float]], have: list[int], more: int, margin: float
) -> None:
    table, bounds, room = Table(rows), [(1, 4)] * len(rows), len(rows) + more

    found = allocate(table, bounds, have[: len(rows)], room, margin)

    assert all(1 <= size <= 4 for size in found)
    assert sum(found) <= room
    assert allocate(table, bounds, found, room, margin) == found
