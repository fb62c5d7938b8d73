"""Slots of jobs long ago: read for one range of time, they are those of the whole feed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final, cast

import pytest

from controlplane.client.allocations import Allocation, Window, allocations_from, clipped
from controlplane.client.client import Client
from controlplane.client.connection import Home
from controlplane.web import mirror, past
from controlplane.web.mirror import ClusterMirror
from schemas.ids import JobId, Seconds, SlotId
from schemas.wire.client import Decision, Explanation, JobUsage, Size, Usage
from schemas.wire.feed import FeedEvent
from tests.support.builders import S0, S1, T0, A, B, C, news

JOBS: Final = {  # slots from each time on
    A: ((10.0, (S0,)), (50.0, (S0, S1)), (80.0, ())),
    B: ((20.0, (S1,)), (45.0, ()), (90.0, (S0,))),
    C: tuple((float(at), (T0,) * (at % 2)) for at in range(11, 90, 3)),
}


def feed() -> list[FeedEvent]:
    """The events of three jobs, with an epoch each second."""
    told: list[tuple[float, str, JobId, dict[str, Any]]] = []
    for job, groups in JOBS.items():
        held: dict[SlotId, int] = {}
        for version, (at, slots) in enumerate(groups, 1):
            told += [
                (at, "worker.exited", job, {"slot": slot, "version": held.pop(slot), "rank": 0})
                for slot in tuple(held)
                if slot not in slots
            ]
            for slot in slots:
                if slot not in held:
                    held[slot] = version
                    detail = {"slot": slot, "version": version, "rank": 0}
                    told.append((at, "worker.started", job, detail))
        told += [(second + 0.5, "job.epoch", job, {}) for second in range(10, 100)]
    told.sort(key=lambda one: one[0])
    return [
        news(name, job, at=at, seq=seq, **detail).event
        for seq, (at, name, job, detail) in enumerate(told, 1)
    ]


FEED: Final = feed()


class Controller:
    """A controller with this feed, in pages of five events."""

    def __init__(self) -> None:
        self.pages = 0

    async def event_pages(self, seq: int, *, follow: bool) -> AsyncIterator[tuple[FeedEvent, ...]]:
        for first in range(seq - 1, len(FEED), 5):
            self.pages += 1
            yield tuple(FEED[first : first + 5])

    async def usage(self, since: float, until: float) -> Usage:
        used = dict.fromkeys(one.job for one in shown(FEED, Window(since, until)))
        rows = tuple(JobUsage(job=job, user="u", project="p", slot_s=1.0) for job in used)
        return Usage(since=Seconds(since), until=Seconds(until), jobs=rows)

    async def explain(self, job: JobId) -> Explanation:
        decisions = tuple(
            Decision(time=Seconds(at), before=Size(), to=Size(slots=slots), reason="")
            for at, slots in JOBS[job]
        )
        return Explanation(job=job, state="running", decisions=decisions)


def shown(events: Any, window: Window) -> list[Allocation]:
    return sorted(clipped(allocations_from(events, window.end), window), key=str)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past, "PAGE", 5)
    monkeypatch.setattr(past, "MAX_PAGES", 100)


WINDOWS: Final = ((0.0, 15.0), (12.0, 60.0), (55.0, 58.0), (30.0, 40.0), (60.0, 95.0), (91.0, 99.0))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
async def test_a_range_long_ago_shows_the_slots_of_the_whole_feed(
    window: tuple[float, float],
) -> None:
    whole = Window(*window)

    read = await past.read_past(cast("Client", Controller()), whole, len(FEED))

    assert (shown(read.events, whole), read.end) == (shown(FEED, whole), whole.end)


async def test_a_range_with_too_many_events_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past, "MAX_PAGES", 3)
    controller = Controller()

    read = await past.read_past(cast("Client", controller), Window(0.0, 99.0), len(FEED))

    assert read.end == FEED[14].time
    assert controller.pages < 3 + len(FEED).bit_length()


async def test_a_mirror_that_forgot_its_oldest_events_shows_the_same_slots(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(mirror, "MAX_EVENTS", 10)
    copy = ClusterMirror(Home(tmp_path, "", tmp_path, tmp_path))

    await copy._read_events(cast("Client", Controller()), 1)

    assert len(copy._events) <= 10
    late = Window(copy._held_from, 99.0)
    assert copy.begin == 0.0
    assert shown(copy.latest_events(), late) == shown(FEED, late)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
async def test_a_mirror_joins_older_events_with_its_own_and_reads_them_once(
    window: tuple[float, float], tmp_path: Any
) -> None:
    copy, controller = ClusterMirror(Home(tmp_path, "", tmp_path, tmp_path)), Controller()
    first = next(event.seq for event in FEED if event.time > 47.0)
    await copy._read_events(cast("Client", controller), first)
    copy._client = cast("Client", controller)
    whole = Window(*window)

    found = await copy.events_of(whole)
    pages = controller.pages
    again = await copy.events_of(Window(whole.begin + 0.01, whole.end))

    assert (shown(found.events, whole), found.end) == (shown(FEED, whole), whole.end)
    assert (again.end, controller.pages) == (whole.end, pages)


async def test_a_mirror_that_begins_late_knows_who_held_slots_then(tmp_path: Any) -> None:
    copy = ClusterMirror(Home(tmp_path, "", tmp_path, tmp_path))
    first = next(event.seq for event in FEED if event.time > 47.0)

    await copy._read_events(cast("Client", Controller()), first)

    late = Window(FEED[first - 1].time, 99.0)
    assert shown(copy.latest_events(), late) == shown(FEED, late)
