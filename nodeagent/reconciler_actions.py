"""Everything that the agent may do."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.ids import JobId, WorkerId
from schemas.messages.agent import AgentEvent, GroupDelta
from schemas.messages.hopping import SweepDelta, UnitOrder


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
