"""Charts of the web page: their columns, and their documents."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from controlplane.client.allocations import Window
from controlplane.web import charts
from schemas.ids import Seconds
from schemas.wire.client import JobDetail, VersionInfo
from schemas.wire.feed import FeedEvent
from tests.support.builders import N1, S0, S1, A, B, job_spec, news
from tests.unit.controlplane.web.test_views import example, summary


def told(event: str, job: str, at: float, **detail: Any) -> FeedEvent:
    return news(event, job, at=at, **detail).event


def started(job: str, slot: str, at: float) -> FeedEvent:
    return told("worker.started", job, at, slot=slot, rank=0, version=1, pid=7)


EVENTS: Final = (
    news("node.joined", N1, slots=2).event,
    started(A, S0, 10.0),
    started(B, S1, 20.0),
    told("job.rescaling", A, 30.0, reason="batch up"),
    told("job.succeeded", B, 60.0),
)


def test_the_gantt_shows_slots_jobs_and_rescales_inside_its_window() -> None:
    shown = charts.columns(charts.gantt(EVENTS, Window(15.0, 100.0)))

    assert shown["bars"] | {"colour": None} == {
        "begin": [15_000.0, 20_000.0], "end": [100_000.0, 60_000.0],
        "top": [1.42, 0.42], "bottom": [pytest.approx(0.58), -0.42], "colour": None,
        "job": [A, B], "slot": [S0, S1], "length": ["1m25s", "40.0s"],
        "since": ["1970-01-01T00:00:15Z", "1970-01-01T00:00:20Z"],
    }  # fmt: skip
    assert len(set(shown["bars"]["colour"])) == 2
    assert shown["rescales"] == {"at": [30_000.0], "row": [1.42], "job": [A], "why": ["batch up"]}
    assert shown["time"] == {"start": 15_000.0, "end": 100_000.0}


def test_a_job_has_a_curve_for_each_metric_and_a_mark_for_each_group() -> None:
    groups = [
        VersionInfo(version=n, resumed_epoch=0, time=at, slots=slots, global_batch=64 * n)  # type: ignore[arg-type]
        for n, at, slots in ((1, 10.0, (S0,)), (2, 40.0, (S0, S1)))
    ]
    job = summary(submitted_at=Seconds(5.0), ended_at=Seconds(90.0))
    detail = example(JobDetail, summary=job, versions=tuple(groups))

    shown = charts.columns(charts.job_chart(detail, until=0.0))

    names = {"slots", "batch size", "learning rate", "loss", "samples/s", "time"}
    names |= {name for epoch in detail.epochs for name in epoch.metrics}
    assert {name for name in shown if not name.startswith("groups")} == names
    assert shown["slots"] == {"at": [10_000.0, 40_000.0, 90_000.0], "value": [1, 2, 2]}
    assert shown["groups beside loss"] == {"at": [40_000.0], "kind": ["start"]}
    assert shown["time"] == {"start": 5_000.0, "end": 90_000.0}


def test_a_program_has_a_curve_of_its_slots_only() -> None:
    detail = example(JobDetail, spec=job_spec(kind="command"), versions=())

    shown = charts.columns(charts.job_chart(detail, until=0.0))

    assert {name for name in shown if not name.startswith("groups")} == {"slots", "time"}


def test_a_chart_of_nothing_is_a_document_without_other_hosts() -> None:
    for dark in (False, True):
        document = json.dumps(charts.document(charts.gantt((), Window(0.0, 1.0)), dark=dark))

        assert "http" not in document
