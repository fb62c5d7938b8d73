"""Owners of slots over time, derived from the events of the cluster."""

from __future__ import annotations

import colorsys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, NamedTuple

from schemas.ids import (
    JobId,
    Rank,
    Seconds,
    SlotId,
    Version,
    WorkerId,
    index_of,
    node_of,
    slot_id,
    worker_id,
)
from schemas.jobs import ENDED
from schemas.wire.feed import FeedEvent

STATES: Final = {  # state of a job after each event; a rescaling job keeps training
    "submitted": "queued", "queued": "queued", "starting": "starting", "running": "running",
    "rescaling": "running", "paused": "paused",
}  # fmt: skip
PALETTE: Final = (
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#edc948", "#b07aa1",
    "#76b7b2", "#ff9da7", "#9c755f", "#8cd17d", "#17becf", "#6a5acd",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Allocation:
    """Period in which one worker owned a slot."""

    slot: SlotId
    job: JobId
    begin: Seconds  # since the epoch
    end: Seconds


class Span(NamedTuple):
    """Period in which a job had one state."""

    state: str  # queued, starting, running or paused
    begin: float  # seconds since the epoch
    end: float


class JobHistory(NamedTuple):
    """The states, batch sizes and rates of a job over time."""

    spans: tuple[Span, ...]  # contiguous, from submission to end of the job
    batches: tuple[tuple[float, int], ...]  # (time, global batch) of each change
    rates: tuple[tuple[float, float], ...]  # (end of an epoch, samples/s in that epoch)


class Window(NamedTuple):
    """Time range of a timeline; the axis of the timeline starts with 0 at `begin`."""

    begin: float  # seconds since the epoch
    end: float

    @property
    def length(self) -> float:
        """Length in seconds, or 1 for an empty range, so that every timeline has a scale."""
        return (self.end - self.begin) or 1.0


def allocations_from(events: Iterable[FeedEvent], until: float) -> tuple[Allocation, ...]:
    """Return the allocations of slots until time `until`, sorted by their start.

    `events` must contain all events of the feed, in order. A worker owns its slot from
    `worker.started` to `worker.exited`. The first workers of a job own their slots already from
    `job.starting`. If a worker was prepared while another one still owned the slot, its allocation
    starts when the allocation of the other one ends. If the exit of a worker was not recorded, its
    allocation ends with the job, or at `until`.
    """
    places: dict[WorkerId, tuple[SlotId, JobId, float]] = {}
    exits: dict[WorkerId, float] = {}
    ends: dict[JobId, float] = {}
    # Start orders without a report from their workers yet.
    ordered: dict[tuple[JobId, SlotId], float] = {}
    for event in events:
        if event.job is None or event.time > until:
            continue
        if event.event == "job.starting":
            slots = str(event.detail.get("slots") or "").split(", ")
            ordered |= {(event.job, SlotId(slot)): event.time for slot in slots if "/" in slot}
        elif event.event == "worker.started":
            slot = SlotId(str(event.detail["slot"]))
            begin = ordered.pop((event.job, slot), event.time)
            places.setdefault(_worker(event, event.job), (slot, event.job, begin))
        elif event.event == "worker.exited":
            exits.setdefault(_worker(event, event.job), event.time)
        elif event.event.removeprefix("job.") in ENDED:
            ends[event.job] = event.time
    free_from: dict[SlotId, float] = {}
    allocations = []
    for worker, (slot, job, began) in sorted(places.items(), key=lambda item: item[1][2]):
        begin = max(began, free_from.get(slot, began))
        end = exits.get(worker, ends.get(job, until))
        if end > begin:
            allocations.append(Allocation(slot, job, Seconds(begin), Seconds(end)))
            free_from[slot] = end
    return tuple(sorted(allocations, key=lambda one: (one.begin, slot_sort_key(one.slot))))


def job_histories(events: Iterable[FeedEvent], until: float) -> dict[JobId, JobHistory]:
    """Return states, batch sizes and rates of each job until time `until`, in order of submission.

    `events` must contain all events of the feed, in order.
    """
    states: dict[JobId, list[tuple[float, str]]] = {}
    batches: defaultdict[JobId, list[tuple[float, int]]] = defaultdict(list)
    rates: defaultdict[JobId, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event.job is None or event.time > until:
            continue
        name, detail = event.event.removeprefix("job."), event.detail
        if name == "submitted" or (event.job in states and name in {*STATES, *ENDED}):
            states.setdefault(event.job, []).append((event.time, STATES.get(name, name)))
        batch = detail.get("global_batch" if name == "epoch" else "batch")
        if name in {"epoch", "running"} and batch:
            begin: float = event.time
            known = batches[event.job]
            if name == "epoch" and not known:  # an epoch is the first report of that batch
                begin = next((at for at, s in states.get(event.job, ()) if s == "running"), begin)
            if not known or known[-1][1] != batch:
                known.append((begin, int(batch)))
        if name == "epoch" and detail.get("samples_per_s"):
            rates[event.job].append((event.time, float(detail["samples_per_s"] or 0.0)))
    return {
        job: JobHistory(_spans(found, until), tuple(batches[job]), tuple(rates[job]))
        for job, found in states.items()
    }


def _spans(states: Sequence[tuple[float, str]], until: float) -> tuple[Span, ...]:
    """Return the periods of each state until the job's end; adjacent equal periods are merged."""
    found: list[Span] = []
    for (begin, state), (end, _) in zip(states, [*states[1:], (until, "")], strict=True):
        if state in ENDED:
            break
        if found and found[-1].state == state:
            found[-1] = found[-1]._replace(end=end)
        else:
            found.append(Span(state, begin, end))
    return tuple(found)


def all_slots(events: Iterable[FeedEvent]) -> tuple[SlotId, ...]:
    """Return every slot of the nodes that joined and of the workers, sorted by node and index."""
    found: set[SlotId] = set()
    for event in events:
        if event.event == "node.joined" and event.node is not None:
            count = int(event.detail["slots"] or 0)
            found.update(slot_id(event.node, index) for index in range(count))
        elif event.event == "worker.started":
            found.add(SlotId(str(event.detail["slot"])))
    return tuple(sorted(found, key=slot_sort_key))


def slot_sort_key(slot: SlotId) -> tuple[list[tuple[int, str]], int]:
    """Return a sort key that puts node-2 before node-10."""
    parts = groupby(node_of(slot), str.isdigit)
    words = ((digits, "".join(letters)) for digits, letters in parts)
    return [(int(word), "") if digits else (-1, word) for digits, word in words], index_of(slot)


def clipped(allocations: Iterable[Allocation], window: Window) -> tuple[Allocation, ...]:
    """Return the parts of `allocations` that lie inside `window`."""
    found = []
    for one in allocations:
        begin, end = max(one.begin, window.begin), min(one.end, window.end)
        if end > begin:
            found.append(replace(one, begin=Seconds(begin), end=Seconds(end)))
    return tuple(found)


def _worker(event: FeedEvent, job: JobId) -> WorkerId:
    version, rank = (int(event.detail[name] or 0) for name in ("version", "rank"))
    return worker_id(job, Version(version), Rank(rank))


def full_window(allocations: Sequence[Allocation]) -> Window:
    """Return the range from the first start to the last end of all allocations."""
    begin = min((allocation.begin for allocation in allocations), default=Seconds(0.0))
    return Window(begin, max((allocation.end for allocation in allocations), default=begin))


def colour_indices(allocations: Iterable[Allocation]) -> dict[JobId, int]:
    """Return a colour index for each job, in order of appearance."""
    jobs = dict.fromkeys(allocation.job for allocation in allocations)
    return {job: index for index, job in enumerate(jobs)}


def job_colour(index: int) -> str:
    """Return the colour for an index: of `PALETTE`, then darker, then paler variants."""
    value = PALETTE[index % len(PALETTE)].removeprefix("#")
    rgb = (int(value[at : at + 2], 16) / 255 for at in (0, 2, 4))
    hue, lightness, saturation = colorsys.rgb_to_hls(*rgb)
    cycle = index // len(PALETTE) % 3
    saturation *= (1.0, 0.8, 1.0)[cycle]
    lightness = (lightness, lightness * 0.6, lightness * 0.6 + 0.4)[cycle]
    parts = colorsys.hls_to_rgb(hue, lightness, saturation)
    return "#" + "".join(f"{round(part * 255):02x}" for part in parts)
