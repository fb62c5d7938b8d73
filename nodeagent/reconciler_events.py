"""Everything that the agent can learn.

Everything that the agent may do.
"""

from __future__ import annotations

from dataclasses import dataclass

from schemas.ids import JobId, WorkerId
from schemas.wire.agent import AgentEvent, GroupDelta, ScriptReport
from schemas.wire.sweeps import SweepDelta, UnitOrder
from schemas.wire.worker import Assignment


@dataclass(frozen=True, slots=True)
class Desired:
    """The controller wants this of a job."""

    delta: GroupDelta


@dataclass(frozen=True, slots=True)
class SweepDesired:
    """The controller wants this of a sweep."""

    delta: SweepDelta


@dataclass(frozen=True, slots=True)
class WorkspaceReady:
    """The job's working directory is laid out."""

    job: JobId
    digest: str


@dataclass(frozen=True, slots=True)
class WorkspaceFailed:
    """It could not be."""

    job: JobId
    digest: str
    error: str
    node_fault: bool = False


@dataclass(frozen=True, slots=True)
class Adopted:
    """A worker that an earlier life of this agent started; it may have ended since."""

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
    node_fault: bool = False  # the job is not to blame


@dataclass(frozen=True, slots=True)
class Connected:
    """A worker opened its channel to this agent."""

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
    memory_limit: int | None = None  # bytes, of its job here, if that was exceeded


@dataclass(frozen=True, slots=True)
class GraceOver:
    """A worker was asked to stop some time ago."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class LogsStored:
    """The controller has all output of an ended worker."""

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
    """Lay out a job's working directory."""

    job: JobId
    digest: str
    user: str = ""  # who submitted it


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Write the assignment and have the zygote fork."""

    worker: WorkerId
    rank: int
    delta: GroupDelta
    granted: bool = True  # nobody else is on the slot


@dataclass(frozen=True, slots=True)
class Terminate:
    """TERM to the worker's process group; KILL is asked for when the grace is over."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Kill:
    """KILL to the worker's process group."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class AwaitExit:
    """It leaves by itself; TERM is asked for when the grace is over."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class OrderGroup:
    """Tell the worker what is wanted of its group."""

    worker: WorkerId
    delta: GroupDelta


@dataclass(frozen=True, slots=True)
class GrantSlot:
    """Tell the worker that its slot's device is free."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class OrderUnit:
    """Tell the worker which unit of its sweep to train."""

    worker: WorkerId
    unit: UnitOrder


@dataclass(frozen=True, slots=True)
class KeepStates:
    """Fetch the states of a sweep that are wanted on this node, and drop the others."""

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
    """Nothing of the job is left here, and it will not come back."""

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
