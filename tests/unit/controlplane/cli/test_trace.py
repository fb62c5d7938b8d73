"""Traces of jobs in the format of Perfetto."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from controlplane.cli.trace import trace_of
from schemas.ids import Seconds
from schemas.wire.client import Decision, JobDetail, Size, VersionInfo
from schemas.wire.feed import FeedEvent
from tests.support.builders import S0, A, B, news
from tests.unit.controlplane.web.test_views import example, summary


def told(event: str, job: str | None, at: float, **detail: Any) -> FeedEvent:
    return news(event, job, at=at, **detail).event


WORKER: Final = {"rank": 0, "version": 1}
EVENTS: Final = (
    told("job.submitted", A, 10.0),
    told("policy.plan", None, 11.0, decision_ms=500.0),
    told("job.starting", A, 11.0, slots=S0),
    told("worker.started", A, 12.0, slot=S0, pid=7, **WORKER),
    told("worker.started", B, 12.5, slot=S0, pid=8, **WORKER),
    told("worker.ready", A, 14.0, slot=S0, **WORKER),
    told("job.running", A, 15.0, pause_ms=250.0, slots=1, batch=64),
    told("job.succeeded", A, 20.0),
    told("policy.plan", None, 30.0, decision_ms=500.0),  # after its end
)
EPOCH: Final = msgspec.structs.replace(
    example(JobDetail).epochs[0], epoch=1, time=Seconds(18.0), train_loss=0.5, lr=0.1, metrics={"accuracy": 0.75},
    global_batch=64, samples_per_s=100.0,
)  # fmt: skip
GROUP: Final = VersionInfo(
    version=1, resumed_epoch=0, time=Seconds(11.0), slots=(S0,), global_batch=64,
    outcome="formed", took_s=4.0,
)  # type: ignore[arg-type]  # fmt: skip
GROWS: Final = Decision(
    time=Seconds(11.0), before=Size(), to=Size(), reason="starts", code="fill", numbers={"x": 1.0}
)


def spans(entries: list[dict[str, Any]]) -> list[tuple[str, str, int, int]]:
    """Lane, name, begin and length of each span, in ms."""
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["ph"] == "M"}
    return [
        (lanes[e["pid"], e["tid"]], e["name"], e["ts"] // 1000, e["dur"] // 1000)
        for e in entries
        if e["ph"] == "X"
    ]


def test_a_trace_has_the_states_groups_epochs_workers_pauses_and_plans_of_a_job() -> None:
    job = summary(A, submitted_at=Seconds(10.0), ended_at=Seconds(20.0))
    detail = example(JobDetail, summary=job, versions=(GROUP,), epochs=(EPOCH,))

    entries = trace_of(detail, (GROWS,), EVENTS, until=40.0)

    assert spans(entries) == [
        ("state", "queued", 10_000, 1000),
        ("state", "starting", 11_000, 4000),
        ("state", "running", 15_000, 5000),
        ("groups", "start: 1 slots, batch 64", 11_000, 4000),
        ("epochs", "epoch 1", 10_000, 8000),
        (S0, "starts", 12_000, 2000),
        ("stands still", "pause", 14_750, 250),
        (S0, "trains", 14_000, 6000),
        ("plans", "plan", 10_500, 500),
    ]
    (moment,) = (entry for entry in entries if entry["ph"] == "i")
    assert (moment["name"], moment["ts"], moment["args"]) == (
        "starts", 11_000_000, {"by": "policy", "code": "fill", "x": 1.0},
    )  # fmt: skip
    assert [(e["name"], e["args"]) for e in entries if e["ph"] == "C"] == [
        ("batch size", {"batch size": 64}), ("samples/s", {"samples/s": 100.0}),
    ]  # fmt: skip
