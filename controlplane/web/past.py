"""Events of a range of time that the mirror of a cluster no longer holds."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from typing import Final, NamedTuple

from controlplane.client.allocations import Window
from controlplane.client.client import Client
from schemas.ids import JobId, NodeId, Seconds, SlotId
from schemas.jobs import ENDED
from schemas.wire.client import Decision, NodeInfo
from schemas.wire.feed import Detail, FeedEvent

STARTED: Final = "worker.started"
EXITED: Final = "worker.exited"
JOINED: Final = "node.joined"
CHARTED: Final = frozenset(  # events that charts are made from
    {STARTED, EXITED, JOINED, "job.starting", "job.rescaling", "policy.plan"}
    | {f"job.{state}" for state in ENDED}
)
PAGE: Final = 1000  # events of a page of the feed
MAX_PAGES: Final = 20  # of a range
MAX_HOLDERS: Final = 200  # jobs whose slots at the begin of a range are looked up
MOMENT_S: Final = 1e-3


Holder = tuple[JobId, SlotId]


class Past(NamedTuple):
    """Events of a range, with the workers that started before it."""

    events: tuple[FeedEvent, ...]
    end: float  # seconds since the epoch; before the end of the range if that has too many events
    begin: float = 0.0  # after the begin of the range if what is before has too many events


def charted(events: Iterable[FeedEvent]) -> list[FeedEvent]:
    """Return the events that charts are made from."""
    return [event for event in events if event.event in CHARTED]


def carried(events: Iterable[FeedEvent]) -> list[FeedEvent]:
    """Return the events that still matter after the last one: nodes, and workers that run."""
    nodes: dict[NodeId | None, FeedEvent] = {}
    workers: dict[tuple[object, ...], FeedEvent] = {}
    for event in events:
        if event.event == JOINED:
            nodes[event.node] = event
        elif event.event == STARTED:
            workers[_worker(event)] = event
        elif event.event == EXITED:
            workers.pop(_worker(event), None)
        elif event.event.removeprefix("job.") in ENDED:
            workers = {key: one for key, one in workers.items() if one.job != event.job}
    return sorted([*nodes.values(), *workers.values()], key=lambda event: event.seq)


def _worker(event: FeedEvent) -> tuple[object, ...]:
    return event.job, event.detail.get("version"), event.detail.get("rank")


def opened(held: Iterable[Holder], events: Iterable[FeedEvent], begin: Seconds) -> list[FeedEvent]:
    """Return starts at `begin` of the workers that held slots then, so that their exits match."""
    started: set[tuple[object, ...]] = set()
    exits: dict[tuple[object, object], FeedEvent] = {}
    for event in events:
        if event.event == STARTED:
            started.add(_worker(event))
        elif event.event == EXITED and _worker(event) not in started:
            exits.setdefault((event.job, event.detail.get("slot")), event)
    found = []
    for rank, (job, slot) in enumerate(held):
        unknown: Detail = {"slot": slot, "version": 0, "rank": rank}
        exited = exits.get((job, slot))
        detail = exited.detail if exited else unknown
        found.append(FeedEvent(seq=0, time=begin, event=STARTED, job=job, node=None, detail=detail))
    return found


def joined(nodes: Iterable[NodeInfo], at: Seconds) -> list[FeedEvent]:
    """Return an event for each node, which gives its slots rows in a chart."""
    return [
        FeedEvent(seq=0, time=at, event=JOINED, job=None, node=n.node, detail={"slots": n.slots})
        for n in nodes
    ]


async def holders(client: Client, at: float) -> list[Holder]:
    """Return the slots of jobs at a time, from the decisions about the jobs that used slots."""
    used = await client.usage(at, at + MOMENT_S)
    return [
        (job.job, slot)
        for job in used.jobs[:MAX_HOLDERS]
        for slot in _slots_at((await client.explain(job.job)).decisions, at)
    ]


async def read_past(client: Client, window: Window, last_seq: int) -> Past:
    """Read the events of a range of time, at most `MAX_PAGES` pages of them."""
    seq = await _first_seq(client, window.begin, last_seq)
    events, end = await _read(client, seq, window)
    held = await holders(client, window.begin)
    return Past((*opened(held, events, Seconds(window.begin)), *charted(events)), end)


async def _first_seq(client: Client, begin: float, last_seq: int) -> int:
    """Return the number of an event shortly before `begin`, or 1."""
    low, high = 1, last_seq
    while high - low > PAGE:
        middle = (low + high) // 2
        page = await _page(client, middle)
        if page and page[-1].time < begin:
            low = page[-1].seq
        else:
            high = middle
    return low


async def _page(client: Client, seq: int) -> tuple[FeedEvent, ...]:
    async with aclosing(client.event_pages(seq, follow=False)) as pages:  # type: ignore[type-var]
        async for page in pages:
            return page
    return ()


async def _read(client: Client, seq: int, window: Window) -> tuple[list[FeedEvent], float]:
    found: list[FeedEvent] = []
    count = 0
    async with aclosing(client.event_pages(seq, follow=False)) as pages:  # type: ignore[type-var]
        async for page in pages:
            found += [event for event in page if window.begin <= event.time <= window.end]
            count += 1
            if page[-1].time > window.end:
                break
            if count == MAX_PAGES:
                return found, max(page[-1].time, window.begin)
    return found, window.end


def _slots_at(decisions: Iterable[Decision], at: float) -> tuple[SlotId, ...]:
    slots: tuple[SlotId, ...] = ()
    for decision in decisions:
        if decision.time > at:
            break
        if decision.outcome in {"", "formed"} or not decision.to.slots:
            slots = decision.to.slots
    return slots
