"""What is told of a job's past: records that handlers write and never read; no state of theirs."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from controlplane.core.model.job import Job, SpeedPromise
from controlplane.core.sweep_read_model import SweepHistory
from schemas.ids import JobId, NodeId, Seconds, WorkerId
from schemas.messages import Message
from schemas.messages.client import Change, Decision, EpochInfo, PromiseInfo, VersionInfo


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
