"""Everything that the agent can learn."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.ids import JobId, WorkerId
from schemas.messages.agent import GroupDelta, ScriptReport
from schemas.messages.hopping import SweepDelta
from schemas.messages.worker import Assignment


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
