"""Whatever is killed or lost, and whenever: a sweep ends, and its results are those without a fault."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.model.job_phases import Phase
from controlplane.sweeps.configurations import stream
from schemas.ids import JobId
from schemas.sweeps import (
    Asha,
    Grid,
    PopulationBased,
    RandomSearch,
    Searcher,
    SuccessiveHalving,
    choice,
)
from tests.support.sizes import examples
from tests.support.sweep_world import ENOUGH, SweepCluster, digest_of, sweep_job
from tests.support.sweeps import History, goodness, step

pytestmark = pytest.mark.slow
SEARCHERS: list[Searcher] = [
    Grid(),
    RandomSearch(3),
    SuccessiveHalving(4, eta=2),
    Asha(4, eta=2),
    PopulationBased(4),
]


@pytest.mark.parametrize("searcher", SEARCHERS, ids=lambda one: type(one).__name__)
@settings(max_examples=examples(40), deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2)),
    faults=st.sampled_from([0, 10, 25]),
    seed=st.integers(0, 100_000),
)
def test_a_sweep_ends_with_the_results_that_it_has_without_faults(
    searcher: Searcher, sizes: tuple[int, int, int], faults: int, seed: int
) -> None:
    nodes, partitions, replicas = sizes
    cluster = SweepCluster(**{f"n{at}": 2 for at in range(nodes)})
    space = {"space": {"lr": choice(0.1, 0.2, 0.3)}} if isinstance(searcher, Grid) else {}
    spec = sweep_job(
        (1, 4), searcher=searcher, epochs=3, partitions=partitions, replicas=replicas, **space
    )
    name = cluster.submit(**spec)
    rng = stream(seed)

    drive(cluster, name, rng, faults)

    assert cluster.job(name).phase is Phase.SUCCEEDED, cluster.job(name).reason
    cluster.settle()
    nothing_is_lost_and_all_is_as_alone(cluster, name, partitions)
    assert cluster.controller.replayed() == cluster.controller.state


def drive(cluster: SweepCluster, name: JobId, rng: Random, faults: int) -> None:
    """To the end, with so many faults and many plans at moments by chance."""
    idle = 0
    finished = 0
    for _ in range(ENOUGH):
        if cluster.job(name).ended:
            return
        if faults and rng.random() < 0.05:
            faults -= 1
            disturb(cluster, rng)
        if not cluster.job(name).group or rng.random() < 0.03:
            plan(cluster, name, rng)
        if not cluster.step(rng):
            idle += 1
            cluster.later(100.0)
            for node in cluster.world.nodes.values():
                if not node.up:
                    cluster.bring_back(node, disk=rng.random() < 0.5)
            plan(cluster, name, rng)
        done = cluster.sweep(name).units_done
        assert done >= finished, "a finished unit is lost"
        finished = done
    raise AssertionError("the sweep does not end")


def disturb(cluster: SweepCluster, rng: Random) -> None:
    node = rng.choice(list(cluster.world.nodes.values()))
    match rng.randrange(5):
        case 0 if node.up and (living := node.living()):
            rng.choice(living).die()
        case 1 if node.up:
            cluster.restart_agent(node)
        case 2:
            cluster.restart_controller()
        case 3 if node.up:
            cluster.lose(node)
        case _ if not node.up:
            cluster.bring_back(node, disk=rng.random() < 0.5)


def plan(cluster: SweepCluster, name: JobId, rng: Random) -> None:
    """Some slots of nodes that are up, or none."""
    job = cluster.job(name)
    view = cluster.controller.view()
    mine = set(view.jobs[name].running_on) if name in view.jobs else set()
    free = [slot.slot for slot in view.slots if slot.usable or slot.slot in mine]
    least, most = job.spec.slots
    if free and not job.ended:
        many = rng.randrange(0, min(most, len(free)) + 1)
        chosen = rng.sample(free, many)
        cluster.place({name: chosen if many >= least else []})


def nothing_is_lost_and_all_is_as_alone(
    cluster: SweepCluster, name: JobId, partitions: int
) -> None:
    """Completeness and isolation: each trial's visits, trained alone, give its states and scores."""
    state = cluster.sweep(name).engine.state
    history = cluster.controller.sweep_history(name)
    ledger = {(unit.trial, unit.version): unit for unit in history.units}
    assert len(ledger) == len(history.units), "no unit counts twice"
    for trial, model in zip(state.trials, state.models, strict=True):
        alone: History = ()
        for at, visit in enumerate(model.finished_units):
            epoch = 1 + at // partitions
            alone = step(alone, state.trials[visit.trial].values, epoch, visit.partition)
            assert visit.digest == digest_of(alone)
            if (unit := ledger.get((trial.number, at + 1))) is not None:
                assert (unit.digest, unit.partition) == (visit.digest, visit.partition)
            own = epoch - trial.start_epochs - 1
            if (at + 1) % partitions == 0 and 0 <= own < len(trial.scores):
                assert trial.scores[own] == goodness(alone)
        for epoch in range(model.whole_epochs):
            visits = model.finished_units[epoch * partitions : (epoch + 1) * partitions]
            assert sorted(visit.partition for visit in visits) == list(range(partitions))
    kept = [file for node in cluster.world.nodes.values() if node.up for file in node.files]
    assert {file[1] for file in kept} <= {
        trial.number for trial in state.trials if trial.scores
    } | {one.trial for model in state.models for one in model.parents}
