"""Sweeps that have ended leave the state with their past, and nodes hear of them as before."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.core.commands import Command, SendDelta, SendSweepDelta
from controlplane.core.handlers import lifecycle
from controlplane.core.history import JobLeft, SweepHistory, SweepLeft
from controlplane.core.inputs import Input
from controlplane.core.model.job_phases import Phase
from controlplane.core.reactor import Reactor
from controlplane.journal.database import input_from
from schemas.ids import JobId, NodeId, Seconds
from schemas.sweeps import RandomSearch
from tests.support import builders
from tests.support.recorded_history import of_sweeps
from tests.support.sweep_world import SweepCluster, sweep_job

pytestmark = pytest.mark.slow


def ended(cluster: SweepCluster, **spec: Any) -> JobId:
    """A sweep that has trained all of its trials."""
    name = cluster.submit("a", **sweep_job((1, 2), **spec))
    cluster.place({name: cluster.slots()[:2]})
    cluster.settle(training=True)
    assert cluster.job(name).phase is Phase.SUCCEEDED
    return name


def test_an_ended_sweep_leaves_with_its_history() -> None:
    cluster = SweepCluster(n1=2)
    name = ended(cluster)
    totals = cluster.controller.reactor.totals

    cluster.controller.submit("b")

    records = [*cluster.records, *cluster.controller.reactor.records]
    job, sweep = (record for record in records if isinstance(record, JobLeft | SweepLeft))
    assert job == JobLeft(job=name, last=cluster.job(name))
    assert isinstance(sweep, SweepLeft)
    assert (sweep.job, len(sweep.history.units)) == (name, 12)
    assert name not in cluster.controller.state.jobs
    assert (totals.sweeps, cluster.controller.state.ended_sweeps) == ({}, {})


def test_a_node_that_comes_back_hears_which_states_it_keeps_of_a_sweep_that_left() -> None:
    cluster = SweepCluster(n1=2)
    name = ended(cluster)
    (node,) = cluster.world.nodes.values()
    kept = wanted(cluster, node.hello())
    cluster.controller.submit("b")
    assert name not in cluster.controller.state.jobs

    again = [wanted(cluster, node.hello()) for _ in range(2)]

    assert kept
    assert [one.wanted for one in again] == [kept.wanted] * 2
    assert [one.revision for one in again] == [kept.revision + 1, kept.revision + 2]
    assert {one.term for one in again} == {1}


def wanted(cluster: SweepCluster, hello: Input) -> Any:
    (delta,) = [
        command.delta
        for command in cluster.controller.take(hello)
        if isinstance(command, SendSweepDelta)
    ]
    return delta


def test_a_sweep_stays_until_the_last_job_that_was_its_trial_has_left() -> None:
    cluster = SweepCluster(n1=2, n2=2)
    name = cluster.submit("a", **sweep_job(searcher=RandomSearch(1), graduate_batch=8))
    cluster.place({name: cluster.slots()})
    cluster.settle(training=True)
    state = cluster.controller.state
    (graduate,) = state.active
    assert cluster.job(name).ended

    cluster.controller.submit("b")
    assert name in state.jobs
    cluster.controller.take(builders.cancelled(graduate))
    cluster.controller.submit("b")
    cluster.controller.submit("b")

    assert name not in state.jobs


def test_what_is_remembered_of_those_that_left_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "MAX_ENDED_SWEEPS", 1)
    cluster = SweepCluster(n1=2)
    names = [ended(cluster), ended(cluster)]
    cluster.controller.submit("b")

    assert list(cluster.controller.state.left_sweeps) == names[1:]


@pytest.mark.parametrize("seed", range(6))
def test_all_orders_are_the_same_as_if_no_sweep_left(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stays, leaves = Reactor(), Reactor()
    gone: dict[JobId, SweepHistory] = {}
    left: set[JobId] = set()
    history = [(at, input_from(body)) for at, body in of_sweeps(seed, 700).history]
    for at, event in with_ends(history):
        if hasattr(event, "user") and getattr(event, "job", None) in left:
            continue  # the shell answers that by itself
        with monkeypatch.context() as patch:
            patch.setattr(lifecycle, "remove_leaving", lambda _: None)
            expected = orders(stays.handle(event, at))
        stays.state.leaving_jobs.clear()
        assert orders(leaves.handle(event, at)) == expected
        for record in leaves.records:
            if isinstance(record, JobLeft):
                left.add(record.job)
            elif isinstance(record, SweepLeft):
                gone[record.job] = record.history

    assert gone
    assert {**leaves.totals.sweeps, **gone} == stays.totals.sweeps
    assert leaves.state.jobs == {n: j for n, j in stays.state.jobs.items() if n not in left}


def with_ends(history: list[tuple[Seconds, Input]]) -> list[tuple[Seconds, Input]]:
    """The last third of it behind an end of all that was submitted by then, and a new greeting."""
    here, before = 2 * len(history) // 3, Reactor()
    for at, event in history[:here]:
        before.handle(event, at)
    at = history[here - 1][0]
    ends: list[Input] = [builders.cancelled(name) for name in before.state.active]
    return [*history[:here], *((at, end) for end in ends), *history[here:]]


def orders(commands: list[Command]) -> dict[tuple[NodeId, JobId], list[Command]]:
    """To each node about each job, in their order."""
    found: dict[tuple[NodeId, JobId], list[Command]] = {}
    for command in commands:
        if isinstance(command, SendDelta | SendSweepDelta):
            found.setdefault((command.node, command.delta.job), []).append(command)
    return found
