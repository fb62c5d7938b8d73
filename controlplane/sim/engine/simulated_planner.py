"""Asks the policy as a controller does: when the core wants a plan, in rounds or at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from numpy.random import default_rng

from controlplane.core.commit import difference
from controlplane.core.events import PlanProposed
from controlplane.core.reactor import Reactor
from controlplane.policy.api import Budget, PlanTaken, Policy, PolicyEvent
from controlplane.sim.engine.kernel import AFTER, LAST, Kernel

MAX_AGAIN: Final = 100  # questions at one time: a policy that never comes to rest


class Planner:
    """Takes the place of the service's: same view, same difference, same events."""

    def __init__(
        self,
        kernel: Kernel,
        reactor: Reactor,
        policy: Policy,
        take: Callable[[PlanProposed], None],
        *,
        round_s: float,
        latency_s: float,
        generations: int,
        think_s: float,
        epochs: bool,
        seed: int,
    ) -> None:
        self._kernel = kernel
        self._reactor = reactor
        self._policy = policy
        self._take = take
        self._round_s = round_s
        self._latency_s = latency_s
        self._generations = generations
        self._think_s = think_s
        self._thought_at = -math.inf
        self._minds_epochs = epochs
        self._seed = seed
        self._asked_for = math.inf  # the next question
        self._away = False  # an answer is on its way
        self._again = False  # and another question follows
        self._last = (-1.0, 0)  # time of the last question, and how many there were at it
        self.took_ms: list[float] = []

    def observe(self, event: PolicyEvent) -> None:
        """Tell the policy."""
        self._policy.observe(event, self._kernel.now)

    def ask(self, at: float | None = None, *, leisurely: bool = False) -> None:
        """A plan is wanted, now or later; a leisurely question waits for others to join it.

        In a cluster a search hears of every epoch, and thinks all the time; here each question
        costs real time, and most epochs change little. Some policies do not look at epochs at all.
        """
        if leisurely and not self._minds_epochs:
            return
        when = self._kernel.now if at is None else max(at, self._kernel.now)
        if leisurely:
            when = max(when, self._thought_at + self._think_s)
        if self._round_s > 0.0:
            when = math.ceil(when / self._round_s - 1e-9) * self._round_s
            if self._kernel.urgency == AFTER:  # this round is over
                when = max(when, self._kernel.now + self._round_s)
        if when < self._asked_for:
            self._asked_for = when
            self._kernel.at(when, self._question, when, urgency=LAST)

    def _question(self, when: float) -> None:
        if when != self._asked_for:
            return  # an earlier one took its place
        self._asked_for = math.inf
        if self._away:
            self._again = True
            return
        now = self._kernel.now
        times = self._last[1] + 1 if self._last[0] == now else 1
        self._last, self._thought_at = (now, times), now
        if times > MAX_AGAIN:  # it never comes to rest: go on a little later
            self.ask(now + 1.0)
            return
        state, view = self._reactor.state, self._reactor.view()
        began = time.perf_counter()
        if self._generations:
            rng = default_rng((self._seed, view.version))
            self._policy.improve(view, Budget(generations=self._generations), rng, now)
        plan = self._policy.plan(view, now)
        self.took_ms.append((time.perf_counter() - began) * 1000.0)
        if plan.wake_at is not None and plan.wake_at > now:
            self.ask(plan.wake_at)
        changes = difference(plan, state, now)
        if not changes.local_batch:
            return
        stats = self._policy.stats() if self._generations else None
        proposed = PlanProposed(plan=changes, stats=stats)
        if self._latency_s > 0.0:
            self._away = True
            self._kernel.at(now + self._latency_s, self._answer, proposed)
        else:
            self._answer(proposed)

    def _answer(self, proposed: PlanProposed) -> None:
        self._away = False
        self._take(proposed)
        state = self._reactor.state
        left = [name for name in state.active if state.jobs[name].group is None]
        self.observe(PlanTaken(waiting=tuple(left)))
        if self._again:
            self._again = False
            self.ask()
