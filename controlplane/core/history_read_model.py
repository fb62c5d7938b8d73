"""What happened to jobs, for people, policies and records: folded from what handlers recorded.

`JobHistories` holds it in memory: for the simulator and for whoever replays a journal. A controller
has it in its journal's tables (`journal.job_records`), where no turn touches it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, Protocol

import msgspec

from controlplane.core.history_records import (
    EndPromised,
    EpochFinished,
    GroupConcluded,
    GroupOrdered,
    JobLeft,
    OfGroups,
    PhaseChanged,
    Process,
    ProcessStarted,
    Record,
    SpeedMeasured,
    SweepLeft,
)
from schemas.ids import JobId, WorkerId
from schemas.messages.client import Change, Decision, EpochInfo, PromiseInfo, VersionInfo

KEPT_EPOCHS: Final = 1000
KEPT_CHANGES: Final = 500
KEPT_PROMISES: Final = 100
REALISED: Final = "speed_realised"


class JobHistory(msgspec.Struct, kw_only=True):
    """One job's past."""

    changes: list[Change] = []  # of its phase, the latest
    decisions: list[Decision] = []  # groups that were ordered, and why; the latest
    versions: list[VersionInfo] = []  # every group that was ordered
    epochs: list[EpochInfo] = []  # the latest
    processes: dict[WorkerId, Process] = {}  # every one that existed, or may have
    promises: list[PromiseInfo] = []  # of its end: the first, and the latest


class Past(Protocol):
    """Whoever knows what happened to jobs."""

    def of(self, job: JobId) -> JobHistory:
        """The past of `job`; empty if nothing happened to it yet.

        Args:
            job: may be unknown.
        """


class GroupStory(NamedTuple):
    """One decision, the group that it ordered, and what became of both."""

    decision: Decision
    version: VersionInfo | None  # None: it ordered none


class JobHistories(msgspec.Struct, kw_only=True):
    """Every job's past, in memory."""

    jobs: dict[JobId, JobHistory] = {}

    def of(self, job: JobId) -> JobHistory:
        """The past of `job`; empty if nothing happened to it yet.

        Args:
            job: may be unknown. What is returned for it is not kept.
        """
        return self.jobs.get(job) or JobHistory()

    def add(self, records: Iterable[Record]) -> None:
        """Take in what an input led to.

        Args:
            records: in order. Of changes, decisions and epochs the latest are kept, of promises the
                first and the latest.
        """
        for record in records:
            history = self.jobs.get(record.job)
            if history is None:
                history = self.jobs[record.job] = JobHistory()
            _add(history, record)


def _add(history: JobHistory, record: Record) -> None:
    match record:
        case PhaseChanged(change=change):
            history.changes.append(change)
            del history.changes[:-KEPT_CHANGES]
        case EpochFinished(epoch=epoch):
            insort(history.epochs, epoch, key=lambda info: info.epoch)
            del history.epochs[:-KEPT_EPOCHS]
        case EndPromised(promise=promise):
            history.promises.append(promise)
            del history.promises[1:-KEPT_PROMISES]
        case ProcessStarted(worker=worker, node=node, heard=heard):
            history.processes[worker] = Process(node, heard)
        case JobLeft() | SweepLeft():
            pass  # its past stays
        case _:
            _add_to_groups(history, record)


def _add_to_groups(history: JobHistory, record: OfGroups) -> None:
    decisions, versions = history.decisions, history.versions
    if isinstance(record, GroupConcluded | SpeedMeasured):
        for place in reversed(range(len(decisions))):
            if versions and versions[-1].version == decisions[place].version:
                decisions[place], after = followed(
                    GroupStory(decisions[place], versions[-1]), record
                )
                if after is not None:
                    versions[-1] = after
                return
        return
    decisions.append(record.decision)
    del decisions[:-KEPT_CHANGES]
    if isinstance(record, GroupOrdered):
        versions.append(record.version)


def stories(records: Iterable[tuple[int, OfGroups]]) -> Iterator[tuple[int, GroupStory]]:
    """Decisions with what became of them, from their records.

    Args:
        records: in order, each with its position. What is said of a decision before the first is
            passed over.

    Yields:
        Each with the position at which it was decided.
    """
    held: list[tuple[int, GroupStory]] = []  # the last group, and what was decided since
    for position, record in records:
        if isinstance(record, GroupConcluded | SpeedMeasured):
            if held and held[0][1].version is not None:
                held[0] = (held[0][0], followed(held[0][1], record))
            continue
        if isinstance(record, GroupOrdered):
            yield from held
            held = []
        version = record.version if isinstance(record, GroupOrdered) else None
        held.append((position, GroupStory(record.decision, version)))
    yield from held


def followed(story: GroupStory, record: GroupConcluded | SpeedMeasured) -> GroupStory:
    """A decision, and one thing more that became of it.

    Args:
        record: what came next. Of outcomes the first counts.
    """
    decision, version = story
    if isinstance(record, SpeedMeasured):
        numbers = {**decision.numbers, REALISED: record.samples_per_s}
        return GroupStory(msgspec.structs.replace(decision, numbers=numbers), version)
    if version is None or version.outcome:
        return story
    said = {"outcome": record.outcome, "took_s": record.at - version.time}
    if record.resumed_epoch is not None and record.resumed_step is not None:
        resumed = {"resumed_epoch": record.resumed_epoch, "resumed_step": record.resumed_step}
        version = msgspec.structs.replace(version, **resumed)
    numbers = {**decision.numbers, **record.numbers}
    return GroupStory(
        msgspec.structs.replace(decision, numbers=numbers, **said),
        msgspec.structs.replace(version, **said),
    )
