"""History of jobs and sweeps, as records that handlers write and never read, and summaries.

`JobHistories` keeps the summaries in memory, for the simulator and for a replay of a journal. A
controller keeps the summaries in the tables of its journal (`journal.records`), so that an input
need not update them in memory. No decision depends on the history.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, Protocol

import msgspec

from controlplane.core.model.job import Job, SpeedPromise
from controlplane.core.model.job_phases import HOLDING
from schemas.ids import JobId, NodeId, Seconds, WorkerId
from schemas.wire import Message
from schemas.wire.client import Change, Decision, EpochInfo, LedgerUnit, PromiseInfo, VersionInfo

KEPT_TIMES: Final = 64  # durations of the latest units


class TrialHistory(msgspec.Struct, kw_only=True):
    """History of one trial."""

    metrics: list[dict[str, float]] = []  # by epoch
    ended_at: list[Seconds] = []  # by epoch
    reason: str = ""  # reason why the trial ended
    graduated_as: JobId | None = None  # job that continues the trial
    state_bytes: int = 0  # size of the newest state


class SweepHistory(msgspec.Struct, kw_only=True):
    """History of one sweep."""

    units: list[LedgerUnit] = []  # finished units without repeated ones, in the order of their ends
    trials: dict[int, TrialHistory] = {}
    recent_unit_s: list[float] = []  # durations of the latest units
    units_repeated: int = 0
    moved_bytes: int = 0
    waited_s: float = 0.0
    trained_s: float = 0.0

    def trial(self, number: int) -> TrialHistory:
        """Return the history of a trial. If there is none, return a new one without storing it."""
        return self.trials.get(number) or TrialHistory()

    def unit_begun(self, trial: int, waited_s: float, *, hops: bool) -> None:
        """Record a unit that got its state. `hops` is True if another process sent the state."""
        self.waited_s += waited_s
        if hops:
            self.moved_bytes += self.trial(trial).state_bytes

    def unit_ended(self, unit: LedgerUnit, size: int, *, again: bool) -> None:
        """Add a finished unit. `size` is the size of the resulting state in bytes."""
        self.recent_unit_s.append(unit.seconds)
        del self.recent_unit_s[:-KEPT_TIMES]
        self.trained_s += unit.seconds
        self._open(unit.trial).state_bytes = size
        if again:
            self.units_repeated += 1
        else:
            self.units.append(unit)

    def epoch_ended(self, trial: int, metrics: dict[str, float], now: Seconds) -> None:
        """Add a finished epoch of a trial."""
        history = self._open(trial)
        history.metrics.append(metrics)
        history.ended_at.append(now)

    def trial_ended(self, trial: int, reason: str, graduated_as: JobId | None = None) -> None:
        """Record why a trial ended, and its job if it graduated. Only the first reason is kept."""
        history = self._open(trial)
        history.graduated_as = graduated_as
        history.reason = history.reason or reason

    def _open(self, trial: int) -> TrialHistory:
        return self.trials.setdefault(trial, TrialHistory())


class PhaseChanged(Message, tag="history.phase_changed.1"):
    """A job moved along its transition table."""

    job: JobId
    change: Change


class GroupOrdered(Message, tag="history.group_ordered.1"):
    """A group was ordered."""

    job: JobId
    decision: Decision  # with author and reason
    version: VersionInfo  # the group and its start position


class Decided(Message, tag="history.decided.1"):
    """A decision was made that orders no group."""

    job: JobId
    decision: Decision


class GroupConcluded(Message, tag="history.group_concluded.1"):
    """The group that was ordered last has an outcome. A later outcome has no effect."""

    job: JobId
    outcome: str  # formed, abandoned, broken, suspended, or how the group was lost
    at: Seconds
    resumed_epoch: int | None = None  # actual start position; None: the ordered position
    resumed_step: int | None = None
    numbers: dict[str, float] = msgspec.field(default_factory=dict)  # measured, such as pause_ms


class SpeedMeasured(Message, tag="history.speed_measured.1"):
    """The speed of a group in its first whole epoch was measured, with the promised speed."""

    job: JobId
    promise: SpeedPromise
    samples_per_s: float  # mean over the epoch


class EpochFinished(Message, tag="history.epoch_finished.1"):
    """A job finished an epoch."""

    job: JobId
    epoch: EpochInfo


class EndPromised(Message, tag="history.end_promised.1"):
    """A policy promised a time by which a job will be done."""

    job: JobId
    promise: PromiseInfo


class ProcessStarted(Message, tag="history.process_started.1"):
    """A process exists, or might have existed on a node that lost its run folder."""

    job: JobId
    worker: WorkerId
    node: NodeId
    confirmed: bool = True


class Process(NamedTuple):
    """Process of a job, with the node that runs it."""

    node: NodeId
    confirmed: bool = True  # False: the process may never have started


class SlotsUsed(Message, tag="history.slots_used.1"):
    """A job held slots for a time, up to a change of its phase or group."""

    job: JobId
    user: str
    project: str
    slots: int
    begin: Seconds
    end: Seconds


def slots_used(job: Job, now: Seconds) -> SlotsUsed | None:
    """Return the slots that a job has held since its last change, or None if it held none."""
    begin, group = job.accounting.since, job.status.group
    if group is None or job.phase not in HOLDING or now <= begin:
        return None
    return SlotsUsed(
        job=job.job,
        user=job.user,
        project=job.owner.project,
        slots=len(group.members),
        begin=begin,
        end=now,
    )


class JobLeft(Message, tag="history.job_left.1"):
    """An ended job left the state. `last` is its last version."""

    job: JobId
    last: Job


class SweepLeft(Message, tag="history.sweep_left.1"):
    """A sweep left the state with its job. `history` is its history."""

    job: JobId
    history: SweepHistory


GroupRecord = GroupOrdered | Decided | GroupConcluded | SpeedMeasured
LeaveRecord = JobLeft | SweepLeft
Record = (
    PhaseChanged
    | GroupRecord
    | EpochFinished
    | EndPromised
    | ProcessStarted
    | SlotsUsed
    | LeaveRecord
)

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
    """Return the list that a record belongs to. Records about groups share one list.

    `SlotsUsed`, `JobLeft` and `SweepLeft` belong to no list, so do not pass them.
    """
    return _LISTS.get(type(record), GROUPS)


KEPT_EPOCHS: Final = 1000
KEPT_CHANGES: Final = 500
KEPT_PROMISES: Final = 100
REALISED: Final = "speed_realised"


class JobHistory(msgspec.Struct, kw_only=True):
    """History of one job."""

    changes: list[Change] = []  # the latest changes of the phase
    decisions: list[Decision] = []  # the latest decisions
    versions: list[VersionInfo] = []  # every group that was ordered
    epochs: list[EpochInfo] = []  # the latest epochs
    processes: dict[WorkerId, Process] = {}  # all processes that existed or may have existed
    promises: list[PromiseInfo] = []  # the first and the latest promises of the job's end


class HistoryReader(Protocol):
    """Read access to the history of jobs."""

    def of(self, job: JobId) -> JobHistory:
        """Return the history of `job`. The history of an unknown job is empty."""


class GroupStory(NamedTuple):
    """A decision, the group that it ordered, and the outcome of both."""

    decision: Decision
    version: VersionInfo | None  # None: no group was ordered


class JobHistories(msgspec.Struct, kw_only=True):
    """History of every job, in memory."""

    jobs: dict[JobId, JobHistory] = {}

    def of(self, job: JobId) -> JobHistory:
        """Return the history of `job`. If there is none, return a new one without storing it."""
        return self.jobs.get(job) or JobHistory()

    def add(self, records: Iterable[Record]) -> None:
        """Add the records of one input, in order.

        Only the latest changes, decisions and epochs are kept, and the first and the latest
        promises.
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
        case ProcessStarted(worker=worker, node=node, confirmed=confirmed):
            history.processes[worker] = Process(node, confirmed)
        case SlotsUsed() | JobLeft() | SweepLeft():
            pass  # the history stays
        case _:
            _add_to_groups(history, record)


def _add_to_groups(history: JobHistory, record: GroupRecord) -> None:
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


def decision_outcomes(
    records: Iterable[tuple[int, GroupRecord]],
) -> Iterator[tuple[int, GroupStory]]:
    """Join decisions with their outcomes.

    Args:
        records: records about groups in order, each with its position. Outcomes before the first
            decision are skipped.

    Yields:
        The position of each decision's record, and the decision with its group and outcome.
    """
    held: list[tuple[int, GroupStory]] = []  # the last group, and the decisions after it
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
    """Return `story` with the result of one later record. Only the first outcome is kept."""
    decision, version = story
    if isinstance(record, SpeedMeasured):
        numbers = {**decision.numbers, REALISED: record.samples_per_s}
        return GroupStory(msgspec.structs.replace(decision, numbers=numbers), version)
    if version is None or version.outcome:
        return story
    result = {"outcome": record.outcome, "took_s": record.at - version.time}
    if record.resumed_epoch is not None and record.resumed_step is not None:
        resumed = {"resumed_epoch": record.resumed_epoch, "resumed_step": record.resumed_step}
        version = msgspec.structs.replace(version, **resumed)
    numbers = {**decision.numbers, **record.numbers}
    return GroupStory(
        msgspec.structs.replace(decision, numbers=numbers, **result),
        msgspec.structs.replace(version, **result),
    )
