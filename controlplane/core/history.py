"""What is told of a job's past: records that handlers write and never read; no state of theirs.

What happened to jobs, for people, policies and records: folded from what handlers recorded.

`JobHistories` holds it in memory: for the simulator and for whoever replays a journal. A controller
has it in its journal's tables (`journal.job_records`), where no turn touches it.

What happened in sweeps: their ledger and the epochs of their trials; no decision looks at it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, Protocol

import msgspec

from controlplane.core.model.job import Job, SpeedPromise
from schemas.ids import JobId, NodeId, Seconds, WorkerId
from schemas.wire import Message
from schemas.wire.client import Change, Decision, EpochInfo, LedgerUnit, PromiseInfo, VersionInfo

KEPT_TIMES: Final = 64  # of late units


class TrialHistory(msgspec.Struct, kw_only=True):
    """One trial's past."""

    metrics: list[dict[str, float]] = []  # of its own epochs
    ended_at: list[Seconds] = []  # of these
    why: str = ""  # it ended
    state_bytes: int = 0  # of its newest state


class SweepHistory(msgspec.Struct, kw_only=True):
    """One sweep's past."""

    units: list[LedgerUnit] = []  # that count, in the order in which they ended
    trials: dict[int, TrialHistory] = {}
    late_s: list[float] = []  # of the latest units
    units_again: int = 0
    hopped_bytes: int = 0
    waited_s: float = 0.0
    trained_s: float = 0.0

    def trial(self, number: int) -> TrialHistory:
        """The past of a trial; empty if nothing happened to it yet.

        Args:
            number: what is returned for an unknown one is not kept.
        """
        return self.trials.get(number) or TrialHistory()

    def unit_begun(self, trial: int, waited_s: float, *, hops: bool) -> None:
        """A unit has its state.

        Args:
            hops: it came from another process or node.
        """
        self.waited_s += waited_s
        if hops:
            self.hopped_bytes += self.trial(trial).state_bytes

    def unit_ended(self, unit: LedgerUnit, size: int, *, again: bool) -> None:
        """A unit came to its end.

        Args:
            size: of the state that it left, bytes.
        """
        self.late_s.append(unit.seconds)
        del self.late_s[:-KEPT_TIMES]
        self.trained_s += unit.seconds
        self._open(unit.trial).state_bytes = size
        if again:
            self.units_again += 1
        else:
            self.units.append(unit)

    def epoch_ended(self, trial: int, metrics: dict[str, float], now: Seconds) -> None:
        """An epoch of a trial is over."""
        history = self._open(trial)
        history.metrics.append(metrics)
        history.ended_at.append(now)

    def trial_ended(self, trial: int, why: str) -> None:
        """A trial trains no further.

        Args:
            why: in words; the first word counts.
        """
        history = self._open(trial)
        history.why = history.why or why

    def _open(self, trial: int) -> TrialHistory:
        return self.trials.setdefault(trial, TrialHistory())


class PhaseChanged(Message, tag="history.phase_changed.1"):
    """A job moved along its table."""

    job: JobId
    change: Change


class GroupOrdered(Message, tag="history.group_ordered.1"):
    """A group was ordered."""

    job: JobId
    decision: Decision  # who decided, and why
    version: VersionInfo  # what the group is, and what it goes on from


class Decided(Message, tag="history.decided.1"):
    """Something was decided that orders no group."""

    job: JobId
    decision: Decision


class GroupConcluded(Message, tag="history.group_concluded.1"):
    """It is known what became of the group that was ordered last; the first word counts."""

    job: JobId
    outcome: str  # formed, abandoned, broken, suspended, or how the job lost it
    at: Seconds
    resumed_epoch: int | None = None  # where it went on from; None: as it was ordered
    resumed_step: int | None = None
    numbers: dict[str, float] = msgspec.field(default_factory=dict)  # that came of it: pause_ms


class SpeedMeasured(Message, tag="history.speed_measured.1"):
    """The first whole epoch of a group, held against the speed that its policy expected."""

    job: JobId
    promise: SpeedPromise
    samples_per_s: float  # what it got, mean over the epoch


class EpochFinished(Message, tag="history.epoch_finished.1"):
    """A job finished an epoch."""

    job: JobId
    epoch: EpochInfo


class EndPromised(Message, tag="history.end_promised.1"):
    """Its policy said by when a job will be done."""

    job: JobId
    promise: PromiseInfo


class ProcessStarted(Message, tag="history.process_started.1"):
    """A process exists; or may have: its node lost its run folder before anything was heard."""

    job: JobId
    worker: WorkerId
    node: NodeId
    heard: bool = True


class Process(NamedTuple):
    """Where one was."""

    node: NodeId
    heard: bool = True  # False: it may never have begun


class JobLeft(Message, tag="history.job_left.1"):
    """A job that has ended left the state: this is all that is known of it from now on."""

    job: JobId
    last: Job


class SweepLeft(Message, tag="history.sweep_left.1"):
    """A sweep left the state with its job: this is its past."""

    job: JobId
    history: SweepHistory


OfGroups = GroupOrdered | Decided | GroupConcluded | SpeedMeasured
OfLeft = JobLeft | SweepLeft
Record = PhaseChanged | OfGroups | EpochFinished | EndPromised | ProcessStarted | OfLeft

CHANGES: Final = "changes"
GROUPS: Final = "groups"
EPOCHS: Final = "epochs"
PROMISES: Final = "promises"
PROCESSES: Final = "processes"
_LISTS: Final = {
    PhaseChanged: CHANGES,
    EpochFinished: EPOCHS,
    EndPromised: PROMISES,
    ProcessStarted: PROCESSES,
}


def list_of(record: Record) -> str:
    """Which of a job's lists a record belongs to; those about groups make one.

    Args:
        record: of any kind but that a job or a sweep left.
    """
    return _LISTS.get(type(record), GROUPS)


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
