"""Search process, a child of the controller.

Run as `python -P -m controlplane.service.planner.search_process`. The process reads messages from
standard input, writes messages to standard output, and exits at the end of the input, so that it
cannot outlive the controller.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path
from typing import Final

from numpy.random import default_rng
from setproctitle import setproctitle

from controlplane.policy.api import Budget, ClusterView, Plan, Policy, StepsSeen
from controlplane.policy.registry import make
from controlplane.service import pipes
from controlplane.service.planner import search_messages as messages
from schemas.errors import OnesError
from schemas.host.memory import limit_memory
from schemas.ids import Seconds

READ_BYTES: Final = 1 << 20
TELEMETRY_DELAY_S: Final = 0.5  # telemetry wakes the search at most this often
BATCHES_DELAY_S: Final = 0.05  # from new telemetry to the next choice of batches
NEVER: Final = float("inf")
PUBLISH_INTERVAL_S: Final = 0.25  # between unrequested plans
NICENESS: Final = 5  # training and the controller take precedence
ONE_STEP: Final = Budget(steps=1)  # before looking for messages again


class SearchProcess:
    """Message loop of the search process. It improves the plan while no message waits.

    Each request draws from a generator seeded with `seed` and the version of the view.
    """

    def __init__(self, policy: Policy, seed: int, source: int, sink: int) -> None:
        self._policy = policy
        self._seed = seed
        self._source, self._sink = source, sink
        self._frames = pipes.FrameDecoder()
        self._view: ClusterView | None = None
        self._clock_offset = 0.0  # the controller's time minus the time of this process
        self._searching = False
        self._search_at = NEVER  # monotonic time at which telemetry wakes the search
        self._batches_at = NEVER  # monotonic time at which batches are chosen
        self._last_plan = Plan(based_on=0)
        self._last_plan_at = 0.0
        self._improve_s = 0.0  # time of the search since the last plan
        self._rng = default_rng(seed)

    def run(self) -> None:
        """Handle messages and search until the end of the input."""
        while True:
            if select.select([self._source], [], [], self._timeout_s())[0]:
                data = os.read(self._source, READ_BYTES)
                if not data:
                    return
                for body in self._frames.feed(data):
                    self._receive(messages.TO_SEARCH.decode(body))
            elif self._view is None:
                continue
            elif time.monotonic() >= self._batches_at:
                self._choose_batches(self._view)
            elif self._searching or time.monotonic() >= self._search_at:
                self._search(self._view)

    def _timeout_s(self) -> float | None:
        """Return the seconds until the next work is due, or None to wait for the next message."""
        due = min(self._search_at, self._batches_at)
        if self._view is None or (not self._searching and due == NEVER):
            return None
        return 0.0 if self._searching else max(0.0, due - time.monotonic())

    def _choose_batches(self, view: ClusterView) -> None:
        """Send new batch sizes alone. Full plans are slow, and seldom read during the search."""
        self._batches_at = NEVER
        plan = self._policy.batches(view, Seconds(time.monotonic() + self._clock_offset))
        if plan.local_batch:
            self._send(messages.BatchesChosen(plan=plan))

    def _receive(self, message: messages.ToSearch) -> None:
        match message:
            case messages.FullView(view=view):
                self._view = view
            case messages.ViewDelta() if self._view is not None:
                self._view = messages.apply_delta(self._view, message)
            case messages.EventObserved(event=event, at=at):
                self._clock_offset = at - time.monotonic()
                self._policy.observe(event, at)
                if not isinstance(event, StepsSeen):
                    self._searching = True
                    return
                self._search_at = min(self._search_at, time.monotonic() + TELEMETRY_DELAY_S)
                self._batches_at = min(self._batches_at, time.monotonic() + BATCHES_DELAY_S)
            case messages.FindPlan(number=number, now=now) if self._view is not None:
                self._clock_offset = now - time.monotonic()
                self._rng = default_rng((self._seed, self._view.version))
                began = time.perf_counter()
                plan = self._policy.plan(self._view, now)
                self._send_plan(number, plan, time.perf_counter() - began)
                self._searching = True
            case _:
                pass  # before the first view there is nothing to plan

    def _search(self, view: ClusterView) -> None:
        self._search_at = NEVER
        now = Seconds(time.monotonic() + self._clock_offset)
        began = time.perf_counter()
        self._searching = self._policy.improve(view, ONE_STEP, self._rng, now)
        self._improve_s += time.perf_counter() - began
        if self._searching and time.monotonic() - self._last_plan_at < PUBLISH_INTERVAL_S:
            return
        began, self._last_plan_at = time.perf_counter(), time.monotonic()
        plan = self._policy.plan(view, now)
        if _decides_otherwise(plan, self._last_plan):
            self._send_plan(0, plan, time.perf_counter() - began)
        elif not self._searching:
            self._send(messages.Converged(stats=self._policy.stats()))

    def _send_plan(self, number: int, plan: Plan, took_s: float) -> None:
        self._last_plan, self._batches_at = plan, NEVER  # the plan contains batches
        self._last_plan_at = time.monotonic()
        improve_s, self._improve_s = 0.0 if number else self._improve_s, 0.0
        stats = self._policy.stats().in_ms(took_s, improve_s)
        self._send(messages.PlanFound(number=number, plan=plan, stats=stats))

    def _send(self, message: messages.FromSearch) -> None:
        data = memoryview(pipes.encode_frame(message))
        while data:
            data = data[os.write(self._sink, data) :]


def _decides_otherwise(plan: Plan, before: Plan) -> bool:
    """True if the plans treat some job differently. Their reasons are not compared."""
    return (
        plan.local_batch != before.local_batch
        or plan.promised != before.promised
        or plan.rejected.keys() != before.rejected.keys()
    )


def main() -> None:
    """Start the policy that the first message names, observe the history, and serve requests."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides when to stop
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    source, sink = os.dup(0), os.dup(1)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # the policy must not read the controller's messages
    os.dup2(2, 1)  # a stray print must not corrupt the stream
    limit_memory()
    head = _read_exactly(source, 4)
    start = messages.TO_SEARCH.decode(_read_exactly(source, int.from_bytes(head, "big")))
    if not isinstance(start, messages.StartSearch):
        raise SystemExit(2)
    setproctitle(f"ones: search {start.policy}")
    try:
        policy = make(start.policy, start.options)  # valid when the controller started
        for at, event in start.history:
            policy.observe(event, at)
        os.write(sink, pipes.encode_frame(messages.Ready()))
        with contextlib.suppress(BrokenPipeError):
            SearchProcess(policy, start.seed, source, sink).run()
    except OnesError as error:
        raise SystemExit(f"search process: {error}") from None


def _read_exactly(source: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.read(source, count - len(data))
        if not piece:
            raise SystemExit(0)
        data += piece
    return data


if __name__ == "__main__":
    main()
