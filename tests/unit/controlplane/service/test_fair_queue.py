"""Requests of a user wait in the queue of that user; refusals are short."""

from __future__ import annotations

import pytest

from controlplane.service.api import fair_queue
from controlplane.service.api.fair_queue import (
    BURST_S,
    LOOP_PERCENT,
    MAX_TEXT_CHARACTERS,
    POLLS,
    QUEUED,
    QUEUED_BYTES,
    REFUSED,
    SENT_TOKEN_BYTES,
    TOKEN_BYTES,
    UNDER_WAY,
    FairQueue,
    failure_reply,
)
from schemas.codec import encode
from schemas.errors import BadFieldError, UnavailableError, UnknownJobError
from schemas.wire.client import Failed
from tests.support.loop_clock import Clock

PER_S = 10.0
BURST = int(PER_S * BURST_S)


class Shares(FairQueue[str]):
    def __init__(self) -> None:
        self.clock, self.begun = Clock(), list[str]()
        super().__init__(
            self.begun.append, lambda: PER_S, clock=lambda: self.clock.now, later=self.clock.later
        )

    def answer_at_once(self, busy_s: float = 0.0) -> None:
        """Let each request end as soon as it starts."""

        def start(user: str) -> None:
            self.begun.append(user)
            self.ended(user, busy_s=busy_s)

        self._start = start

    def flood(self, user: str, requests: int, size: int = 1) -> int:
        """So many at once; how many were taken."""
        taken = 0
        for _ in range(requests):
            try:
                self.put(user, user, size)
            except UnavailableError:
                continue
            taken += 1
        return taken

    def answer(self, user: str, requests: int, reply_bytes: int = 0) -> None:
        for _ in range(requests):
            self.ended(user, reply_bytes)


def test_a_request_of_another_user_starts_next() -> None:
    shares = Shares()
    shares.flood("bob", 1000)
    shares.clock.turn()

    shares.put("ann", "ann", 1)
    shares.clock.turn()

    assert shares.begun == ["bob", "bob", "ann"]


def test_no_request_starts_after_the_end() -> None:
    shares = Shares()
    shares.flood("bob", 10)

    shares.close()
    shares.clock.run(60.0)

    assert shares.begun == []


def test_requests_of_a_user_under_way_are_bounded() -> None:
    shares = Shares()
    shares.flood("bob", UNDER_WAY + 20)
    shares.clock.run(60.0)
    assert len(shares.begun) == UNDER_WAY

    shares.put("ann", "ann", 1)
    shares.clock.run()
    shares.answer("bob", 5)
    shares.clock.run()

    assert shares.begun[UNDER_WAY:] == ["ann"] + ["bob"] * 5


def test_a_flood_is_limited_to_its_rate_without_delaying_another_user() -> None:
    shares = Shares()
    shares.answer_at_once()
    shares.flood("bob", 1000)

    shares.clock.run()
    assert len(shares.begun) == BURST
    shares.clock.run(10.0)
    assert abs(len(shares.begun) - BURST - 10 * PER_S) <= 2
    shares.put("ann", "ann", 1)
    shares.clock.run()

    assert shares.begun[-1] == "ann"


def test_large_replies_cost_as_much_as_many_requests() -> None:
    shares = Shares()
    shares.put("bob", "bob", 1)
    shares.clock.run()
    shares.answer("bob", 1, reply_bytes=int((BURST + PER_S) * TOKEN_BYTES))

    shares.put("bob", "bob", 1)
    shares.clock.run(0.9)
    assert shares.begun == ["bob"]
    shares.clock.run(0.5)

    assert shares.begun == ["bob", "bob"]


def test_slow_replies_use_a_bounded_share_of_the_loop() -> None:
    shares = Shares()
    shares.answer_at_once(busy_s=1.0)
    shares.flood("bob", 100)

    shares.clock.run()
    at_once = len(shares.begun)
    shares.clock.run(40.0)

    assert at_once == BURST_S * LOOP_PERCENT / 100
    assert abs(len(shares.begun) - at_once - 40.0 * LOOP_PERCENT / 100) <= 2


def test_large_requests_cost_more_tokens() -> None:
    shares = Shares()
    shares.answer_at_once()

    shares.flood("bob", 60, SENT_TOKEN_BYTES)
    shares.clock.run()

    assert len(shares.begun) == BURST // 2


@pytest.mark.parametrize("size", [1, QUEUED_BYTES // 10])
def test_queued_requests_of_a_user_are_bounded(size: int) -> None:
    shares = Shares()

    taken = shares.flood("bob", QUEUED + 50, size)

    assert taken == min(QUEUED, QUEUED_BYTES // size)
    with pytest.raises(UnavailableError, match=f"{taken} of your requests are already queued"):
        shares.put("bob", "bob", size)
    shares.put("ann", "ann", size)


def test_a_user_floods_from_many_refusals_until_the_queue_is_empty() -> None:
    shares = Shares()
    shares.answer_at_once()
    shares.flood("bob", QUEUED + REFUSED)
    assert not shares.floods("bob")

    shares.flood("bob", 1)

    assert shares.floods("bob")
    assert not shares.floods("ann")
    shares.clock.run(1.0)
    assert shares.flood("bob", 1) == 1
    assert shares.floods("bob")
    shares.clock.run(QUEUED / PER_S)
    assert shares.flood("bob", 1) == 1
    assert not shares.floods("bob")


def test_waiting_requests_do_not_count_as_under_way() -> None:
    shares = Shares()
    waiting = []
    for _ in range(UNDER_WAY + 10):
        shares.put("bob", "bob", 1)
        shares.clock.run(1.0)
        wait = shares.waits("bob", 30.0)
        wait.__enter__()
        waiting.append(wait)

    shares.put("bob", "last", 1)
    shares.clock.run(1.0)

    assert shares.begun[-1] == "last"
    for wait in waiting:
        wait.__exit__(None, None, None)
    shares.answer("bob", len(waiting) + 1)
    shares.clock.run(100.0)
    shares.put("ann", "ann", 1)
    shares.clock.run()
    assert "bob" not in shares._users


def test_waiting_requests_of_a_user_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fair_queue, "POLLS", 2)
    shares = Shares()

    with shares.waits("bob", 30.0), shares.waits("bob", 30.0):
        with pytest.raises(UnavailableError, match="2 of your requests are waiting"):
            shares.waits("bob", 30.0).__enter__()
        with shares.waits("bob", 0.0), shares.waits("ann", 30.0):
            pass
    with shares.waits("bob", 30.0):
        pass
    assert POLLS > 2


def test_a_refusal_names_problem_and_field() -> None:
    error = BadFieldError("slots: 3 is outside", "choose 1 to 2", "slots")

    assert failure_reply(error) == Failed(
        code="bad_field", message="slots: 3 is outside", hint="choose 1 to 2", field="slots"
    )


def test_a_refusal_of_long_text_is_short() -> None:
    error = UnknownJobError("\0" * (4 << 20))

    assert len(encode(failure_reply(error))) < 2 * MAX_TEXT_CHARACTERS
