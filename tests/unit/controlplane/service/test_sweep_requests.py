"""What clients see of a sweep, and what they may change."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from controlplane.core.history import SweepHistory, TrialHistory
from controlplane.service.api.changes import change_input, change_or_repeat
from controlplane.service.api.replies import job_summary
from controlplane.service.api.sweep_replies import (
    MAX_ROW_BYTES,
    ledger,
    sweep_detail,
    trial_info,
    trial_state,
)
from controlplane.service.worker_telemetry import TelemetryTable
from schemas.errors import OnesError
from schemas.ids import JobId, NodeId, Seconds
from schemas.sweeps import Parameter, RandomSearch, choice, integer
from schemas.wire.client import ChangeSweep, GetLedger, GetSweep, Ledger, SweepDetail
from tests.support.sweep_world import SweepCluster, sweep_job

SPACE = {
    "lr": Parameter(log_uniform=(1e-4, 0.1)),
    "kind": choice("a", "b"),
    "layers": Parameter(integer=(1, 4), when={"kind": ("b",)}),
}


def running(**changes: Any) -> tuple[SweepCluster, JobId]:
    cluster = SweepCluster(n1=2)
    name = cluster.submit(**sweep_job((1, 2), **changes))
    cluster.place({name: cluster.slots()})
    cluster.settle()
    return cluster, name


def detail(cluster: SweepCluster, name: JobId, **page: int) -> SweepDetail:
    job, now = cluster.job(name), Seconds(cluster.controller.now)
    summary = job_summary(job, None, TelemetryTable(), now)
    history = cluster.controller.reactor.totals.sweep_of(name)
    return sweep_detail(job, history, summary, GetSweep(job=name, **page), now)


def units(cluster: SweepCluster, name: JobId, **page: int) -> Ledger:
    history = cluster.controller.reactor.totals.sweep_of(name)
    return ledger(cluster.job(name), history, GetLedger(job=name, **page))


def test_a_sweep_shows_place_and_progress_of_each_trial() -> None:
    cluster, name = running()
    cluster.end_unit(name, 0)

    shown = detail(cluster, name)

    states = {trial.number: (trial.state, trial.partitions_left) for trial in shown.trials}
    assert shown.trials_total == 3
    assert states[0][1] == 1
    assert sorted(state for state, _ in states.values()) == ["training", "training", "waiting"]
    assert {trial.slot for trial in shown.trials if trial.state == "training"} == set(
        cluster.slots()
    )
    assert (shown.units_done, shown.units_left, shown.unit_s) == (1, 11, 2.0)
    assert shown.expected_end == cluster.controller.now + 11 * 2.0 / 2
    assert shown.summary.progress == 1 / 12
    assert shown.trained_s == 2.0


def test_trials_and_units_come_in_pages() -> None:
    cluster, name = running(searcher=RandomSearch(5))
    cluster.end_unit(name)
    cluster.end_unit(name)

    assert [t.number for t in detail(cluster, name, from_trial=3, limit=10).trials] == [3, 4]
    assert [t.number for t in detail(cluster, name, limit=2).trials] == [0, 1]
    assert len(units(cluster, name).units) == units(cluster, name).units_total == 2
    assert units(cluster, name, from_unit=1).units == units(cluster, name).units[1:]


def test_a_trial_of_many_epochs_and_metrics_fits_a_message() -> None:
    cluster, name = running()
    one = {f"metric_{at:03}": 1.0 for at in range(100)}
    past = TrialHistory(metrics=[one] * 5000, ended_at=[Seconds(0.0)] * 5000)
    history = SweepHistory(trials={0: past})

    row = trial_info(cluster.job(name), cluster.sweep(name), history, 0)

    assert len(msgspec.msgpack.encode(row)) < MAX_ROW_BYTES + 100_000
    assert len(row.metrics) == len(row.ended_at) > 200
    assert row.first_epoch == 5000 - len(row.metrics) + 1, "the latest ones"


def test_the_ledger_has_every_unit_with_the_digest_of_its_state() -> None:
    cluster, name = running()
    cluster.end_unit(name, 0)

    (unit,) = units(cluster, name).units

    assert (unit.trial, unit.values_of, unit.version, unit.epoch, unit.node) == (
        0,
        0,
        1,
        1,
        NodeId("n1"),
    )
    assert unit.digest == cluster.sweep(name).engine.state.models[0].digest(1)


@pytest.mark.parametrize(
    ("wanted", "what"),
    [
        ({"change": "stop"}, "trial: missing, stop needs one"),
        ({"change": "stop", "trial": 9}, "trial: no trial 9"),
        ({"change": "resume", "trial": 0}, "trial: 0 is not paused"),
        ({"change": "add", "parent": -1}, "parent: no trial -1"),
        ({"change": "add", "values": {"lr": 0.1}}, "values.kind is missing"),
        ({"change": "add", "values": {"rate": 1}}, "values.rate is not a value of this sweep"),
        (
            {"change": "add", "values": {"lr": 0.1, "kind": "c"}},
            "values.kind = 'c' is not one of its choices",
        ),
        ({"change": "add", "values": {"lr": "x", "kind": "a"}}, "values.lr = 'x' is not a number"),
        (
            {"change": "add", "values": {"lr": 0.1, "kind": "a", "layers": 1}},
            "values.layers applies only with kind in ['b']",
        ),
        (
            {"change": "add", "values": {"lr": 0.1, "kind": "b", "layers": 1.5}},
            "values.layers = 1.5 is not an integer",
        ),
    ],
)
def test_an_impossible_change_is_refused_with_its_field(wanted: dict[str, Any], what: str) -> None:
    cluster, name = running(space=SPACE)

    with pytest.raises(OnesError) as refused:
        change_input(cluster.job(name), ChangeSweep(job=name, **wanted), "ann")

    assert refused.value.message == what
    assert refused.value.field
    assert refused.value.hint


def test_a_fully_trained_trial_cannot_be_a_parent() -> None:
    cluster, name = running(space=SPACE)
    models = cluster.sweep(name).engine.state.models
    while not (through := [model.trial for model in models if model.whole_epochs == 2]):
        cluster.end_unit(name)
    add = ChangeSweep(job=name, change="add", parent=through[0])

    with pytest.raises(OnesError, match="has trained all 2 epochs") as refused:
        change_input(cluster.job(name), add, "ann")

    assert refused.value.field == "parent"


def test_an_ordinary_job_is_not_a_sweep() -> None:
    cluster = SweepCluster(n1=1)
    name = cluster.submit()

    with pytest.raises(OnesError, match="is not a sweep"):
        change_or_repeat(cluster.job(name), ChangeSweep(job=name, change="stop", trial=0), "ann")


def test_a_repeated_change_is_answered_again() -> None:
    cluster, name = running(space={"layers": integer(1, 4)})
    request = ChangeSweep(job=name, change="add", values={"layers": 9}, key="k")

    cluster.take(change_input(cluster.job(name), request, "ann"))

    assert change_or_repeat(cluster.job(name), request, "ann") == (3, None)
    assert trial_state(cluster.sweep(name), 3) == "waiting"
    assert change_or_repeat(cluster.job(name), request, "bob")[1] is not None
