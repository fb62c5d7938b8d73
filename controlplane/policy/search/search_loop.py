"""Base classes of search policies. They decide when to rebuild a problem, and when to stop."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
from numpy.random import Generator

from controlplane.policy.api import Budget, ClusterView, Policy, PolicyEvent, SearchStats
from controlplane.prediction import FloatArray
from schemas.ids import Seconds

P = TypeVar("P")
QUANTILES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)


class Learner(Protocol):
    """Part of a search policy that estimates speeds, lengths and limits from policy events."""

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn from `event`; `now` is in seconds on the controller's clock."""
        ...


def spread_of(fitness: Sequence[float] | FloatArray) -> tuple[float, ...]:
    """Return the fitness at 0, 25, 50, 75 and 100% of a population; empty without candidates."""
    return tuple(np.quantile(fitness, QUANTILES).tolist()) if len(fitness) else ()


class Evolution(ABC):
    """Population that evolves by generations until it stops improving.

    Args:
        patience: number of generations without a better candidate after which the search stops.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._idle_generations = 0
        self.generations = 0  # number of finished generations

    @property
    def converged(self) -> bool:
        """True after `patience` generations without a better candidate."""
        return self._idle_generations >= self._patience

    def evolve(self, rng: Generator) -> bool:
        """Run or finish a generation; return True if the generation found a better candidate."""
        before = self.generations
        while self.generations == before and not self.converged:
            self.advance(rng)
        return not self._idle_generations

    @abstractmethod
    def advance(self, rng: Generator) -> None:
        """Run one step of a generation. The caller can handle messages between steps."""

    @abstractmethod
    def stats(self) -> SearchStats:
        """Return statistics of the population."""

    def _stop(self) -> None:
        """Mark the search as converged, because there is nothing to search for."""
        self._idle_generations = self._patience

    def _end_generation(self, *, better: bool) -> None:
        self.generations += 1
        self._idle_generations = 0 if better else self._idle_generations + 1


class SearchPolicy(Policy, Generic[P]):
    """Policy that learns from events, evolves candidates within a budget and returns the best one.

    A problem is built once for each view. It is rebuilt if the view is new, if an event was
    learned, or if a change has become possible with time.
    """

    def __init__(self, learner: Learner, evolution: Evolution) -> None:
        self._learner = learner
        self._evolution = evolution
        self._problem: P | None = None
        self._view: ClusterView | None = None  # from which the problem was built
        self._stale = True  # True if an event was learned since the problem was built
        self._valid_until = Seconds(0.0)  # end of the problem's validity

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn speeds, lengths and limits from `event`."""
        self._learner.observe(event, now)
        self._stale = True

    def improve(self, view: ClusterView, budget: Budget, rng: Generator, now: Seconds) -> bool:
        """Evolve for `budget`; return True if further search could find a better schedule."""
        self._current_problem(view, now)
        evolution = self._evolution
        for _ in range(budget.generations):
            evolution.evolve(rng)
        for _ in range(budget.steps):
            if not evolution.converged:
                evolution.advance(rng)
        return not evolution.converged

    def stats(self) -> SearchStats:
        """Return statistics of the population."""
        return self._evolution.stats()

    @abstractmethod
    def _build_problem(self, view: ClusterView, now: Seconds) -> P:
        """Build the problem of `view` and adapt the population to it."""

    @abstractmethod
    def _next_change(self, problem: P, view: ClusterView, now: Seconds) -> Seconds | None:
        """Return when the next retry or move becomes possible, or None if none becomes possible."""

    def _current_problem(self, view: ClusterView, now: Seconds) -> P:
        """Return the problem of `view`; rebuild it if anything has changed."""
        problem = self._problem
        fresh = not self._stale and now < self._valid_until and _same(view, self._view)
        if problem is None or not fresh:
            problem = self._problem = self._build_problem(view, now)
            self._valid_until = self._next_change(problem, view, now) or Seconds(math.inf)
            self._view, self._stale = view, False
        return problem


def _same(view: ClusterView, before: ClusterView | None) -> bool:
    """True if the views are equal. Budgets of accounts change views of one version of the state."""
    if before is None or view is before:
        return before is not None
    return view.version == before.version and view == before
