"""Simulated planner: requests plans from the policy in rounds or at once, as a controller does."""

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

MAX_REQUESTS_AT_ONCE: Final = 100  # at the same time; a policy that needs more does not converge
RETRY_S: Final = 1.0  # delay of the next request to a policy that does not converge
ROUND_TOLERANCE: Final = 1e-9  # in rounds; a time this close after a boundary is moved to it


class SimulatedPlanner:
    """Replacement for the service's planner, with the same view, plan difference and events."""

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
        """Create a planner; `handle` receives each plan, `hear` the forecasts of starts in it."""
        self.decisions_ms: list[float] = []  # real time that each plan took
        self._kernel = kernel
        self._reactor = reactor
        self._policy = policy
        self._handle = handle
        self._options = options
        self._record_starts = hear
        self._requested_at = -math.inf
        self._requests_then = 0  # number of requests at `_requested_at`
        self._next_request_at = math.inf
        self._plan_pending = False
        self._request_after_plan = False
        self._batches_scheduled = False

    def observe(self, event: PolicyEvent) -> None:
        """Pass an event to the policy, with the current virtual time."""
        self._policy.observe(event, self._kernel.now)
        news = isinstance(event, EpochSeen | StepsSeen)
        if news and self._options.rebatches and not self._batches_scheduled:
            self._batches_scheduled = True
            self._kernel.call_at(self._kernel.now, self._request_batches, priority=AFTER)

    def ask(self, at: float | None = None, *, can_wait: bool = False) -> None:
        """Request a plan at virtual second `at`, or now.

        In the simulator each request costs real time, and most epochs change little. Requests after
        an epoch (`can_wait`) are therefore combined; if the policy ignores epochs, they are
        dropped.
        """
        options, now = self._options, self._kernel.now
        if can_wait and not options.asks_after_epochs:
            return
        when = now if at is None else max(at, now)
        if can_wait:
            when = max(when, self._requested_at + options.think_s)
        if options.round_s > 0.0:
            when = math.ceil(when / options.round_s - ROUND_TOLERANCE) * options.round_s
            if self._kernel.priority == AFTER:  # this round is over
                when = max(when, now + options.round_s)
        if when < self._next_request_at:
            self._next_request_at = when
            self._kernel.call_at(when, self._request_plan, when, priority=LAST)

    def _request_batches(self) -> None:
        """Request new batches for jobs on their current slots, unless a complete plan is due."""
        self._batches_scheduled = False
        now = self._kernel.now
        if self._plan_pending or self._requested_at == now:
            return
        plan = self._policy.batches(self._reactor.view(), now)
        changes = difference(plan, self._reactor.state, now, whole=False)
        if not changes.empty:
            self._handle(PlanProposed(plan=changes, stats=None))

    def _request_plan(self, when: float) -> None:
        if when != self._next_request_at:
            return  # replaced by an earlier request
        self._next_request_at = math.inf
        if self._plan_pending:
            self._request_after_plan = True
            return
        now = self._kernel.now
        self._requests_then = self._requests_then + 1 if self._requested_at == now else 1
        self._requested_at = now
        if self._requests_then > MAX_REQUESTS_AT_ONCE:
            self.ask(now + RETRY_S)
            return
        plan = self._decide(self._reactor.view())
        if plan.starts and self._record_starts is not None:
            self._record_starts(plan.starts, now)
        if plan.wake_at is not None and plan.wake_at > now:
            self.ask(plan.wake_at)
        self._propose(difference(plan, self._reactor.state, now))

    def _decide(self, view: ClusterView) -> Plan:
        now, options = self._kernel.now, self._options
        began = time.perf_counter()
        if options.generations:
            rng = default_rng((options.seed, view.version))
            self._policy.improve(view, Budget(generations=options.generations), rng, now)
        plan = self._policy.plan(view, now)
        self.decisions_ms.append((time.perf_counter() - began) * 1000.0)
        return plan

    def _propose(self, changes: Plan) -> None:
        if changes.empty:
            return
        stats = self._policy.stats() if self._options.generations else None
        proposed = PlanProposed(plan=changes, stats=stats)
        if self._options.latency_s > 0.0:
            self._plan_pending = True
            when = self._kernel.now + self._options.latency_s
            self._kernel.call_at(when, self._deliver_plan, proposed)
        else:
            self._deliver_plan(proposed)

    def _deliver_plan(self, proposed: PlanProposed) -> None:
        self._plan_pending = False
        self._handle(proposed)
        state = self._reactor.state
        left = [name for name in state.active if state.jobs[name].group is None]
        slots = {name: tuple(placed) for name, placed in proposed.plan.local_batch.items()}
        self.observe(PlanTaken(waiting=tuple(left), slots=slots))
        if self._request_after_plan:
            self._request_after_plan = False
            self.ask()
