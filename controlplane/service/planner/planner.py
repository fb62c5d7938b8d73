"""Interface to whatever produces plans, and the planner that runs a policy in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from controlplane.policy.api import ClusterView, Plan, Policy, PolicyEvent, SearchStats
from schemas.ids import Seconds

ViewNow = Callable[[], tuple[ClusterView, Seconds]]


class ProposePlan(Protocol):
    """Callback that accepts a plan."""

    def __call__(self, plan: Plan, stats: SearchStats | None, /, *, complete: bool = True) -> None:
        """Apply the parts of a plan that still fit the current state.

        `stats` is None if no search made the plan. If `complete` is True, running jobs that the
        plan omits are stopped. Otherwise they continue.
        """
        ...


class Planner(Protocol):
    """Producer of plans."""

    restarts: int

    @property
    def running(self) -> bool:
        """True if the policy itself makes the plans, False while the fallback makes them."""
        ...

    @property
    def busy(self) -> bool:
        """True if a request would have to wait for the reply to an earlier one."""
        ...

    @property
    def stats(self) -> SearchStats:
        """Latest statistics of the policy's search."""
        ...

    def request_plan(self, view_s: float = 0.0) -> None:
        """Request a plan for the current state. The plan is passed to `propose`.

        `view_s` is the time that has been spent on the view already.
        """
        ...

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Pass an event to the policy, such as an epoch, telemetry, or the end of a job."""
        ...

    async def run(self) -> None:
        """Serve until cancelled."""
        ...


@dataclass(eq=False)
class InlinePlanner:
    """Planner that runs a policy in this process. The policy must answer within microseconds."""

    restarts = 0
    running = True
    busy = False

    policy: Policy
    view_now: ViewNow
    propose: ProposePlan

    @property
    def stats(self) -> SearchStats:
        """Latest statistics of the policy."""
        return self.policy.stats()

    def request_plan(self, view_s: float = 0.0) -> None:
        """Propose a plan at once."""
        self.propose(self.policy.plan(*self.view_now()), None)

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Pass the event to the policy."""
        self.policy.observe(event, now)

    async def run(self) -> None:
        """Wait until cancelled, because there is nothing to do between requests."""
        await asyncio.Event().wait()
