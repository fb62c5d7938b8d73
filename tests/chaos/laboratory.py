"""One run: a site, its users, the faults of a schedule, and what came of it."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from controlplane.core.history import JobLeft
from controlplane.core.inputs import Input
from controlplane.core.reactor import Reactor
from controlplane.journal.reader import Reader
from schemas.ids import Seconds
from schemas.wire.feed import FeedEvent
from tests.chaos import checker, faults, user
from tests.chaos.schedule import NODES, SLOTS, Fault, Schedule
from tests.chaos.site import CONTROL, USER, Site, keep

SETTLE_S: Final = (
    300.0  # for jobs to end, after everything is mended; imports take long on a loaded host
)
AGAIN_S: Final = 1.0  # a daemon that left by itself is started again so much later


@dataclass(frozen=True)
class Outcome:
    """What came of a schedule."""

    problems: list[str]
    faults: list[tuple[Fault, str]]  # and what each met; empty: nothing there
    jobs: dict[str, str]  # state of each
    took_s: float
    epochs: int
    groups: int  # that were ordered
    inputs: int


def run(schedule: Schedule, base: Path, kept: Path | None = None) -> Outcome:
    """Carry a schedule out and hold what came of it against the promises.

    Args:
        schedule: jobs and faults.
        base: an empty folder, of a short name.
        kept: where the disks of the hosts go if anything is not as promised.
    """
    began = time.monotonic()
    with Site(
        base, schedule.seed, nodes=NODES, slots=SLOTS, policy=schedule.policy,
        own_uids=schedule.own_uids,
    ) as site:  # fmt: skip
        for name in site.hosts:
            site.start(name)
        with site.network.inside(USER):
            people = user.Users(site.home, base / "work", site.records, f"seed-{schedule.seed}")
            try:
                met = _suffer(site, people, schedule)
                _settle(site, people)
                seen = user.look(site.home)
                _hear_all(people, site)
            finally:
                people.close()
        evidence = _evidence(site, people, seen, met)
        found = checker.problems(evidence)
        if kept is not None and found:
            shutil.rmtree(kept, ignore_errors=True)
            keep(site, kept)
            shutil.copytree(site.records, kept / "records")
    return Outcome(
        problems=found,
        faults=met,
        jobs={name: detail.summary.state for name, detail in seen.jobs.items()},
        took_s=time.monotonic() - began,
        epochs=sum(len(detail.epochs) for detail in seen.jobs.values()),
        groups=sum(len(detail.versions) for detail in seen.jobs.values()),
        inputs=len(evidence.inputs),
    )


def _suffer(site: Site, people: user.Users, schedule: Schedule) -> list[tuple[Fault, str]]:
    """Let everything happen at its time, and mend it at its time."""
    began = time.monotonic()
    count = itertools.count()
    coming: list[tuple[float, int, Callable[[], None]]] = []
    met: list[tuple[Fault, str]] = []

    def at(when: float, what: Callable[[], None]) -> None:
        heapq.heappush(coming, (when, next(count), what))

    def happens(fault: Fault) -> None:
        what, mend = faults.begin(site, fault)
        met.append((fault, what))
        at(fault.at_s + fault.lasts_s, mend)

    for job in schedule.jobs:
        at(job.at_s, lambda job=job: people.comes(job))
    for fault in schedule.faults:
        at(fault.at_s, lambda fault=fault: happens(fault))
    while coming:
        when, _, what = heapq.heappop(coming)
        while (left := began + when - time.monotonic()) > 0:
            time.sleep(min(left, AGAIN_S))
        what()
        _revive(site, schedule, time.monotonic() - began)
    return met


def _settle(site: Site, people: user.Users) -> None:
    """All is mended: daemons that leave by themselves come back, until everybody heard of the end."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        for name in site.hosts:
            site.start(name)
        if people.finish(time.monotonic() + AGAIN_S):
            return


def _revive(site: Site, schedule: Schedule, now: float) -> None:
    """Daemons that left by themselves come back, as under a service manager; not those that were killed just now."""
    away = {
        f.host
        for f in schedule.faults
        if f.kind in {"kill daemon", "power off"} and f.at_s <= now <= f.at_s + f.lasts_s
    }
    for name in site.hosts.keys() - away:
        site.start(name)


def _hear_all(people: user.Users, site: Site) -> None:
    """Let the follower hear what there is."""
    last = len(_journal(site)[1])
    deadline = time.monotonic() + 10.0
    while len(people.events) < last and time.monotonic() < deadline:
        time.sleep(0.05)


def _journal(site: Site) -> tuple[list[tuple[Seconds, Input]], list[FeedEvent]]:
    """The controller's inputs and events."""
    path = site.hosts[CONTROL].folder / "state" / "journal.sqlite"
    with contextlib.closing(Reader(path)) as reader:
        return list(reader.inputs()), list(reader.feed(1, 1_000_000))


def _evidence(
    site: Site, people: user.Users, seen: user.Seen, met: list[tuple[Fault, str]]
) -> checker.Evidence:
    inputs, feed = _journal(site)
    return checker.Evidence(
        told=people.told, heard=list(people.events)[: len(feed)], seen=seen, inputs=inputs,
        feed=feed, replayed=_states(inputs), records=checker.records_of(lines_in(site.records)),
        faults=met,
    )  # fmt: skip


def _states(inputs: Sequence[tuple[Seconds, Input]]) -> dict[str, str]:
    """What a replay makes of every job, also of those that have left the state since."""
    reactor, found = Reactor(), dict[str, str]()
    for at, event in inputs:
        reactor.handle(event, at)
        left = [record.last for record in reactor.records if isinstance(record, JobLeft)]
        found |= {job.job: job.phase.value for job in left}
    return found | {name: job.phase.value for name, job in reactor.state.jobs.items()}


def lines_in(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What each worker wrote down, file by file."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        lines = path.read_text().splitlines()
        found[path.name] = [json.loads(line) for line in lines if line.endswith("}")]
    return found
