"""What drives a search: when a view is a new problem, how long to think, when to give up."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from numpy.random import Generator

from controlplane.policy.api import Budget, ClusterView, Plan, PolicyEvent, SearchStats
from schemas.ids import Seconds


class Versioned(Protocol):
    """A problem that was made of one view."""

    @property
    def version(self) -> int:
        """Of the view."""
        ...


P = TypeVar("P", bound=Versioned)


class Learner(Protocol):
    """What a search has learnt."""

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn from `event`.

        Args:
            now: seconds on the controller's clock.
        """
        ...


class Evolution(ABC):
    """A population that is evolved generation by generation, until nothing better is found.

    Args:
        patience: generations without a better candidate, after which it has converged.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._idle_generations = 0
        self.generations = 0  # since it began

    @property
    def converged(self) -> bool:
        """Whether nothing better was found for so long that it is not worth while to go on."""
        return self._idle_generations >= self._patience

    def evolve(self, rng: Generator) -> bool:
        """One generation, or what is left of one.

        Returns:
            Whether a better candidate was found.
        """
        before = self.generations
        while self.generations == before and not self.converged:
            self.advance(rng)
        return not self._idle_generations

    @abstractmethod
    def advance(self, rng: Generator) -> None:
        """One step of a generation: a fraction of its time, for who must answer meanwhile."""

    @abstractmethod
    def stats(self) -> SearchStats:
        """How the population stands."""

    def _give_up(self) -> None:
        """There is nothing to search for."""
        self._idle_generations = self._patience

    def _end_generation(self, *, better: bool) -> None:
        self.generations += 1
        self._idle_generations = 0 if better else self._idle_generations + 1


class SearchPolicy(ABC, Generic[P]):
    """A policy that evolves candidates: learns, thinks within its budget, reads out the best.

    A view is made into a problem once; again only when the view is new, something was learnt, or
    a moment has come at which what was out of the question becomes possible.
    """

    def __init__(self, learner: Learner, evolution: Evolution) -> None:
        self._learner = learner
        self._evolution = evolution
        self._problem: P | None = None
        self._stale = True  # something happened since the problem was built
        self._until = Seconds(0.0)  # when what is out of the question becomes possible

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn speeds, lengths and limits.

        Args:
            now: seconds on the controller's clock.
        """
        self._learner.observe(event, now)
        self._stale = True

    def improve(self, view: ClusterView, budget: Budget, rng: Generator, now: Seconds) -> bool:
        """Evolve for `budget`.

        Args:
            budget: generations, and parts of one.
            now: seconds on the controller's clock.

        Returns:
            Whether to go on could still find something better.
        """
        self._problem_of(view, now)
        evolution = self._evolution
        for _ in range(budget.generations):
            evolution.evolve(rng)
        for _ in range(budget.steps):
            if not evolution.converged:
                evolution.advance(rng)
        return not evolution.converged

    @abstractmethod
    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Read out the best schedule so far, with a reason for every job that changes or waits.

        Args:
            now: seconds on the controller's clock.
        """

    def batches(self, view: ClusterView, now: Seconds) -> Plan:
        """None: a subclass that chooses them without a search says how.

        Args:
            now: seconds on the controller's clock.
        """
        return Plan(based_on=view.version)

    def stats(self) -> SearchStats:
        """How the population stands."""
        return self._evolution.stats()

    @abstractmethod
    def _pose(self, view: ClusterView, now: Seconds) -> P:
        """Build the problem of `view`, and bring the population to it."""

    @abstractmethod
    def _next_change(self, problem: P, view: ClusterView, now: Seconds) -> Seconds | None:
        """When something that is out of the question now becomes possible: a try, or a move."""

    def _problem_of(self, view: ClusterView, now: Seconds) -> P:
        """The problem of `view`, built again if there is anything new."""
        problem = self._problem
        fresh = not self._stale and now < self._until
        if problem is None or problem.version != view.version or not fresh:
            problem = self._problem = self._pose(view, now)
            self._until = self._next_change(problem, view, now) or Seconds(math.inf)
            self._stale = False
        return problem
