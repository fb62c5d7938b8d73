"""A policy that is quick enough to be asked in this process."""

from __future__ import annotations

import asyncio

from controlplane.policy.api import Policy, PolicyEvent, SearchStats
from controlplane.service.planner.planner_interface import Propose, ViewNow
from schemas.ids import Seconds


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
