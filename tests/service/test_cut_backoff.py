"""Whoever is cut off again and again waits longer and longer."""

from __future__ import annotations

import pytest

from schemas.transport.connection_limits import (
    FIRST_DELAY_S,
    FORGET_AFTER_S,
    FREE_CUTS,
    MAX_DELAY_S,
    ReconnectBackoff,
)

PORT, OTHER_PORT = "ones-1", "ones-2"
ADA, BOB = b"ada", b"bob"


class Held(ReconnectBackoff):
    """One whose time stands still."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(lambda: self.now)

    def cut_times(self, count: int, port: str = PORT) -> None:
        for _ in range(count):
            self.cut(port, ADA)


@pytest.mark.parametrize(
    ("cuts", "wait_s"),
    [
        (0, 0.0),
        (FREE_CUTS, 0.0),
        (FREE_CUTS + 1, FIRST_DELAY_S),
        (FREE_CUTS + 2, 2 * FIRST_DELAY_S),
        (FREE_CUTS + 4, 8 * FIRST_DELAY_S),
        (FREE_CUTS + 2000, MAX_DELAY_S),
    ],
)
def test_each_cut_beyond_the_first_ones_doubles_the_time(cuts: int, wait_s: float) -> None:
    backoff = Held()
    backoff.cut_times(cuts)

    assert backoff.left_s(PORT, ADA) == wait_s
    backoff.now += wait_s
    assert backoff.left_s(PORT, ADA) == 0.0


def test_nobody_else_waits_and_nobody_at_another_port() -> None:
    backoff = Held()
    backoff.cut_times(FREE_CUTS + 3)
    backoff.cut(PORT, b"")  # of whom nobody knows whose it was

    found = [backoff.left_s(*who) for who in ((PORT, BOB), (OTHER_PORT, ADA), (PORT, b""))]

    assert found == [0.0, 0.0, 0.0]


def test_after_some_time_without_a_cut_all_begins_anew() -> None:
    backoff = Held()
    backoff.cut_times(FREE_CUTS + 8)
    backoff.now += FORGET_AFTER_S

    backoff.cut_times(FREE_CUTS)

    assert backoff.left_s(PORT, ADA) == 0.0


def test_a_wait_is_told_of_once_for_each_cut() -> None:
    backoff = Held()
    backoff.cut_times(FREE_CUTS + 1)
    told = [backoff.first_refusal(PORT, ADA) for _ in range(2)]
    backoff.cut_times(1)

    assert [*told, backoff.first_refusal(PORT, ADA)] == [True, False, True]


def test_a_port_that_is_gone_is_forgotten() -> None:
    backoff = Held()
    backoff.cut_times(FREE_CUTS + 3)
    backoff.cut_times(FREE_CUTS + 3, port=OTHER_PORT)

    backoff.port_closed(PORT)

    assert (backoff.left_s(PORT, ADA), backoff.left_s(OTHER_PORT, ADA)) == (0.0, 4 * FIRST_DELAY_S)
