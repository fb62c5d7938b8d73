"""Every policy that can act does so where jobs last half a minute, through the live core."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from controlplane.policy.registry import POLICIES
from controlplane.sim.cluster import NodeGroup
from controlplane.sim.models.job_model import ChangeCosts
from controlplane.sim.results import TraceJob
from tests.support.simulations import SimulatedRun, ToyModel, job, simulated_run

FOUR = (NodeGroup(count=1, slots=4),)
LIVE = ChangeCosts(start_s=2.0, restart_s=2.0, prepare_s=1.0, switch_s=0.3)
HALF_A_MINUTE = ToyModel(costs=LIVE, epochs=10, epoch_samples=30, noise=400.0, loss_epochs=40)
GANGS = {name for name, entry in POLICIES.items() if entry.gangs}


def eight_jobs() -> list[TraceJob]:
    """Three seconds apart, each 3 to 30 s on one slot."""
    samples = (30, 6, 12, 30, 3, 20, 6, 30)
    return [
        job(f"j{number}", 3.0 * number, slots=(1, 2, 1, 4)[number % 4], samples=size)
        for number, size in enumerate(samples)
    ]


def changes(run: SimulatedRun) -> Counter[str]:
    """What became of each job's slots after its start, by the codes of the decisions."""
    histories = run.simulation.histories
    return Counter(one.code for past in histories.jobs.values() for one in past.decisions)


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in GANGS])
def test_a_policy_that_chooses_sizes_changes_them_while_jobs_run(name: str) -> None:
    run = simulated_run(
        name, *eight_jobs(), nodes=FOUR, model=HALF_A_MINUTE, telemetry_s=1.0, generations=4
    ).run()

    assert {ended.state for ended in run.jobs.values()} == {"succeeded"}
    done = changes(run)
    assert done["grow"] + done["restart"] + done["shrink"] > 0, done


@pytest.mark.parametrize("name", ["goodput", "optimus"])
def test_who_comes_between_rounds_starts_on_an_idle_slot(name: str) -> None:
    model = replace(HALF_A_MINUTE, most=2)
    run = simulated_run(
        name, job("a"), job("b", 1.5), nodes=FOUR, model=model, telemetry_s=1.0
    ).run()

    assert run.jobs["b"].queued_s == pytest.approx(0.0)
