"""Reports of units come from users' processes: whatever they say, the sweep goes on to its end."""

from __future__ import annotations

import math
from typing import Any

import pytest

from schemas.ids import Rank, Version
from schemas.sweeps import MAX_EPOCH_METRICS, MAX_METRIC, RandomSearch
from schemas.wire.agent import (
    MAX_TEXT,
    UnitEnded,
    UnitFailed,
    UnitStarted,
    bounded_report,
)
from tests.support.builders import A, epoch_end
from tests.unit.controlplane.core.test_sweeps import busy, running, train

ENDED: dict[str, Any] = {
    "metrics": {"loss": 1.0},
    "samples": 10,
    "seconds": 2.0,
    "scores": {"accuracy": 0.5},
    "digest": "0" * 64,
    "size": 100,
}


@pytest.mark.parametrize(
    "said",
    [
        {"samples": -5},
        {"samples": 2**63},
        {"seconds": math.inf},
        {"seconds": math.nan},
        {"seconds": -1e300},
        {"metrics": {"loss": math.inf}},
        {"metrics": {f"m{n}": 0.0 for n in range(5000)}},
        {"metrics": {"\x1b[31m": 0.0}},
        {"scores": {"accuracy": math.nan}},
        {"digest": "\x1b[31m" * 1000},
        {"size": -(2**62)},
    ],
    ids=[
        "negative samples", "too many samples", "endless", "no number", "negative seconds",
        "infinite metric", "many metrics", "control characters", "score that is no number",
        "digest", "negative size",
    ],
)  # fmt: skip
def test_a_sweep_goes_on_whatever_a_worker_says_of_a_unit(said: dict[str, Any]) -> None:
    cluster, name = running(slots=2, searcher=RandomSearch(3))
    liar = busy(cluster, name)[0]
    unit = liar.unit
    assert unit is not None
    liar.unit = None
    liar.done.add(unit.attempt)

    samples = said.get("samples", 10)
    liar.report(UnitStarted, attempt=unit.attempt, samples=samples, waited_s=math.nan, staged_s=0.0)
    liar.report(UnitEnded, attempt=unit.attempt, **{**ENDED, **said})
    cluster.settle()
    view = cluster.controller.view().jobs[name]
    train(cluster, name)

    assert view.samples_done >= 0
    assert math.isfinite(view.samples_per_s)
    assert cluster.job(name).progress.epoch_samples >= 0
    history = cluster.controller.sweep_history(name)
    unit_said = next(one for one in history.units if one.trial == unit.result.trial)
    assert len(unit_said.metrics) <= 100
    assert all(text.isprintable() for text in (*unit_said.metrics, unit_said.digest))
    assert 0.0 <= unit_said.seconds <= 1e8
    assert math.isfinite(history.waited_s)
    assert cluster.controller.replayed() == cluster.controller.state


def test_a_reason_is_one_line_of_bounded_length() -> None:
    cluster, name = running(slots=1)
    liar = busy(cluster, name)[0]
    assert liar.unit is not None

    why = "\x1b]0;owned\x07\n" * 10_000
    liar.report(UnitFailed, attempt=liar.unit.attempt, reason=why, fault="\x1b[31m")
    liar.done.add(liar.unit.attempt)
    liar.unit = None
    cluster.settle()

    told = [event.detail for event in cluster.told if event.event == "sweep.unit_failed"]
    assert [(len(str(one["reason"])), one["fault"]) for one in told] == [(2000, "trial")]
    assert str(told[0]["reason"]).isprintable()


MANY = {f"m{number}": 0.5 for number in range(MAX_EPOCH_METRICS + 5)}


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ({"accuracy": 0.5, "loss": 1e300}, {"accuracy": 0.5, "loss": 1e300}),
        ({"accuracy": 0.5, "a": math.nan, "b": math.inf}, {"accuracy": 0.5}),
        ({"n" * 500: 1.0}, {"n" * MAX_METRIC: 1.0}),
        ({"\x1b[31m": 1.0}, {" [31m": 1.0}),
        (MANY, {f"m{number}": 0.5 for number in range(MAX_EPOCH_METRICS)}),
    ],
    ids=["as scripts may", "not finite", "long names", "escapes", "many"],
)
def test_metrics_of_an_epoch_are_within_bounds_before_they_are_an_input(
    said: dict[str, float], kept: dict[str, float]
) -> None:
    report = epoch_end(A, 1, metrics=said)

    assert bounded_report(report) == epoch_end(A, 1, metrics=kept)
    assert (bounded_report(report) is report) == (said == kept)


def test_a_long_error_keeps_its_beginning_and_its_end() -> None:
    long = "CUDA error " + "x" * 4_000_000 + " the end"
    report = UnitFailed(
        job=A, version=Version(1), rank=Rank(0), index=1, attempt=1, reason=long, fault="trial"
    )

    error = bounded_report(report).reason

    assert len(error) <= MAX_TEXT
    assert error.startswith("CUDA error xxx")
    assert "characters left out) ..." in error
    assert error.endswith(" the end")
