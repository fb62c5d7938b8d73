"""Any policy, with jobs that lost members brought back to their least slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.policy.api import Budget, ClusterView, Plan, Policy, PolicyEvent, SearchStats
from controlplane.policy.planning.least_slots import ShownWhole, show_whole, tell_whole
from schemas.ids import Seconds

if TYPE_CHECKING:
    from numpy.random import Generator


class RestoringPolicy(Policy):
    """What `policy` decides about a cluster in which no job trains on below its least slots.

    No policy has to think of losses: it is shown jobs that lost members as they should be
    (`planning/least_slots`), and decides about all others around them.

    Args:
        gangs: whether it gives jobs their wanted slots and never another number: then they get
            these again where they are free.
    """

    def __init__(self, policy: Policy, *, gangs: bool = False) -> None:
        self.policy = policy
        self._gangs = gangs

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Hand it on."""
        self.policy.observe(event, now)

    def improve(self, view: ClusterView, budget: Budget, rng: Generator, now: Seconds) -> bool:
        """Let it think about the jobs as they should be."""
        return self.policy.improve(self._shown(view, now).view, budget, rng, now)

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Its plan, in which jobs that lost members grow back or stop."""
        shown = self._shown(view, now)
        return tell_whole(shown, self.policy.plan(shown.view, now))

    def batches(self, view: ClusterView, now: Seconds) -> Plan:
        """Its batches; jobs that lost members are none of its business."""
        shown = self._shown(view, now)
        return self.policy.batches(shown.view, now)

    def stats(self) -> SearchStats:
        """Those of the policy."""
        return self.policy.stats()

    def _shown(self, view: ClusterView, now: Seconds) -> ShownWhole:
        return show_whole(view, now, gangs=self._gangs)
