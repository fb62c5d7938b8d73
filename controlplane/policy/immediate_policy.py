"""What policies that do not search have in common: they learn nothing, and never think."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.policy.api import Budget, ClusterView, Policy, PolicyEvent, SearchStats
from schemas.ids import Seconds

if TYPE_CHECKING:
    from numpy.random import Generator


class ImmediatePolicy(Policy):
    """Decides the moment it is asked: a subclass says how in `plan`, and may learn from events."""

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Views tell all that it needs; a subclass that needs more takes it here.

        Args:
            now: seconds on the controller's clock.
        """

    def improve(self, view: ClusterView, budget: Budget, rng: Generator, now: Seconds) -> bool:
        """There is nothing to search for.

        Args:
            budget: not used.
            rng: not used.
            now: seconds on the controller's clock.

        Returns:
            False: to think on would find nothing better.
        """
        return False

    def stats(self) -> SearchStats:
        """Zeros: there is no search."""
        return SearchStats()
