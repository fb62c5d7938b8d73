"""Requests of plans in the simulator, and forecasts of starts."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest
from numpy.random import Generator, default_rng

from controlplane.core.inputs import PlanProposed
from controlplane.core.reactor import Reactor
from controlplane.policy.api import Budget, ClusterView, Plan
from controlplane.policy.api import StartForecast as PolicyForecast
from controlplane.sim.engine.event_queue import AFTER, USUAL, Kernel, PlannerOptions
from controlplane.sim.engine.planner import MAX_REQUESTS_AT_ONCE, SimulatedPlanner
from controlplane.sim.results import StartForecast
from schemas.ids import Seconds
from tests.support.simulations import (
    FREE,
    S0,
    S1,
    A,
    B,
    ScriptedPolicy,
    Step,
    ToyModel,
    job,
    simulated_run,
)

Call = tuple[float, int, bool]  # time, priority, whether the request can wait


class Asked(ScriptedPolicy):
    """Records the times of plans and the draws of its search."""

    def __init__(self, *wakes: float) -> None:
        super().__init__(*((at, {}) for at in wakes))
        self.at: list[float] = []
        self.drawn: list[tuple[int, float, int]] = []

    def improve(self, view: ClusterView, budget: Budget, rng: Generator, now: Seconds) -> bool:
        self.drawn.append((view.version, float(rng.random()), budget.generations))
        return False

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        self.at.append(now)
        return super().plan(view, now)


class Restless(ScriptedPolicy):
    """Wants another batch each time."""

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        held = {name: len(of.running_on) for name, of in view.jobs.items()}
        both, one = {S0: 32, S1: 32}, {S0: 64}
        batches = {name: one if many == 2 else both for name, many in held.items()}
        return Plan(based_on=view.version, local_batch=batches)


class Rebatching(ScriptedPolicy):
    """Doubles a job's batch, up to 128, whenever that tells something."""

    def __init__(self, *steps: Step) -> None:
        super().__init__(*steps)
        self.asked: list[float] = []

    def batches(self, view: ClusterView, now: Seconds) -> Plan:
        self.asked.append(now)
        doubled = {
            name: {slot: min(128, 2 * share) for slot, share in of.running_on.items()}
            for name, of in view.jobs.items()
        }
        return Plan(based_on=view.version, local_batch=doubled)


def asked(policy: Asked, *calls: Call, **options: Any) -> SimulatedPlanner:
    """A planner after these calls: time, priority, and whether the request can wait."""
    given = {"round_s": 0.0, "think_s": 0.0, "generations": 0, "asks_after_epochs": True}
    kernel, chosen = Kernel(), PlannerOptions(**{**given, "latency_s": 0.0, "seed": 3, **options})
    planner = SimulatedPlanner(kernel, Reactor(), policy, lambda _: None, chosen)
    for when, priority, can_wait in calls:
        kernel.call_at(when, partial(planner.ask, can_wait=can_wait), priority=priority)
    kernel.run()
    return planner


def at(*times: float, priority: int = USUAL, can_wait: bool = False) -> list[Call]:
    return [(when, priority, can_wait) for when in times]


@pytest.mark.parametrize(
    ("wakes", "calls", "options", "plans"),
    [
        pytest.param((), at(2, 1, 2, 1), {}, [1, 2], id="requests at one time are one"),
        pytest.param((4.0, 9.5), at(1), {}, [1, 4, 9.5], id="wake_at is a request"),
        pytest.param((4.0,), at(1, 2), {}, [1, 2, 4], id="other requests keep wake_at"),
        pytest.param((), at(0, 1, 59, 60, 61, 180), {"round_s": 60.0}, [0, 60, 120, 180], id="requests wait for the next round"),
        pytest.param((), at(60, priority=AFTER), {"round_s": 60.0}, [120], id="a request after the plan of a round waits for the next round"),
        pytest.param((), at(1, 2, 3, 20, can_wait=True) + at(4), {"think_s": 5.0}, [1, 4, 20], id="requests after epochs are combined"),
        pytest.param(
            (), at(1, can_wait=True) + at(2), {"asks_after_epochs": False}, [2],
            id="a policy that ignores epochs is not asked when one ends",
        ),
    ],
)  # fmt: skip
def test_plans_are_requested_in_time(
    wakes: tuple[float, ...], calls: list[Call], options: dict[str, Any], plans: list[float]
) -> None:
    policy = Asked(*wakes)

    planner = asked(policy, *calls, **options)

    assert policy.at == plans
    assert len(planner.decisions_ms) == len(plans)
    assert min(planner.decisions_ms) >= 0.0


@pytest.mark.parametrize("generations", [0, 7])
def test_a_search_draws_from_the_seed_and_the_version_of_the_view(generations: int) -> None:
    policy = Asked()

    asked(policy, *at(1), generations=generations)

    drawn = [(0, float(default_rng((3, 0)).random()), generations)]
    assert policy.drawn == (drawn if generations else [])


@pytest.mark.slow
def test_a_policy_that_never_converges_does_not_stop_the_clock() -> None:
    run = simulated_run(Restless(), job("a"), model=ToyModel(costs=FREE)).run()

    assert run.jobs["a"].state == "succeeded"
    at = run.times(PlanProposed)
    assert max(at.count(moment) for moment in at) == MAX_REQUESTS_AT_ONCE
    assert run.job(A).ended


def test_new_reports_change_batches_between_rounds_without_a_stall() -> None:
    policy = Rebatching((0.0, {A: {S0: 64}, B: {S1: 64}}))
    run = simulated_run(
        policy, job("a"), job("b", samples=1000), round_s=60.0, model=ToyModel(epochs=1)
    )

    run.run(until=50.0)

    stall_s = 8.0  # of a start
    assert policy.asked == [stall_s + 10.0]
    assert run.times(PlanProposed) == [0.0, stall_s + 10.0]
    assert run.jobs["a"].ended_at == stall_s + 10.0
    assert run.state.slot_index.allocations()[B] == {S1: 128}
    assert run.job(B).accounting.rescales == 0
    assert run.run().jobs["b"].ended_at == stall_s + 100.0


class Forecaster(ScriptedPolicy):
    """Expects whoever waits to start in as many seconds as the clock says, give or take one."""

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        waiting = [name for name, of in view.jobs.items() if not of.running_on]
        said = PolicyForecast(
            at=Seconds(2 * now), earliest=Seconds(2 * now - 1), latest=Seconds(2 * now + 1)
        )
        return msgspec.structs.replace(super().plan(view, now), starts=dict.fromkeys(waiting, said))


def test_the_first_forecast_of_a_start_is_kept() -> None:
    script = Forecaster((0.0, {}), (7.0, {}), (30.0, {A: {S0: 64}}))

    told = simulated_run(script, job("a", at=5.0), model=ToyModel(costs=FREE)).run().jobs["a"]

    assert told.forecast == StartForecast(Seconds(5.0), Seconds(10.0), Seconds(9.0), Seconds(11.0))
    assert told.started_at == 30.0
