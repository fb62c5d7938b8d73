"""What a planner is to the rest of the service: asked for plans; observes what happened.

A policy that is quick enough to be asked in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from controlplane.policy.api import ClusterView, Plan, Policy, PolicyEvent, SearchStats
from schemas.ids import Seconds

ViewNow = Callable[[], tuple[ClusterView, Seconds]]


class Propose(Protocol):
    """Takes plans."""

    def __call__(self, plan: Plan, stats: SearchStats | None, /, *, whole: bool = True) -> None:
        """Put a plan in force, as far as it still fits.

        Args:
            plan: based on a view of this moment or of an earlier one.
            stats: how the search stood with it; None if no search made it.
            whole: whether a running job that it leaves out is to stop; else it goes on as it is.
        """
        ...


class Planner(Protocol):
    """Whoever is asked for plans."""

    restarts: int

    @property
    def running(self) -> bool:
        """Whether it thinks for itself now."""
        ...

    @property
    def stats(self) -> SearchStats:
        """How it stood last."""
        ...

    def ask(self) -> None:
        """A plan for the present is wanted; it comes through `propose`."""
        ...

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Something happened at `now` (seconds since the epoch) that the policy can learn from.

        Args:
            event: an epoch, telemetry, the end of a job, or a plan that was put in force.
            now: seconds since the epoch.
        """
        ...

    async def run(self) -> None:
        """Work, for ever."""
        ...


class InlinePlanner:
    """A policy that answers in microseconds.

    Args:
        policy: asked in this process, between two events of its loop.
        view_now: what it may see at the moment, and the time.
    """

    restarts = 0
    running = True

    def __init__(self, policy: Policy, view_now: ViewNow, propose: Propose) -> None:
        self._policy = policy
        self._view_now = view_now
        self._propose = propose

    @property
    def stats(self) -> SearchStats:
        """Those of the policy."""
        return self._policy.stats()

    def ask(self) -> None:
        """Answer at once."""
        self._propose(self._policy.plan(*self._view_now()), None)

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Hand it on."""
        self._policy.observe(event, now)

    async def run(self) -> None:
        """There is nothing to do between questions."""
        await asyncio.Event().wait()
