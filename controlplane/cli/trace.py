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
from controlplane.cli.progress import progress
from controlplane.client import BlockingClient
from controlplane.client.allocations import job_histories
from controlplane.client.files import replacement
from schemas.ids import JobId
from schemas.wire.agent import JOIN, RECOVER, START
from schemas.wire.client import Decision, JobDetail, VersionInfo
from schemas.wire.feed import FeedEvent

JOB, WORKERS, SCHEDULER = 1, 2, 3  # processes of the trace
Lane = tuple[int, int | str]  # process and thread; a worker's thread is its slot at first
STATES, RESCALES, DECISIONS, EPOCHS = ((JOB, lane) for lane in range(1, 5))
PLANS: Final = (SCHEDULER, 1)
LANES: Final[Mapping[Lane, str]] = {
    STATES: "state", RESCALES: "groups", DECISIONS: "decisions", EPOCHS: "epochs", PLANS: "plans",
}  # fmt: skip
TURN: Final = ("view", "improve", "decision", "check")  # phases of a plan, from events in ms
Entry = dict[str, Any]
PREPARES: Final = {
    START: "workers start", JOIN: "newcomers start", RECOVER: "survivors stop",
}  # fmt: skip


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
    entries = [_span(one.state, one.begin, one.end, STATES) for one in (past.spans if past else ())]
    numbers = {one.version: one.numbers for one in decisions}
    ends = [*(group.time for group in detail.versions[1:]), end]
    for group, next_at in zip(detail.versions, ends, strict=False):
        entries += _group(group, numbers.get(group.version, {}), own, next_at)
    for one in decisions:
        about = {"by": one.by, "code": one.code, **one.numbers}
        entries.append(_moment(one.reason, one.time, DECISIONS, about))
    starts = [begin, *(epoch.time for epoch in detail.epochs)]
    for epoch, (since, at) in zip(detail.epochs, pairwise(starts), strict=False):
        about = {"loss": epoch.train_loss, "lr": epoch.lr, **epoch.metrics}
        entries.append(_span(f"epoch {epoch.epoch}", since, at, EPOCHS, about))
        curves = {"batch size": epoch.global_batch, "samples/s": epoch.samples_per_s}
        entries += [_curve(name, at, value) for name, value in curves.items()]
    entries += _workers(own, end)
    for event in every:
        if event.event == "policy.plan" and begin <= event.time <= end:
            entries += _turn(event)
    return [*_names(job, entries), *entries]


def _group(
    group: VersionInfo, numbers: Mapping[str, float], own: Sequence[FeedEvent], next_at: float
) -> Iterator[Entry]:
    """Yield the change to a group, and its phases beneath until the next change.

    The change ends when the last worker that is not in the group has exited.
    """
    ordered, formed = group.time, group.time + group.took_s if group.outcome else next_at
    ready = [event.time for event in own if _is(event, "worker.ready", group.version)]
    prepared = ordered + numbers.get("prepare_s", 0.0)
    if group.kind == START and ready:
        prepared = max(ready)
    switched = formed - numbers.get("transfer_s", 0.0)
    pauses = max(switched - numbers.get("pause_ms", 0.0) / 1000, prepared)
    left = [at for at in _exits_of_others(group, own) if formed <= at < next_at]
    name = f"{group.kind}: {len(group.slots)} slots, batch {group.global_batch}"
    about = {"version": group.version, "outcome": group.outcome, "slots": list(group.slots)}
    about |= {"took_s": group.took_s}
    yield _span(name, ordered, min(max([formed, *left]), next_at), RESCALES, about)
    if group.outcome != "formed":
        return
    phases = [
        (PREPARES.get(group.kind, "prepare"), ordered, prepared),
        ("switch" if group.kind == JOIN else "form the group", prepared, switched),
        ("connect", prepared, min(prepared + numbers.get("connect_s", 0.0), pauses)),
        ("pause", pauses, switched),
        ("transfer the state", switched, formed),
        ("old workers leave", formed, max(left, default=formed)),
    ]
    yield from (_span(*phase, RESCALES) for phase in phases if phase[2] > phase[1])


def _exits_of_others(group: VersionInfo, own: Sequence[FeedEvent]) -> Iterator[float]:
    """Yield when workers exited on slots that are not in the group."""
    for event in own:
        if event.event == "worker.exited" and event.detail.get("slot") not in group.slots:
            yield event.time


def _is(event: FeedEvent, name: str, version: int) -> bool:
    return event.event == name and event.detail.get("version") == version


def _workers(own: Sequence[FeedEvent], end: float) -> Iterator[Entry]:
    """Yield the workers of the job: their starts with the imports of the script, and the rest."""
    began: dict[tuple[Any, Any], FeedEvent] = {}
    ready: dict[tuple[Any, Any], float] = {}
    for event in own:
        key = event.detail.get("version"), event.detail.get("rank")
        if event.event == "worker.started":
            began[key] = event
        elif event.event == "worker.ready" and key in began:
            since, ready[key] = began[key].time, event.time
            yield _worker("starts", began[key], since, event.time)
            if imports_s := float(event.detail.get("imports_s") or 0.0):
                yield _worker("imports", began[key], since, min(since + imports_s, event.time))
        elif event.event == "worker.exited" and key in began:
            start = began.pop(key)
            yield _worker("trains", start, ready.pop(key, start.time), event.time)
    for key, start in began.items():
        yield _worker("trains", start, ready.get(key, start.time), end)


def _worker(what: str, start: FeedEvent, begin: float, end: float) -> Entry:
    slot = str(start.detail.get("slot", ""))
    about = {name: start.detail.get(name) for name in ("rank", "version", "pid")}
    return _span(what, begin, end, (WORKERS, slot), about)


def _turn(event: FeedEvent) -> Iterator[Entry]:
    """Yield a plan that was accepted, and its measured phases, which end at its acceptance."""
    took = {name: float(event.detail.get(f"{name}_ms") or 0.0) / 1000 for name in TURN}
    begin = event.time - sum(took.values())
    yield _span("plan", begin, event.time, PLANS, event.detail)
    for name, took_s in took.items():
        if took_s:
            yield _span(name, begin, min(begin + took_s, event.time), PLANS)
            begin += took_s


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
    name: str, begin: float, end: float, lane: Lane, about: Mapping[str, Any] | None = None
) -> Entry:
    pid, tid = lane
    times = {"ts": round(begin * 1e6), "dur": max(round(end * 1e6) - round(begin * 1e6), 0)}
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

    It shows states, changes of the group with their phases, decisions with their numbers, epochs,
    workers and plans over time.
    """
    with progress(common.output, "reading events"), BlockingClient(common.home) as client:
        detail, told = client.job(job), client.explain(job)
        events = tuple(client.events())
    until = max((event.time for event in events), default=detail.summary.submitted_at)
    entries = trace_of(detail, told.decisions, events, until)
    path = to or Path(f"{job}.trace.json")
    with replacement(path, "choose another file", "to") as fresh:
        text = json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"})
        fresh.write_text(text, encoding="utf-8")
    say(common, {"path": str(path), "entries": len(entries)}, str(path), quiet=[str(path)])
