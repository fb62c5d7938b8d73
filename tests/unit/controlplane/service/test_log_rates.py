"""Output of a job that is beyond its rate waits on its nodes; nobody else's does."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from controlplane.service import log_relay
from controlplane.service.log_relay import BURST_S, LEAST_CREDIT, MOST_CREDIT, LogRates, StreamKey
from tests.support.loop_clock import Clock

PER_S = float(4 << 20)
BURST = PER_S * BURST_S
NOISY, QUIET = ("a-1", "log"), ("b-2", "log")


class Shippers(LogRates[str]):
    """Workers who send all that they have credit for as soon as they have it, for ever."""

    def __init__(self) -> None:
        self.clock, self.sent, self.answered = Clock(), Counter[str](), list[str]()
        self._of: dict[str, StreamKey] = {}
        super().__init__(
            self._answered, lambda: PER_S, clock=lambda: self.clock.now, later=self.clock.later
        )

    def begin(self, of: StreamKey, *workers: str) -> None:
        for worker in workers:
            self._of[worker] = of
            self.answer(of, worker)

    def _answered(self, worker: str, credit: int) -> None:
        assert LEAST_CREDIT <= credit <= MOST_CREDIT
        self.answered.append(worker)
        self.clock.later(0.0, lambda: self._send(worker, credit))

    def _send(self, worker: str, credit: int) -> None:
        self.sent[worker] += credit
        assert self.sent.total() < BURST + 200.0 * PER_S
        self.count_output(self._of[worker], credit)
        self.answer(self._of[worker], worker)


@pytest.mark.parametrize("workers", [1, 64])
def test_a_noisy_job_is_limited_to_its_burst_and_rate(workers: int) -> None:
    shippers = Shippers()
    shippers.begin(NOISY, *(f"r{rank}" for rank in range(workers)))

    shippers.clock.run(100.0)

    most = BURST + 100.0 * PER_S
    assert most - MOST_CREDIT < shippers.sent.total() <= most + workers * MOST_CREDIT


def test_workers_of_a_noisy_job_take_turns() -> None:
    shippers = Shippers()
    shippers.begin(NOISY, *(f"r{rank}" for rank in range(8)))
    shippers.clock.run(2 * BURST_S)
    shippers.answered.clear()

    shippers.clock.run(10.0)

    assert all(one != next_one for one, next_one in pairwise(shippers.answered))
    counts = Counter(shippers.answered).values()
    assert max(counts) - min(counts) <= 1


def test_a_quiet_job_gets_full_credit_at_once() -> None:
    shippers = Shippers()
    shippers.begin(NOISY, *(f"r{rank}" for rank in range(64)))
    shippers.clock.run(2 * BURST_S)
    before = len(shippers.answered)

    shippers.answer(QUIET, "quiet")

    assert shippers.answered[before:] == ["quiet"]
    assert shippers._credit(shippers._streams[QUIET]) == MOST_CREDIT


def test_a_repeated_request_keeps_its_place_and_gets_a_single_reply() -> None:
    shippers = Shippers()
    shippers.count_output(NOISY, int(BURST) + 1)
    for worker in ("r0", "r1", "r0"):
        shippers._of[worker] = NOISY
        shippers.answer(NOISY, worker)
    assert shippers.answered == []

    while len(shippers.answered) < 2:
        shippers.clock.run(0.01)

    assert shippers.answered == ["r0", "r1"]


def test_a_silent_job_regains_its_burst() -> None:
    shippers = Shippers()
    shippers.count_output(NOISY, int(BURST) + 1)
    shippers.clock.run(2 * BURST_S)

    shippers.begin(NOISY, "r0")

    assert shippers.answered == ["r0"]


def test_only_jobs_beyond_their_rate_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_relay, "MAX_STREAMS", 10)
    shippers = Shippers()
    shippers.count_output(NOISY, 2 * int(BURST))
    for number in range(1000):
        shippers.count_output((f"c-{number}", "log"), 1)
        shippers.clock.run(0.001)

    assert len(shippers._streams) <= 11
    assert NOISY in shippers._streams
