"""Traces of jobs in the format of Perfetto."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from controlplane.cli.trace import trace_of
from schemas.ids import Seconds, Version
from schemas.wire.client import Decision, JobDetail, Size, VersionInfo
from schemas.wire.feed import FeedEvent
from tests.support.builders import S0, S1, A, B, news
from tests.unit.controlplane.web.test_views import example, summary


def told(event: str, job: str | None, at: float, **detail: Any) -> FeedEvent:
    return news(event, job, at=at, **detail).event


FIRST, SECOND = {"rank": 0, "version": 1, "slot": S0}, {"rank": 1, "version": 2, "slot": S1}
EVENTS: Final = (
    told("job.submitted", A, 10.0),
    told("policy.plan", None, 11.0, view_ms=125.0, improve_ms=0.0, decision_ms=250.0, check_ms=125.0),
    told("job.starting", A, 11.0, slots=S0),
    told("worker.started", A, 12.0, pid=7, **FIRST),
    told("worker.started", B, 12.5, slot=S0, pid=8, rank=0, version=1),
    told("worker.ready", A, 14.0, imports_s=0.5, **FIRST),
    told("job.running", A, 15.0, slots=1, batch=64),
    told("worker.started", A, 21.0, pid=9, **SECOND),
    told("worker.ready", A, 23.0, **SECOND),
    told("job.running", A, 25.5, pause_ms=250.0, slots=1, batch=64),
    told("worker.exited", A, 26.0, code=0, **FIRST),
    told("job.succeeded", A, 30.0),
    told("policy.plan", None, 40.0, decision_ms=500.0),  # after its end
)  # fmt: skip
EPOCH: Final = msgspec.structs.replace(
    example(JobDetail).epochs[0], epoch=1, time=Seconds(18.0), train_loss=0.5, lr=0.1, metrics={"accuracy": 0.75},
    global_batch=64, samples_per_s=100.0,
)  # fmt: skip
GROUPS: Final = tuple(
    VersionInfo(
        version=Version(version), resumed_epoch=0, time=Seconds(time), slots=(slot,), kind=kind,
        global_batch=64, outcome="formed", took_s=took_s,
    )
    for version, time, slot, kind, took_s in ((1, 11.0, S0, "start", 4.0), (2, 20.0, S1, "join", 5.5))
)  # fmt: skip
STARTS: Final = Decision(
    time=Seconds(11.0), before=Size(), to=Size(), reason="starts", code="fill", numbers={"x": 1.0},
    version=Version(1),
)  # fmt: skip
MOVES: Final = Decision(
    time=Seconds(20.0), before=Size(), to=Size(), reason="moves", version=Version(2),
    numbers={
        "prepare_s": 3.0, "connect_s": 0.5, "switch_s": 1.5, "pause_ms": 250.0, "transfer_s": 1.0,
    },
)  # fmt: skip


def spans(entries: list[dict[str, Any]]) -> list[tuple[str, str, int, int]]:
    """Lane, name, begin and length of each span, in ms."""
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["ph"] == "M"}
    return [
        (lanes[e["pid"], e["tid"]], e["name"], e["ts"] // 1000, e["dur"] // 1000)
        for e in entries
        if e["ph"] == "X"
    ]


def test_a_trace_has_the_states_changes_epochs_workers_and_plans_of_a_job() -> None:
    job = summary(A, submitted_at=Seconds(10.0), ended_at=Seconds(30.0))
    detail = example(JobDetail, summary=job, versions=GROUPS, epochs=(EPOCH,))

    entries = trace_of(detail, (STARTS, MOVES), EVENTS, until=50.0)

    assert spans(entries) == [
        ("state", "queued", 10_000, 1000),
        ("state", "starting", 11_000, 4000),
        ("state", "running", 15_000, 15_000),
        ("groups", "start: 1 slots, batch 64", 11_000, 4000),
        ("groups", "workers start", 11_000, 3000),
        ("groups", "form the group", 14_000, 1000),
        ("groups", "join: 1 slots, batch 64", 20_000, 6000),
        ("groups", "newcomers start", 20_000, 3000),
        ("groups", "switch", 23_000, 1500),
        ("groups", "connect", 23_000, 500),
        ("groups", "pause", 24_250, 250),
        ("groups", "transfer the state", 24_500, 1000),
        ("groups", "old workers leave", 25_500, 500),
        ("epochs", "epoch 1", 10_000, 8000),
        (S0, "starts", 12_000, 2000),
        (S0, "imports", 12_000, 500),
        (S1, "starts", 21_000, 2000),
        (S0, "trains", 14_000, 12_000),
        (S1, "trains", 23_000, 7000),
        ("plans", "plan", 10_500, 500),
        ("plans", "view", 10_500, 125),
        ("plans", "decision", 10_625, 250),
        ("plans", "check", 10_875, 125),
    ]
    moments = [entry for entry in entries if entry["ph"] == "i"]
    assert [(one["name"], one["ts"], one["args"]) for one in moments] == [
        ("starts", 11_000_000, {"by": "policy", "code": "fill", "x": 1.0}),
        ("moves", 20_000_000, {"by": "policy", "code": "", **MOVES.numbers}),
    ]
    assert [(e["name"], e["args"]) for e in entries if e["ph"] == "C"] == [
        ("batch size", {"batch size": 64}), ("samples/s", {"samples/s": 100.0}),
    ]  # fmt: skip


def test_a_change_under_way_lasts_until_now() -> None:
    under_way = msgspec.structs.replace(GROUPS[1], outcome="", took_s=0.0)
    job = summary(A, submitted_at=Seconds(10.0), ended_at=None)
    detail = example(JobDetail, summary=job, versions=(under_way,), epochs=())

    entries = trace_of(detail, (MOVES,), (), until=50.0)

    assert spans(entries) == [("groups", "join: 1 slots, batch 64", 20_000, 30_000)]
