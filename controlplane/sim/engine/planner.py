"""Simulated planner: requests plans from the policy in rounds or at once, as a controller does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from numpy.random import default_rng

from controlplane.core.inputs import PlanProposed
from controlplane.core.plan_check import difference
from controlplane.core.plan_cycle import PlanCycle
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
from controlplane.policy.sharing.turns import at_once
from controlplane.sim.engine.event_queue import AFTER, LAST, Kernel, PlannerOptions
from schemas.ids import JobId, Seconds

MAX_REQUESTS_AT_ONCE: Final = 100  # at the same time; a policy that needs more does not converge
RETRY_S: Final = 1.0  # delay of the next request to a policy that does not converge
ROUND_TOLERANCE: Final = 1e-9  # in rounds; a time this close after a boundary is moved to it


@dataclass(eq=False)
class SimulatedPlanner:
    """Replacement for the service's planner, with the same view, plan difference and events."""

    kernel: Kernel
    reactor: Reactor
    policy: Policy
    handle: Callable[[PlanProposed], None]  # receives each plan
    options: PlannerOptions
    hear: Callable[[Mapping[JobId, StartForecast], Seconds], None] | None = None  # starts in plans
    on_call: Callable[[Seconds | None], None] | None = None  # called before each call of the policy
    decisions_ms: list[float] = field(default_factory=list)  # real time that each plan took
    _requested_at: float = -math.inf
    _requests_then: int = 0  # number of requests at `_requested_at`
    _next_request_at: float = math.inf
    _plan_pending: bool = False
    _request_after_plan: bool = False
    _batches_scheduled: bool = False

    def __post_init__(self) -> None:
        """Divide the cluster among accounts as a controller does."""
        self._cycle = PlanCycle(lambda: self.reactor, gangs=self.options.gangs)

    def observe(self, event: PolicyEvent) -> None:
        """Pass an event to the policy, with the current virtual time."""
        self._announce_call()
        self.policy.observe(event, self.kernel.now)
        news = isinstance(event, EpochSeen | StepsSeen)
        if news and self.options.rebatches and not self._batches_scheduled:
            self._batches_scheduled = True
            self.kernel.call_at(self.kernel.now, self._request_batches, priority=AFTER)

    def ask(self, at: float | None = None, *, can_wait: bool = False) -> None:
        """Request a plan at virtual second `at`, or now.

        In the simulator each request costs real time, and most epochs change little. Requests after
        an epoch (`can_wait`) are therefore combined; if the policy ignores epochs, they are
        dropped.
        """
        options, now = self.options, self.kernel.now
        if can_wait and not options.asks_after_epochs:
            return
        when = now if at is None else max(at, now)
        if can_wait:
            when = max(when, self._requested_at + options.think_s)
        if options.round_s > 0.0:
            when = math.ceil(when / options.round_s - ROUND_TOLERANCE) * options.round_s
            if self.kernel.priority == AFTER:  # this round is over
                when = max(when, now + options.round_s)
        if when < self._next_request_at:
            self._next_request_at = when
            self.kernel.call_at(when, self._request_plan, when, priority=LAST)

    def _request_batches(self) -> None:
        """Request new batches for jobs on their current slots, unless a complete plan is due."""
        self._batches_scheduled = False
        now = self.kernel.now
        if self._plan_pending or self._requested_at == now:
            return
        self._announce_call()
        plan = self.policy.batches(at_once(self._cycle.view(now)), now)
        changes = difference(self._cycle.merged(plan), self.reactor.state, now, whole=False)
        if not changes.empty:
            self.handle(PlanProposed(plan=changes, stats=None))

    def _request_plan(self, when: float) -> None:
        if when != self._next_request_at:
            return  # replaced by an earlier request
        self._next_request_at = math.inf
        if self._plan_pending:
            self._request_after_plan = True
            return
        now = self.kernel.now
        self._requests_then = self._requests_then + 1 if self._requested_at == now else 1
        self._requested_at = now
        if self._requests_then > MAX_REQUESTS_AT_ONCE:
            self.ask(now + RETRY_S)
            return
        self._serve_claims()
        plan = self._cycle.merged(self._decide(at_once(self._cycle.view(now))))
        if plan.starts and self.hear is not None:
            self.hear(plan.starts, now)
        if plan.wake_at is not None and plan.wake_at > now:
            self.ask(plan.wake_at)
        self._propose(difference(plan, self.reactor.state, now))

    def _serve_claims(self) -> None:
        """Start rigid jobs, and take slots for them, as the service does."""
        now = self.kernel.now
        plan = at_once(self._cycle.serve_claims(now))
        if plan.wake_at is not None and plan.wake_at > now:
            self.ask(plan.wake_at)
        changes, _ = self._cycle.changes_for_claims(now)
        if not changes.empty:
            self.handle(PlanProposed(plan=changes, stats=None))

    def _decide(self, view: ClusterView) -> Plan:
        now, options = self.kernel.now, self.options
        self._announce_call()
        began = time.perf_counter()
        if options.generations:
            rng = default_rng((options.seed, view.version))
            self.policy.improve(view, Budget(generations=options.generations), rng, now)
        plan = self.policy.plan(view, now)
        self.decisions_ms.append((time.perf_counter() - began) * 1000.0)
        return plan

    def _announce_call(self) -> None:
        if self.on_call is not None:
            self.on_call(self.kernel.now)

    def _propose(self, changes: Plan) -> None:
        if changes.empty:
            return
        stats = self.policy.stats() if self.options.generations else None
        proposed = PlanProposed(plan=changes, stats=stats)
        if self.options.latency_s > 0.0:
            self._plan_pending = True
            when = self.kernel.now + self.options.latency_s
            self.kernel.call_at(when, self._deliver_plan, proposed)
        else:
            self._deliver_plan(proposed)

    def _deliver_plan(self, proposed: PlanProposed) -> None:
        self._plan_pending = False
        self.handle(proposed)
        state = self.reactor.state
        left = [name for name in state.active if state.jobs[name].group is None]
        slots = {name: tuple(placed) for name, placed in proposed.plan.local_batch.items()}
        self.observe(PlanTaken(waiting=tuple(left), slots=slots))
        if self._request_after_plan:
            self._request_after_plan = False
            self.ask()
