"""Inputs (events) and outputs (actions) of the reconciler."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.ids import JobId, WorkerId
from schemas.wire.agent import AgentEvent, GroupDelta, ScriptReport
from schemas.wire.sweeps import SweepDelta, UnitOrder
from schemas.wire.worker import Assignment


@dataclass(frozen=True, slots=True)
class Desired:
    """The controller's desired state of a job."""

    delta: GroupDelta


@dataclass(frozen=True, slots=True)
class SweepDesired:
    """The controller's desired state of a sweep."""

    delta: SweepDelta


@dataclass(frozen=True, slots=True)
class WorkspaceReady:
    """The job's working directory is unpacked."""

    job: JobId
    digest: str


@dataclass(frozen=True, slots=True)
class WorkspaceFailed:
    """The job's working directory could not be unpacked."""

    job: JobId
    digest: str
    error: str
    node_fault: bool = False


@dataclass(frozen=True, slots=True)
class Adopted:
    """A worker that an earlier agent process started; it may have exited since."""

    worker: WorkerId
    assignment: Assignment
    pid: int | None
    started_ticks: int | None


@dataclass(frozen=True, slots=True)
class Started:
    """A worker's process exists."""

    worker: WorkerId
    pid: int
    started_ticks: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A worker's process could not be started."""

    worker: WorkerId
    error: str
    hint: str = ""
    node_fault: bool = False  # not caused by the job


@dataclass(frozen=True, slots=True)
class Connected:
    """A worker connected to this agent."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class ReportRead:
    """The next report of a worker's report file."""

    worker: WorkerId
    report: ScriptReport


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker's process has exited, and all of its reports were read."""

    worker: WorkerId
    code: int | None
    signal: int | None
    unseen: bool
    memory_limit: int | None = None  # bytes, of the job here; set if it was exceeded


@dataclass(frozen=True, slots=True)
class GraceOver:
    """The grace period of a worker is over."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class LogsStored:
    """The controller has all output of an exited worker."""

    worker: WorkerId


Event = (
    Desired
    | SweepDesired
    | WorkspaceReady
    | WorkspaceFailed
    | Adopted
    | Started
    | StartFailed
    | Connected
    | ReportRead
    | Ended
    | GraceOver
    | LogsStored
)


@dataclass(frozen=True, slots=True)
class FetchWorkspace:
    """Unpack a job's working directory."""

    job: JobId
    digest: str
    user: str = ""  # owner of the job


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Write the assignment and have the zygote fork."""

    worker: WorkerId
    rank: int
    delta: GroupDelta
    granted: bool = True  # the slot's device is free


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send TERM to the worker's process group, then wait for the grace period."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Kill:
    """Send KILL to the worker's process group."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class AwaitExit:
    """Wait for the grace period; the worker exits by itself."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class OrderGroup:
    """Send a worker the desired state of its group."""

    worker: WorkerId
    delta: GroupDelta


@dataclass(frozen=True, slots=True)
class GrantSlot:
    """Tell a worker that its slot's device is free."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class OrderUnit:
    """Tell a worker which unit of its sweep to train."""

    worker: WorkerId
    unit: UnitOrder


@dataclass(frozen=True, slots=True)
class KeepStates:
    """Fetch the wanted states of a sweep, and delete the others."""

    delta: SweepDelta


@dataclass(frozen=True, slots=True)
class PublishEvent:
    """Number this event and publish it."""

    event: AgentEvent


@dataclass(frozen=True, slots=True)
class RemoveWorker:
    """Delete the worker's folder."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class ForgetJob:
    """The job has ended, and nothing of it is left on this node."""

    job: JobId


Action = (
    FetchWorkspace
    | StartWorker
    | Terminate
    | Kill
    | AwaitExit
    | OrderGroup
    | GrantSlot
    | OrderUnit
    | KeepStates
    | PublishEvent
    | RemoveWorker
    | ForgetJob
)
