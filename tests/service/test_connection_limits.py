"""Limits of each key: open connections, and delays after cuts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schemas.transport import connection_limits
from schemas.transport.connection_limits import (
    FIRST_DELAY_S,
    FORGET_AFTER_S,
    FREE_CUTS,
    MAX_DELAY_S,
    KeyConnections,
    ReconnectBackoff,
)
from tests.support.sizes import examples

PORT, HOST = "ones-1", "10.0.0.7"
ADA, BOB = b"ada", b"bob"


@pytest.fixture(autouse=True)
def _three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS_PER_KEY", 3)


class Port(KeyConnections):
    """One on which time passes with each connection."""

    def __init__(self, *keys: bytes) -> None:
        self.now = 0.0
        super().__init__(lambda: self.now)
        for number, key in enumerate(keys):
            self.opened(number, key)

    def opened(self, descriptor: int, key: bytes, *, host: str = HOST) -> bool:
        self.now += 1.0
        self.record_opened(descriptor, PORT, host)
        return self.admit(PORT, host, key)


def test_the_connections_of_a_key_are_limited_and_logged_once() -> None:
    port = Port()

    assert [port.opened(number, ADA) for number in range(5)] == [True, True, True, False, False]
    assert [port.first_refusal(PORT, ADA) for _ in range(2)] == [True, False]
    assert port.opened(9, BOB)


def test_of_a_port_that_is_closed_nothing_is_left() -> None:
    port = Port(ADA, ADA, ADA)
    port.record_key(0, ADA)

    port.port_closed(PORT)

    assert (port._open, port._silent, port._counts, port._full) == ({}, {}, {}, set())


steps = st.lists(
    st.tuples(
        st.sampled_from(["open", "speak", "close", "knock"]),
        st.integers(0, 7),
        st.sampled_from([ADA, BOB]),
        st.sampled_from([HOST, "10.0.0.8"]),
    ),
    max_size=60,
)


def three(*then: str) -> list[tuple[str, int, bytes, str]]:
    """Three connections of one key are open, then this happens to connections by number."""
    words = [word.split() for word in ("open 0", "open 1", "open 2", *then)]
    return [(what, int(number), BOB if key else ADA, HOST) for what, number, *key in words]


@given(steps)
@example(three("speak 0", "close 0", "open 3", "open 4", "close 4", "close 1", "open 5"))
@example(three("knock 7", "close 7", "open 4"))  # closed before its handshake
@example(three("open 7 bob", "close 7"))
@example(three("open 0", "speak 0") * 5)  # reused descriptors
@settings(max_examples=examples(200))
def test_no_more_connections_are_counted_than_exist(
    steps: list[tuple[str, int, bytes, str]],
) -> None:
    port, there, spoken = Port(), dict[int, bytes](), set[int]()
    for what, number, key, host in steps:
        if what == "open" and port.opened(number, key, host=host):
            there[number] = key
        elif what in {"open", "knock"}:  # refused, or no handshake at all
            port.record_opened(number, PORT, host)
            there.pop(number, None)
        elif what == "speak" and number in there:
            port.record_key(number, there[number])
        elif what == "close":
            port.closed(number)
            there.pop(number, None)
        spoken = spoken - {number} if what != "speak" else spoken | ({number} & set(there))
        counted = Counter({key: count for (_, key), count in port._counts.items()})
        assert counted.total() <= len(port._open)
        assert counted >= Counter(there[each] for each in spoken)
        assert max(counted.values(), default=0) <= 4

    for number, key in there.items():
        port.record_key(number, key)
    for number in list(port._open):
        if number not in there:
            port.closed(number)
    assert port._counts == Counter((PORT, key) for key in there.values())


def test_bytes_are_counted_for_their_key_while_the_connection_is_open() -> None:
    port = Port(ADA, ADA, BOB)
    for number, key in enumerate((ADA, ADA, BOB)):
        port.record_key(number, key)

    assert [port.count_kept_bytes(number, 10) for number in range(3)] == [10, 20, 10]
    port.closed(0)
    assert [port.count_kept_bytes(number, 1) for number in range(3)] == [None, 11, 11]
    port.port_closed(PORT)
    assert not port._kept_bytes


def test_a_connection_cut_within_its_first_message_is_known_by_its_handshake() -> None:
    port = Port()
    port.record_opened(1, PORT, HOST)  # somebody who never shakes hands
    port.opened(2, ADA)

    assert [port.cut(each) for each in (2, 1, 7)] == [ADA, b"", b""]
    assert port._counts.total() == 0


def test_the_sender_is_known_beside_silent_connections() -> None:
    port = Port(BOB, ADA)
    port.record_key(1, ADA)

    assert (port.is_of(1, ADA), port.is_of(1, BOB), port.is_of(7, ADA)) == (True, False, False)
    assert port.cut(1) == ADA
    assert not port.is_of(1, ADA)


def test_a_connection_is_not_cut_for_another_of_its_host() -> None:
    port = Port()
    port.record_opened(1, PORT, HOST)  # shakes hands late
    port.opened(2, ADA)
    port.admit(PORT, HOST, BOB)

    assert port.cut(1) == b""


# --- delays


OTHER_PORT = "ones-2"


class Held(ReconnectBackoff):
    """One whose time stands still."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(lambda: self.now)

    def cut_times(self, count: int, port: str = PORT) -> None:
        for _ in range(count):
            self.cut(port, ADA)


@pytest.mark.parametrize(("cuts", "wait_s"), [
    (0, 0.0),
    (FREE_CUTS, 0.0),
    (FREE_CUTS + 1, FIRST_DELAY_S),
    (FREE_CUTS + 2, 2 * FIRST_DELAY_S),
    (FREE_CUTS + 4, 8 * FIRST_DELAY_S),
    (FREE_CUTS + 2000, MAX_DELAY_S),
])  # fmt: skip
def test_each_cut_beyond_the_first_ones_doubles_the_time(cuts: int, wait_s: float) -> None:
    backoff = Held()
    backoff.cut_times(cuts)

    assert backoff.left_s(PORT, ADA) == wait_s
    backoff.now += wait_s
    assert backoff.left_s(PORT, ADA) == 0.0


def test_after_some_time_without_a_cut_all_begins_anew() -> None:
    backoff = Held()
    backoff.cut_times(FREE_CUTS + 8)
    backoff.now += FORGET_AFTER_S

    backoff.cut_times(FREE_CUTS)

    assert backoff.left_s(PORT, ADA) == 0.0


def test_a_wait_is_logged_once_for_each_cut() -> None:
    backoff = Held()
    backoff.cut_times(FREE_CUTS + 1)
    told = [backoff.first_refusal(PORT, ADA) for _ in range(2)]
    backoff.cut_times(1)

    assert [*told, backoff.first_refusal(PORT, ADA)] == [True, False, True]


def test_other_keys_and_ports_do_not_wait_and_a_closed_port_is_forgotten() -> None:
    backoff = Held()
    backoff.cut_times(FREE_CUTS + 3)
    backoff.cut(PORT, b"")  # the key is not known
    assert [backoff.left_s(*each) for each in ((PORT, BOB), (PORT, b""))] == [0.0, 0.0]
    assert backoff.left_s(OTHER_PORT, ADA) == 0.0
    backoff.cut_times(FREE_CUTS + 3, port=OTHER_PORT)

    backoff.port_closed(PORT)

    assert (backoff.left_s(PORT, ADA), backoff.left_s(OTHER_PORT, ADA)) == (0.0, 4 * FIRST_DELAY_S)
