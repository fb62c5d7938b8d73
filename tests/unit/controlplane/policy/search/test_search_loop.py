"""When a problem is built again, and when a search has converged."""

from __future__ import annotations

from dataclasses import dataclass

from numpy.random import Generator, default_rng

from controlplane.policy.api import Budget, ClusterView, Plan, PlanTaken, PolicyEvent, SearchStats
from controlplane.policy.search.search_loop import Evolution, SearchPolicy
from schemas.ids import Seconds
from tests.support.builders import A, cluster_view, job_view

SEEN = PlanTaken(waiting=())


@dataclass(frozen=True)
class Posed:
    """Problem of a view."""

    version: int


class Nothing:
    """Learns nothing."""

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        pass


class TwoSteps(Evolution):
    """Generations of two steps that find nothing better."""

    steps = 0

    def advance(self, rng: Generator) -> None:
        self.steps += 1
        if self.steps % 2 == 0:
            self._end_generation(better=False)

    def stats(self) -> SearchStats:
        return SearchStats(generations=self.generations)


class Counting(SearchPolicy[Posed]):
    """Counts its problems; at 50 s another change becomes possible."""

    def __init__(self, patience: int = 3) -> None:
        self.evolution = TwoSteps(patience)
        super().__init__(Nothing(), self.evolution)
        self.posed = 0

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        return Plan(based_on=self._current_problem(view, now).version)

    def _build_problem(self, view: ClusterView, now: Seconds) -> Posed:
        self.posed += 1
        return Posed(view.version)

    def _next_change(self, problem: Posed, view: ClusterView, now: Seconds) -> Seconds | None:
        return Seconds(50.0) if now < 50.0 else None


def view_of(version: int) -> ClusterView:
    return ClusterView(version=version, slots=(), jobs={})


def test_a_problem_is_built_again_for_another_view_of_the_same_version() -> None:
    policy, first = Counting(), cluster_view(job_view(A, slots=(1, 4)))
    posed = []
    for view in (first, cluster_view(job_view(A, slots=(1, 4))), cluster_view(job_view(A))):
        policy.plan(view, Seconds(60.0))
        posed.append(policy.posed)

    assert posed == [1, 1, 2]


def think(policy: Counting, *, generations: int = 0, steps: int = 0) -> bool:
    budget = Budget(generations=generations, steps=steps)
    return policy.improve(view_of(1), budget, default_rng(0), Seconds(0.0))


def test_a_problem_is_built_again_for_a_new_view_event_or_time() -> None:
    policy = Counting()
    posed = []
    for version, now in [(1, 0.0), (1, 1.0), (2, 2.0), (2, 49.0), (2, 50.0), (2, 1e6)]:
        policy.plan(view_of(version), Seconds(now))
        posed.append(policy.posed)
    policy.observe(SEEN, Seconds(1e6))
    policy.plan(view_of(2), Seconds(1e6))

    assert (posed, policy.posed) == ([1, 1, 2, 2, 3, 3], 4)


def test_a_budget_counts_generations_and_their_steps() -> None:
    policy = Counting()

    assert think(policy, generations=1, steps=3)

    assert (policy.evolution.steps, policy.stats().generations) == (5, 2)


def test_a_search_without_success_converges_after_its_patience() -> None:
    policy = Counting(patience=3)

    assert not think(policy, generations=10, steps=10)

    assert (policy.evolution.steps, policy.stats().generations) == (6, 3)
