"""Asks the policy as a controller does: when the core wants a plan, in rounds or at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Final

from numpy.random import default_rng

from controlplane.core.inputs import PlanProposed
from controlplane.core.plan_check import difference
from controlplane.core.reactor import Reactor
from controlplane.policy.api import (
    Budget,
    ClusterView,
    EpochSeen,
    Plan,
    PlanTaken,
    Policy,
    PolicyEvent,
    StartForecast,
    StepsSeen,
)
from controlplane.sim.engine.event_queue import AFTER, LAST, Kernel, PlannerOptions
from schemas.ids import JobId, Seconds

MAX_AGAIN: Final = 100  # questions at one time: a policy that never comes to rest
RETRY_S: Final = 1.0  # until such a policy is asked again
ROUNDING: Final = 1e-9  # of a round: a time so little behind its beginning is at its beginning


class SimulatedPlanner:
    """Takes the place of the service's: same view, same difference, same events."""

    def __init__(
        self,
        kernel: Kernel,
        reactor: Reactor,
        policy: Policy,
        handle: Callable[[PlanProposed], None],
        options: PlannerOptions,
        *,
        hear: Callable[[Mapping[JobId, StartForecast], Seconds], None] | None = None,
    ) -> None:
        """Begin with no question asked.

        Args:
            options: when it is asked, and how much it may think.
            hear: takes what plans expect of the starts of waiting jobs; None: nobody does.
        """
        self.decisions_ms: list[float] = []  # real time that each answer took
        self._kernel = kernel
        self._reactor = reactor
        self._policy = policy
        self._handle = handle
        self._options = options
        self._hear = hear
        self._asked_at = -math.inf  # the last question
        self._asked_then = 0  # questions at that time
        self._next_at = math.inf  # the next question
        self._answer_due = False  # an answer is on its way
        self._ask_after_it = False  # and another question follows
        self._batches_due = False  # a job told something new at this moment

    def observe(self, event: PolicyEvent) -> None:
        """Let the policy take in what happened.

        Args:
            event: of the present moment of virtual time.
        """
        self._policy.observe(event, self._kernel.now)
        news = isinstance(event, EpochSeen | StepsSeen)
        if news and self._options.rebatches and not self._batches_due:
            self._batches_due = True
            self._kernel.call_at(self._kernel.now, self._ask_for_batches, priority=AFTER)

    def ask(self, at: float | None = None, *, can_wait: bool = False) -> None:
        """A plan is wanted.

        In a cluster a search hears of every epoch, and thinks all the time; here each question
        costs real time, and most epochs change little. Some policies do not look at epochs at all.

        Args:
            at: when, virtual seconds; None: now.
            can_wait: an epoch ended: the question waits for others to join it.
        """
        options, now = self._options, self._kernel.now
        if can_wait and not options.asks_after_epochs:
            return
        when = now if at is None else max(at, now)
        if can_wait:
            when = max(when, self._asked_at + options.think_s)
        if options.round_s > 0.0:
            when = math.ceil(when / options.round_s - ROUNDING) * options.round_s
            if self._kernel.priority == AFTER:  # this round is over
                when = max(when, now + options.round_s)
        if when < self._next_at:
            self._next_at = when
            self._kernel.call_at(when, self._question, when, priority=LAST)

    def _ask_for_batches(self) -> None:
        """Let jobs go on with other batches on the slots that they have; that stalls nobody.

        A whole plan that is on its way, or was made just now, has batches of its own.
        """
        self._batches_due = False
        now = self._kernel.now
        if self._answer_due or self._asked_at == now:
            return
        plan = self._policy.batches(self._reactor.view(), now)
        changes = difference(plan, self._reactor.state, now, whole=False)
        if not changes.empty:
            self._handle(PlanProposed(plan=changes, stats=None))

    def _question(self, when: float) -> None:
        if when != self._next_at:
            return  # an earlier one took its place
        self._next_at = math.inf
        if self._answer_due:
            self._ask_after_it = True
            return
        now = self._kernel.now
        self._asked_then = self._asked_then + 1 if self._asked_at == now else 1
        self._asked_at = now
        if self._asked_then > MAX_AGAIN:
            self.ask(now + RETRY_S)
            return
        plan = self._decide(self._reactor.view())
        if plan.starts and self._hear is not None:
            self._hear(plan.starts, now)
        if plan.wake_at is not None and plan.wake_at > now:
            self.ask(plan.wake_at)
        self._propose(difference(plan, self._reactor.state, now))

    def _decide(self, view: ClusterView) -> Plan:
        """Let the policy think and answer, and measure how long that takes."""
        now, options = self._kernel.now, self._options
        began = time.perf_counter()
        if options.generations:
            rng = default_rng((options.seed, view.version))
            self._policy.improve(view, Budget(generations=options.generations), rng, now)
        plan = self._policy.plan(view, now)
        self.decisions_ms.append((time.perf_counter() - began) * 1000.0)
        return plan

    def _propose(self, changes: Plan) -> None:
        """Take what changes to the core, when the answer would be there."""
        if changes.empty:
            return
        stats = self._policy.stats() if self._options.generations else None
        proposed = PlanProposed(plan=changes, stats=stats)
        if self._options.latency_s > 0.0:
            self._answer_due = True
            self._kernel.call_at(self._kernel.now + self._options.latency_s, self._answer, proposed)
        else:
            self._answer(proposed)

    def _answer(self, proposed: PlanProposed) -> None:
        self._answer_due = False
        self._handle(proposed)
        state = self._reactor.state
        left = [name for name in state.active if state.jobs[name].group is None]
        slots = {name: tuple(placed) for name, placed in proposed.plan.local_batch.items()}
        self.observe(PlanTaken(waiting=tuple(left), slots=slots))
        if self._ask_after_it:
            self._ask_after_it = False
            self.ask()
