"""`ones trace`: the life of a job in the trace format of Chrome and Perfetto.

The format is the JSON object format of the Trace Event Format: "X" is a span, "i" a moment, "C" a
curve, "M" the name of a lane. Times are in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter

from controlplane.cli.output import COMMON, Common, JobName, say
from controlplane.client import BlockingClient
from controlplane.client.allocations import job_histories
from controlplane.client.files import replacement
from schemas.ids import JobId
from schemas.wire.client import Decision, JobDetail
from schemas.wire.feed import FeedEvent

JOB, WORKERS, SCHEDULER = 1, 2, 3  # processes of the trace
Lane = tuple[int, int | str]  # process and thread; a worker's thread is its slot at first
STATES, RESCALES, DECISIONS, EPOCHS, PAUSES = ((JOB, lane) for lane in range(1, 6))
PLANS: Final = (SCHEDULER, 1)
LANES: Final[Mapping[Lane, str]] = {
    STATES: "state", RESCALES: "groups", DECISIONS: "decisions", EPOCHS: "epochs",
    PAUSES: "stands still", PLANS: "plans",
}  # fmt: skip
Entry = dict[str, Any]


def trace_of(
    detail: JobDetail, decisions: Sequence[Decision], events: Iterable[FeedEvent], until: float
) -> list[Entry]:
    """Return the entries of a trace of one job.

    Args:
        events: of the whole cluster, in order; those of plans are drawn, too.
        until: seconds since the epoch, the end of what still goes on.
    """
    job, every = detail.summary.job, list(events)
    own = [event for event in every if event.job == job]
    begin = detail.summary.submitted_at
    end = detail.summary.ended_at or until
    past = job_histories(own, end).get(job)
    entries = [
        _span(one.state, one.begin, one.end - one.begin, STATES)
        for one in (past.spans if past else ())
    ]
    for group in detail.versions:
        name = f"{group.kind}: {len(group.slots)} slots, batch {group.global_batch}"
        about = {"version": group.version, "outcome": group.outcome, "slots": list(group.slots)}
        entries.append(_span(name, group.time, group.took_s, RESCALES, about))
    for one in decisions:
        about = {"by": one.by, "code": one.code, **one.numbers}
        entries.append(_moment(one.reason, one.time, DECISIONS, about))
    starts = [begin, *(epoch.time for epoch in detail.epochs)]
    for epoch, (since, at) in zip(detail.epochs, pairwise(starts), strict=False):
        about = {"loss": epoch.train_loss, "lr": epoch.lr, **epoch.metrics}
        entries.append(_span(f"epoch {epoch.epoch}", since, at - since, EPOCHS, about))
        curves = {"batch size": epoch.global_batch, "samples/s": epoch.samples_per_s}
        entries += [_curve(name, at, value) for name, value in curves.items()]
    entries += _of_events(own, end)
    for event in every:
        if event.event == "policy.plan" and begin <= event.time <= end:
            took_s = float(event.detail.get("decision_ms") or 0.0) / 1000
            entries.append(_span("plan", event.time - took_s, took_s, PLANS, event.detail))
    return [*_names(job, entries), *entries]


def _of_events(own: Sequence[FeedEvent], end: float) -> Iterator[Entry]:
    """Yield the workers of the job, and the times in which it stood still."""
    began: dict[tuple[Any, Any], FeedEvent] = {}
    ready: dict[tuple[Any, Any], float] = {}
    for event in own:
        key = event.detail.get("version"), event.detail.get("rank")
        if event.event == "worker.started":
            began[key] = event
        elif event.event == "worker.ready" and key in began:
            ready[key] = event.time
            yield _worker("starts", began[key], began[key].time, event.time)
        elif event.event == "worker.exited" and key in began:
            start = began.pop(key)
            yield _worker("trains", start, ready.pop(key, start.time), event.time)
        elif event.event == "job.running" and event.detail.get("pause_ms"):
            pause_s = float(event.detail["pause_ms"] or 0.0) / 1000
            yield _span("pause", event.time - pause_s, pause_s, PAUSES, event.detail)
    for key, start in began.items():
        yield _worker("trains", start, ready.get(key, start.time), end)


def _worker(what: str, start: FeedEvent, begin: float, end: float) -> Entry:
    slot = str(start.detail.get("slot", ""))
    about = {name: start.detail.get(name) for name in ("rank", "version", "pid")}
    return _span(what, begin, end - begin, (WORKERS, slot), about)


def _names(job: JobId, entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield the names of all lanes. The lanes of slots get numbers in the order of their use."""
    processes = {JOB: job, WORKERS: "workers", SCHEDULER: "scheduler"}
    for pid, name in processes.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    slots: dict[str, int] = {}
    for entry in entries:
        if isinstance(entry["tid"], str):
            entry["tid"] = slots.setdefault(entry["tid"], len(slots) + 1)
    named = {**LANES} | {(WORKERS, number): slot for slot, number in slots.items()}
    for (pid, tid), name in named.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _span(
    name: str, begin: float, length: float, lane: Lane, about: Mapping[str, Any] | None = None
) -> Entry:
    pid, tid = lane
    times = {"ts": round(begin * 1e6), "dur": max(round(length * 1e6), 0)}
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, **times, "args": dict(about or {})}


def _moment(name: str, at: float, lane: Lane, about: Mapping[str, Any]) -> Entry:
    place = {"pid": lane[0], "tid": lane[1], "ts": round(at * 1e6), "s": "t"}
    return {"ph": "i", "name": name, **place, "args": dict(about)}


def _curve(name: str, at: float, value: float) -> Entry:
    place = {"pid": JOB, "tid": 0, "ts": round(at * 1e6)}
    return {"ph": "C", "name": name, **place, "args": {name: value}}


def trace(
    job: JobName,
    to: Annotated[Path | None, Parameter(help="file; default: JOB.trace.json")] = None,
    /,
    *,
    common: Common = COMMON,
) -> None:
    """Write a trace of a job for ui.perfetto.dev or chrome://tracing, and print its path.

    It shows states, groups, decisions with their numbers, epochs, workers and plans over time.
    """
    with BlockingClient(common.home) as client:
        detail, told = client.job(job), client.explain(job)
        events = tuple(client.events())
    until = max((event.time for event in events), default=detail.summary.submitted_at)
    entries = trace_of(detail, told.decisions, events, until)
    path = to or Path(f"{job}.trace.json")
    with replacement(path, "choose another file", "to") as fresh:
        text = json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"})
        fresh.write_text(text, encoding="utf-8")
    say(common, {"path": str(path), "entries": len(entries)}, str(path), quiet=[str(path)])
