"""Reports of simulated workers, and their errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from controlplane.policy.api import EpochSeen, StepsSeen
from controlplane.sim.engine.event_queue import SimOptions
from controlplane.sim.engine.telemetry import MeasuredFigures
from controlplane.sim.run import simulate
from controlplane.sim.scenario import Scenario, default_costs
from schemas.epochs import StepTimes
from tests.support.simulations import (
    RATE,
    S0,
    S1,
    A,
    B,
    ScriptedPolicy,
    ToyModel,
    job,
    simulated_run,
)


def heard(
    script: ScriptedPolicy, *, seed: int = 0, **changes: Any
) -> tuple[list[StepsSeen], list[EpochSeen]]:
    """What the policy hears of jobs of 4 epochs of 1000 samples with noise scales of 50, 100..."""
    simulated_run(
        script, job("a"), job("b"), model=ToyModel(epoch_samples=1000, noise=50.0),
        telemetry_s=30.0, changes=changes, seed=seed,
    ).run(1000.0)  # fmt: skip
    steps = [event for _, event in script.observed if isinstance(event, StepsSeen)]
    return steps, [event for _, event in script.observed if isinstance(event, EpochSeen)]


def alone() -> ScriptedPolicy:
    return ScriptedPolicy((0, {A: {S0: 64}, B: {S1: 64}}))


def test_single_workers_and_groups_measure_noise_scales() -> None:
    together = ScriptedPolicy((0, {A: {S0: 32, S1: 32}}))

    for script in (alone(), together):
        steps, epochs = heard(script, information="honest", noise=0.0)
        assert None not in {event.noise_scale for event in steps}
        assert {event.noise_scale for event in epochs} == {50.0, 100.0, 150.0, 200.0}


def test_measurements_have_errors_that_are_equal_in_every_run() -> None:
    (steps, epochs), again = (heard(alone(), noise=0.05, seed=3) for _ in range(2))

    assert (steps, epochs) == again
    errors = [math.log(e.samples_per_s / RATE) for e in [*steps, *epochs]]
    assert 0.02 < math.sqrt(sum(error**2 for error in errors) / len(errors)) < 0.1
    assert len(set(errors)) == len(errors)
    assert [e.noise_scale for e in epochs] == [
        pytest.approx(50.0 * e.epoch, rel=0.3) for e in epochs
    ]
    assert heard(alone(), noise=0.05, seed=4) != (steps, epochs)


def test_errors_of_a_job_do_not_depend_on_other_jobs() -> None:
    both, _ = heard(alone(), noise=0.05)
    one, _ = heard(ScriptedPolicy((0, {B: {S1: 64}})), noise=0.05)

    assert [e for e in both if e.job == B] == one


def test_waits_for_reductions_have_errors_of_their_own_and_are_never_longer_than_a_pass() -> None:
    """Else the share of a step in which a worker waits would be known exactly."""
    figures, true = MeasuredFigures(SimOptions(Scenario(noise=0.5))), StepTimes(1.0, 0.9, 8, 2)

    told = [figures.parts(A, true, faster=2.0) for _ in range(20)]

    waits = {each.sync_s for each in told if each is not None}
    assert len(waits) > 5
    assert max(waits) == 0.5
    assert {replace(each, sync_s=0.0) for each in told if each} == {StepTimes(0.5, 0.0, 8, 2)}
    assert figures.parts(A, replace(true, sync_s=0.0), faster=2.0) == StepTimes(0.5, 0.0, 8, 2)
    assert figures.parts(A, None, faster=2.0) is None


def test_all_noise_scales_of_a_job_can_have_one_factor_of_error() -> None:
    _, epochs = heard(alone(), noise_scale_error=4.0)

    factors = {e.job: set[float]() for e in epochs}
    for e in epochs:
        factors[e.job].add(round((e.noise_scale or 0.0) / (50.0 * e.epoch), 9))
    assert [len(each) for each in factors.values()] == [1, 1]
    assert factors[A] != factors[B]
    assert all(0.25 <= factor <= 4.0 for each in factors.values() for factor in each)


def test_a_scenario_is_honest_unless_it_states_otherwise() -> None:
    steps, epochs = heard(alone())

    assert {event.samples_per_s for event in [*steps, *epochs]} == {RATE}  # perfect
    assert (Scenario().information, Scenario().report_noise) == ("honest", 0.05)
    assert Scenario(information="perfect").report_noise == 0.0
    assert Scenario(noise=0.0).report_noise == 0.0
    assert Scenario(information="perfect", noise=0.2).report_noise == 0.2


def test_errors_do_not_change_policies_that_read_no_reports() -> None:
    told = [
        simulate("tiresias", Scenario(jobs=8, information=which, warm_up=0.0), 3)  # type: ignore[arg-type]
        for which in ("honest", "perfect")
    ]

    assert told[0].jobs == told[1].jobs


def test_preparation_of_newcomers_has_a_cost_of_its_own() -> None:
    profiles: dict[str, Any] = {
        "physics": "profiles", "profiles": "x", "stall_s": 1.0, "first_stall_s": 30.0,
    }  # fmt: skip

    assert [
        (costs.start_s, costs.prepare_s, costs.switch_s)
        for given in ({}, {"prepare_s": 2.0})
        for costs in [default_costs(Scenario(**profiles, **given))]
    ] == [(30.0, 30.0, 1.0), (30.0, 2.0, 1.0)]
    ends = [
        simulated_run(
            ScriptedPolicy((0, {A: {S0: 64}}), (20.0, {A: {S0: 32, S1: 32}})), job("a"),
            changes={"prepare_s": prepare_s},
        ).run(1000.0).jobs["a"].ended_at or 0.0
        for prepare_s in (2.0, 4.0)
    ]  # fmt: skip
    assert 0.0 < ends[0] < ends[1]
