"""What a sweep orders, and what it lets people know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NewType

from schemas.ids import NodeId, WorkerId
from schemas.sweeps import Values

Attempt = NewType(
    "Attempt", int
)  # at a unit; counts up, so that the result of an older one is known


@dataclass(frozen=True, slots=True, order=True)
class StateName:
    """A state of a trial after so many of its visits, at least one: before, it is built."""

    trial: int
    version: int


@dataclass(frozen=True, slots=True)
class RunUnit:
    """Train a trial over a partition, from one state to the next."""

    attempt: Attempt
    worker: WorkerId
    trial: int
    values: Values
    state: StateName | None  # to begin with; None: `model_fn` builds it
    sources: tuple[NodeId, ...]  # that have it, the worker's own node first
    result: StateName  # to end with
    epoch: int  # 1-based
    partition: int
    evaluate: bool  # afterwards: the epoch ends with this visit


@dataclass(frozen=True, slots=True)
class StopUnit:
    """Give up what the worker does, with its process: it takes no other unit."""

    attempt: Attempt
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class CopyState:
    """Keep a state in a second place."""

    state: StateName
    source: NodeId
    target: NodeId


@dataclass(frozen=True, slots=True)
class DropState:
    """Nobody needs it any more."""

    state: StateName
    node: NodeId


@dataclass(frozen=True, slots=True)
class ReleaseWorker:
    """It was revoked, and does nothing now."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class TrialScored:
    """An epoch of a trial is over."""

    trial: int
    epoch: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """It trains no further."""

    trial: int
    how: str  # done, stopped, failed
    why: str


@dataclass(frozen=True, slots=True)
class StateDiffers:
    """A unit was done again, and left another state: the training is not deterministic."""

    state: StateName


@dataclass(frozen=True, slots=True)
class DataRefused:
    """A node could not give a partition, or gave another one than others have."""

    node: NodeId
    partition: int
    why: str


@dataclass(frozen=True, slots=True)
class Graduate:
    """A trial goes on as an elastic job."""

    trial: int
    values: Values
    state: StateName  # that it goes on from
    digest: str  # of that
    epochs: int  # that are finished


@dataclass(frozen=True, slots=True)
class UnitReport:
    """What a unit left beside its state."""

    metrics: dict[str, float]  # means over the partition's samples
    samples: int  # that they count for
    seconds: float  # that it took, without the wait for its state
    scores: dict[str, float] = field(default_factory=dict)  # of the evaluation
    digest: str = ""  # of the state, SHA-256


Order = (
    RunUnit
    | StopUnit
    | CopyState
    | DropState
    | ReleaseWorker
    | TrialScored
    | TrialEnded
    | StateDiffers
    | DataRefused
    | Graduate
)
