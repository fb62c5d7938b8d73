"""When a policy is asked, what it is told, and that a restless one does not stop the clock."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest
from numpy.random import Generator, default_rng

from controlplane.core.inputs import PlanProposed
from controlplane.core.reactor import Reactor
from controlplane.policy.api import Budget, ClusterView, Plan
from controlplane.policy.api import StartForecast as PolicyForecast
from controlplane.sim.engine.event_queue import AFTER, Kernel, PlannerOptions
from controlplane.sim.engine.planner import MAX_REQUESTS_AT_ONCE, SimulatedPlanner
from controlplane.sim.results import StartForecast
from schemas.ids import Seconds
from tests.support.simulated import (
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


class Asked(ScriptedPolicy):
    """Writes down when it was asked, and with what luck."""

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


def planner(
    policy: Asked,
    *,
    round_s: float = 0.0,
    think_s: float = 0.0,
    generations: int = 0,
    epochs: bool = True,
) -> tuple[Kernel, SimulatedPlanner]:
    kernel = Kernel()
    options = PlannerOptions(
        round_s=round_s, latency_s=0.0, generations=generations, think_s=think_s,
        asks_after_epochs=epochs, seed=3,
    )  # fmt: skip
    return kernel, SimulatedPlanner(kernel, Reactor(), policy, lambda _: None, options)


def test_many_questions_at_one_moment_are_one() -> None:
    policy = Asked()
    kernel, planner_ = planner(policy)
    for when in (2.0, 1.0, 2.0, 1.0):
        kernel.call_at(when, planner_.ask)
    kernel.run()

    assert policy.at == [1.0, 2.0]


def test_it_is_asked_again_when_it_wanted_to_be() -> None:
    policy = Asked(4.0, 9.5)
    kernel, planner_ = planner(policy)
    kernel.call_at(1.0, planner_.ask)
    kernel.run()

    assert policy.at == [1.0, 4.0, 9.5]


def test_a_question_in_between_does_not_make_it_forget_when() -> None:
    policy = Asked(4.0)
    kernel, planner_ = planner(policy)
    for when in (1.0, 2.0):
        kernel.call_at(when, planner_.ask)
    kernel.run()

    assert policy.at == [1.0, 2.0, 4.0]


def test_in_rounds_questions_wait_for_the_next_one() -> None:
    policy = Asked()
    kernel, planner_ = planner(policy, round_s=60.0)
    for when in (0.0, 1.0, 59.0, 60.0, 61.0, 180.0):
        kernel.call_at(when, planner_.ask)
    kernel.run()

    assert policy.at == [0.0, 60.0, 120.0, 180.0]


def test_what_happens_after_a_round_is_for_the_next_one() -> None:
    policy = Asked()
    kernel, planner_ = planner(policy, round_s=60.0)
    kernel.call_at(60.0, planner_.ask, priority=AFTER)
    kernel.run()

    assert policy.at == [120.0]


def test_a_leisurely_question_waits_and_another_one_does_not() -> None:
    policy = Asked()
    kernel, planner_ = planner(policy, think_s=5.0)
    for when in (1.0, 2.0, 3.0, 20.0):
        kernel.call_at(when, partial(planner_.ask, can_wait=True))
    kernel.call_at(4.0, planner_.ask)
    kernel.run()

    assert policy.at == [1.0, 4.0, 20.0]


def test_a_policy_that_does_not_mind_epochs_is_not_asked_at_their_ends() -> None:
    policy = Asked()
    kernel, planner_ = planner(policy, epochs=False)
    kernel.call_at(1.0, partial(planner_.ask, can_wait=True))
    kernel.call_at(2.0, planner_.ask)
    kernel.run()

    assert policy.at == [2.0]


@pytest.mark.parametrize("generations", [0, 7])
def test_a_search_thinks_with_luck_of_the_seed_and_the_view(generations: int) -> None:
    policy = Asked()
    kernel, planner_ = planner(policy, generations=generations)
    kernel.call_at(1.0, planner_.ask)
    kernel.run()

    lucky = [(0, float(default_rng((3, 0)).random()), generations)]
    assert policy.drawn == (lucky if generations else [])


def test_every_answer_is_timed() -> None:
    policy = Asked(4.0)
    kernel, planner_ = planner(policy)
    kernel.call_at(1.0, planner_.ask)
    kernel.run()

    assert len(planner_.decisions_ms) == len(policy.at) == 2
    assert min(planner_.decisions_ms) >= 0.0


@pytest.mark.slow
def test_a_policy_that_never_comes_to_rest_does_not_stop_the_clock() -> None:
    run = simulated_run(Restless(), job("a"), model=ToyModel(costs=FREE)).run()

    assert run.jobs["a"].state == "succeeded"
    at = run.times(PlanProposed)
    assert max(at.count(moment) for moment in at) == MAX_REQUESTS_AT_ONCE
    assert run.state.jobs[A].ended


def test_between_rounds_batches_alone_change_when_jobs_tell_something_and_nobody_stalls() -> None:
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
    assert run.state.jobs[B].accounting.rescales == 0
    assert run.run().jobs["b"].ended_at == stall_s + 100.0


class Forecaster(ScriptedPolicy):
    """Expects whoever waits to start in as many seconds as the clock says, give or take one."""

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        waiting = [name for name, of in view.jobs.items() if not of.running_on]
        said = PolicyForecast(
            at=Seconds(2 * now), earliest=Seconds(2 * now - 1), latest=Seconds(2 * now + 1)
        )
        return msgspec.structs.replace(super().plan(view, now), starts=dict.fromkeys(waiting, said))


def test_what_is_said_first_of_a_start_is_kept_beside_the_start() -> None:
    script = Forecaster((0.0, {}), (7.0, {}), (30.0, {A: {S0: 64}}))

    told = simulated_run(script, job("a", at=5.0), model=ToyModel(costs=FREE)).run().jobs["a"]

    assert told.forecast == StartForecast(Seconds(5.0), Seconds(10.0), Seconds(9.0), Seconds(11.0))
    assert told.started_at == 30.0
