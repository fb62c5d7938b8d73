"""What has to hold after a run, read from three sides: what users were told, what the cluster says and
has in its journal, and what workers wrote down for themselves."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from controlplane.core.inputs import ControllerStarted, Input
from schemas.ids import Seconds
from schemas.jobs import ENDED
from schemas.wire.feed import FeedEvent
from tests.chaos.schedule import Fault
from tests.chaos.user import Seen, Told

LINE: Final = re.compile(r"(\S+\.v\d+\.r?\d+) (\d+)$")
LOSES_FILES: Final = frozenset({"power off", "fill disk", "delete log"})


@dataclass(frozen=True)
class Record:
    """What one worker process wrote down for itself."""

    worker: str
    job: str
    slot: str
    pid: int
    used: tuple[tuple[float, float], ...]  # its slot, from and to
    prints: int  # the last line that it began to print
    printed: int  # the last that it had printed


@dataclass(frozen=True)
class Evidence:
    """All there is after a run."""

    told: Sequence[Told]
    heard: Sequence[FeedEvent]  # by somebody who followed from the first event on
    seen: Seen
    inputs: Sequence[tuple[Seconds, Input]]
    feed: Sequence[FeedEvent]  # the journal's
    replayed: dict[str, str]  # states of jobs, by replay of the journal
    records: Sequence[Record]
    faults: Sequence[tuple[Fault, str]]  # and what each met


def problems(found: Evidence) -> list[str]:
    """Everything that is not as promised; empty if all is."""
    return [
        *_accepted(found), *_ended(found), *_epochs(found), *_samples(found),
        *slots_used_twice(found.records), *_lines(found), *_feed(found), *_order(found),
    ]  # fmt: skip


def _accepted(found: Evidence) -> Iterator[str]:
    names = Counter(told.job for told in found.told if told.job)
    for name, count in names.items():
        if count > 1:
            yield f"{name}: accepted for {count} users"
        if name not in found.seen.jobs:
            yield f"{name}: was accepted and is not there"
    by_name = Counter(detail.summary.name for detail in found.seen.jobs.values())
    for told in found.told:
        if not told.job:
            yield f"{told.arrival.name}: was never accepted: {told.refused[-1:]}"
        if by_name[told.arrival.name] > 1:
            yield f"{told.arrival.name}: is there {by_name[told.arrival.name]} times"


def _ended(found: Evidence) -> Iterator[str]:
    for told in found.told:
        detail = found.seen.jobs.get(told.job)
        if detail is None:
            continue
        state, why = detail.summary.state, detail.summary.reason
        if state not in ENDED:
            yield f"{told.job}: is {state}, and not at its end: {why}"
            continue
        if told.ended != state:
            yield f"{told.job}: its user heard {told.ended!r}, and it is {state}"
        arrival = told.arrival
        if arrival.fails_at:
            expected = state == "failed" and "code 7" in why
        elif state == "cancelled":
            expected = told.cancelled
        else:
            expected = state == "succeeded" and detail.summary.epoch == arrival.epochs
        if not expected:
            yield f"{told.job}: {state} after {detail.summary.epoch} of {arrival.epochs} epochs: {why}"


def _epochs(found: Evidence) -> Iterator[str]:
    heard: dict[str, list[int]] = defaultdict(list)
    for event in found.heard:
        if event.event == "job.epoch" and event.job is not None:
            heard[event.job].append(int(event.detail["epoch"] or 0))
    for name, detail in found.seen.jobs.items():
        numbers = [epoch.epoch for epoch in detail.epochs]
        if numbers != list(range(1, len(numbers) + 1)):
            yield f"{name}: its epochs are {numbers}"
        if sorted(heard[name]) != numbers:  # late ones are heard late
            yield f"{name}: followers heard of epochs {heard[name]}, and it has {numbers}"


def _samples(found: Evidence) -> Iterator[str]:
    size = {told.job: told.arrival.samples for told in found.told}
    for name, detail in found.seen.jobs.items():
        taken: dict[int, list[int]] = defaultdict(list)
        for record in found.seen.samples[name]:
            taken[record["epoch"]].extend(record["ids"])
        for epoch in detail.epochs:
            ids = sorted(taken[epoch.epoch])
            if ids == list(range(size.get(name, 0))):
                continue
            twice = [i for i, count in Counter(ids).items() if count > 1]
            absent = size.get(name, 0) - len(set(ids))
            if twice or not _may_lose(found, name):
                yield f"{name}: epoch {epoch.epoch} took {len(twice)} samples twice, {absent} not at all"


def slots_used_twice(records: Sequence[Record]) -> Iterator[str]:
    """Slots that two processes used at a time."""
    uses: dict[str, list[tuple[float, float, Record]]] = defaultdict(list)
    for record in records:
        uses[record.slot].extend((begin, end, record) for begin, end in record.used)
    for slot, every in uses.items():
        every.sort(key=lambda use: use[0])
        for (_, end, one), (begin, _, other) in itertools.pairwise(every):
            if begin < end and one.pid != other.pid:
                yield f"{slot}: {other.worker} used it {end - begin:.3f} s before {one.worker} was done"


def _lines(found: Evidence) -> Iterator[str]:
    for name, lines in found.seen.lines.items():
        delivered: dict[str, list[int]] = defaultdict(list)
        notes = [line for line in lines if not LINE.match(line)]
        for line in lines:
            if match := LINE.match(line):
                delivered[match[1]].append(int(match[2]))
        printed: dict[str, tuple[int, int]] = {}  # by worker, which may have begun twice
        for record in (r for r in found.records if r.job == name):
            least, most = printed.get(record.worker, (0, 0))
            printed[record.worker] = (max(least, record.printed), max(most, record.prints))
        for worker, (least, most) in printed.items():
            numbers = delivered.pop(worker, [])
            if numbers != sorted(set(numbers)):
                yield f"{name}: lines of {worker} came twice or out of order"
            absent = sorted(set(range(1, least + 1)) - set(numbers))
            if absent and not (_may_lose(found, name) and notes):
                yield f"{name}: {len(absent)} of {least} lines of {worker} are lost, from {absent[0]} on"
            if numbers and max(numbers) > most:
                yield f"{name}: {worker} never printed line {max(numbers)}"
        if delivered:
            yield f"{name}: lines of workers that there never were: {sorted(delivered)}"


def _feed(found: Evidence) -> Iterator[str]:
    numbers = [event.seq for event in found.heard]
    if numbers != list(range(1, len(numbers) + 1)):
        yield "a follower of events missed some, or heard some twice"
    if list(found.heard) != list(found.feed)[: len(found.heard)]:
        yield "followers heard other events than the journal has"
    if len(found.heard) < len(found.feed):
        yield f"a follower heard {len(found.heard)} of {len(found.feed)} events"


def _order(found: Evidence) -> Iterator[str]:
    starts = [event for _, event in found.inputs if isinstance(event, ControllerStarted)]
    terms = [start.term for start in starts]
    for before, start in itertools.pairwise(starts):
        if not (start.term == before.term + 1 or (start.restored and start.term > before.term)):
            yield f"terms of controllers were {terms}"
    times = [at for at, _ in found.inputs]
    if times != sorted(times):
        yield "time in the journal goes back"
    for name, detail in found.seen.jobs.items():
        versions = [version.version for version in detail.versions]
        if versions != sorted(set(versions)):
            yield f"{name}: its groups have versions {versions}"
        if found.replayed.get(name) != detail.summary.state:
            yield f"{name}: is {detail.summary.state}, and by its journal {found.replayed.get(name)}"


def _may_lose(found: Evidence, job: str) -> bool:
    """Whether a file of the job's workers was lost with a disk, or nothing could be written to it."""
    nodes = {record.slot.partition("/")[0] for record in found.records if record.job == job}
    return any(f.kind in LOSES_FILES and f.host in nodes and met for f, met in found.faults)


def records_of(lines_of: dict[str, list[dict[str, Any]]]) -> list[Record]:
    """What files of workers say.

    Args:
        lines_of: each file's lines, in order.
    """
    found = []
    for lines in lines_of.values():
        if not lines or lines[0]["kind"] != "began":
            continue
        first = lines[0]
        of = defaultdict(list)
        for line in lines:
            of[line["kind"]].append(line)
        found.append(
            Record(
                **{name: first[name] for name in ("worker", "job", "slot", "pid")},
                used=tuple((line["began"], line["ended"]) for line in of["used"]),
                prints=max((line["line"] for line in of["prints"]), default=0),
                printed=max((line["line"] for line in of["printed"]), default=0),
            )
        )
    return found
