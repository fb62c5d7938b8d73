"""The search process, a child: `python -P -m controlplane.service.planner.search_process`.

Messages come on standard input and go to standard output. It ends when its input does, so it
never outlives the controller that it thinks for.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from typing import Final

from numpy.random import default_rng
from setproctitle import setproctitle

from controlplane.policy.api import Budget, ClusterView, Plan, Policy, StepsSeen
from controlplane.policy.registry import make
from controlplane.service.planner.search_messages import (
    TO_SEARCH,
    Answer,
    Ask,
    Batches,
    Begin,
    Converged,
    Frames,
    FromSearch,
    Observed,
    Ready,
    ToSearch,
    ViewDelta,
    WholeView,
    apply_delta,
    frame,
)
from schemas.errors import OnesError
from schemas.ids import Seconds

READ_BYTES: Final = 1 << 20
TELEMETRY_S: Final = 0.5  # steps alone wake the search at most so often
BATCHES_S: Final = 0.05  # after telemetry, batches are chosen again where jobs are
NEVER: Final = float("inf")
PUBLISH_S: Final = 0.25  # something better is proposed at most so often
NICE: Final = 5  # training and the controller come first
ONE: Final = Budget(steps=1)  # then look whether somebody asks


class SearchProcess:
    """Answers questions at once, and thinks on while nobody asks and there is something to find.

    Args:
        seed: of its random draws; each question begins a stream of its own.
        source: file descriptor that messages come from.
        sink: file descriptor that answers go to.
    """

    def __init__(self, policy: Policy, seed: int, source: int, sink: int) -> None:
        self._policy = policy
        self._seed = seed
        self._source, self._sink = source, sink
        self._frames = Frames()
        self._view: ClusterView | None = None
        self._clock = 0.0  # the controller's time less ours
        self._thinking = False
        self._think_at = NEVER  # monotonic; when telemetry alone wakes the search
        self._batches_at = NEVER  # the same, when it has batches chosen
        self._answered = Plan(based_on=0)
        self._answered_at = 0.0
        self._rng = default_rng(seed)

    def run(self) -> None:
        """Work until the input ends."""
        while True:
            if select.select([self._source], [], [], self._wait_s())[0]:
                data = os.read(self._source, READ_BYTES)
                if not data:
                    return
                for body in self._frames.feed(data):
                    self._receive(TO_SEARCH.decode(body))
            elif self._view is None:
                continue
            elif time.monotonic() >= self._batches_at:
                self._choose_batches(self._view)
            elif self._thinking or time.monotonic() >= self._think_at:
                self._think(self._view)

    def _wait_s(self) -> float | None:
        """Until there is something to do; None: until somebody says something."""
        due = min(self._think_at, self._batches_at)
        if self._view is None or (not self._thinking and due == NEVER):
            return None
        return 0.0 if self._thinking else max(0.0, due - time.monotonic())

    def _choose_batches(self, view: ClusterView) -> None:
        """Whole plans are dear, and seldom read while the search thinks: a batch need not wait."""
        self._batches_at = NEVER
        plan = self._policy.batches(view, Seconds(time.monotonic() + self._clock))
        if plan.local_batch:
            self._send(Batches(plan=plan))

    def _receive(self, message: ToSearch) -> None:
        match message:
            case WholeView(view=view):
                self._view = view
            case ViewDelta() if self._view is not None:
                self._view = apply_delta(self._view, message)
            case Observed(event=event, at=at):
                self._clock = at - time.monotonic()
                self._policy.observe(event, at)
                if not isinstance(event, StepsSeen):
                    self._thinking = True
                    return
                self._think_at = min(self._think_at, time.monotonic() + TELEMETRY_S)
                self._batches_at = min(self._batches_at, time.monotonic() + BATCHES_S)
            case Ask(number=number, now=now) if self._view is not None:
                self._clock = now - time.monotonic()
                self._rng = default_rng((self._seed, self._view.version))
                began = time.perf_counter()
                plan = self._policy.plan(self._view, now)
                self._answer(number, plan, time.perf_counter() - began)
                self._thinking = True
            case _:
                pass  # before the first view there is nothing to answer

    def _think(self, view: ClusterView) -> None:
        self._think_at = NEVER
        now = Seconds(time.monotonic() + self._clock)
        self._thinking = self._policy.improve(view, ONE, self._rng, now)
        if self._thinking and time.monotonic() - self._answered_at < PUBLISH_S:
            return
        began, self._answered_at = time.perf_counter(), time.monotonic()
        plan = self._policy.plan(view, now)
        if _says_something_else(plan, self._answered):
            self._answer(0, plan, time.perf_counter() - began)
        elif not self._thinking:
            self._send(Converged(stats=self._policy.stats()))

    def _answer(self, number: int, plan: Plan, took_s: float) -> None:
        self._answered, self._batches_at = plan, NEVER  # it has batches of its own
        self._answered_at = time.monotonic()
        stats = self._policy.stats()
        self._send(Answer(number=number, plan=plan, stats=stats.in_ms(took_s)))

    def _send(self, message: FromSearch) -> None:
        data = memoryview(frame(message))
        while data:
            data = data[os.write(self._sink, data) :]


def _says_something_else(plan: Plan, before: Plan) -> bool:
    """Whether any job would be treated in another way; reasons alone are no news."""
    return (
        plan.local_batch != before.local_batch
        or plan.promised != before.promised
        or plan.rejected.keys() != before.rejected.keys()
    )


def main() -> None:
    """Wait for the first message, learn what it tells, and work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides when to end
    with contextlib.suppress(OSError):
        os.nice(NICE)
    source, sink = sys.stdin.fileno(), os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a stray print must not break the stream
    head = _read_exactly(source, 4)
    begin = TO_SEARCH.decode(_read_exactly(source, int.from_bytes(head, "big")))
    if not isinstance(begin, Begin):
        raise SystemExit(2)
    setproctitle(f"ones: search {begin.policy}")
    try:
        policy = make(begin.policy, begin.options)
    except OnesError as error:  # it was in order when the controller started
        raise SystemExit(f"search process: {error}") from None
    for at, event in begin.history:
        policy.observe(event, at)
    os.write(sink, frame(Ready()))
    with contextlib.suppress(BrokenPipeError):
        SearchProcess(policy, begin.seed, source, sink).run()


def _read_exactly(source: int, many: int) -> bytes:
    data = b""
    while len(data) < many:
        piece = os.read(source, many - len(data))
        if not piece:
            raise SystemExit(0)
        data += piece
    return data


if __name__ == "__main__":
    main()
