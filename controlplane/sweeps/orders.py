"""The orders and notifications that a sweep returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NewType

from schemas.ids import NodeId, WorkerId
from schemas.sweeps import Values

Attempt = NewType("Attempt", int)  # number that increases, so that old results are recognised


@dataclass(frozen=True, slots=True, order=True)
class StateName:
    """The name of a trial's state after `version` visits; version 0 is new and never stored."""

    trial: int
    version: int


@dataclass(frozen=True, slots=True)
class RunUnit:
    """Train a trial over a partition, from one state to the next."""

    attempt: Attempt
    worker: WorkerId
    trial: int
    values: Values
    state: StateName | None  # initial state; None: `model_fn` builds it
    sources: tuple[NodeId, ...]  # nodes with the state, the worker's own first
    result: StateName  # final state
    epoch: int  # 1-based
    partition: int
    evaluate: bool  # evaluate afterwards: the epoch ends with this visit


@dataclass(frozen=True, slots=True)
class StopUnit:
    """Kill the process of a worker and discard its unit; the worker takes no other unit."""

    attempt: Attempt
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class CopyState:
    """Copy a state to a second node."""

    state: StateName
    source: NodeId
    target: NodeId


@dataclass(frozen=True, slots=True)
class DropState:
    """Delete a state that is no longer needed."""

    state: StateName
    node: NodeId


@dataclass(frozen=True, slots=True)
class ReleaseWorker:
    """Release a revoked worker, which is idle now."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class TrialScored:
    """An epoch of a trial has finished."""

    trial: int
    epoch: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """A trial has stopped training."""

    trial: int
    how: str  # done, stopped, failed
    reason: str


@dataclass(frozen=True, slots=True)
class StateDiffers:
    """A repeated unit produced another state: the training is not deterministic."""

    state: StateName


@dataclass(frozen=True, slots=True)
class DataRefused:
    """A node could not provide a partition, or its data differs from that of other nodes."""

    node: NodeId
    partition: int
    reason: str


@dataclass(frozen=True, slots=True)
class Graduate:
    """A trial continues as an elastic job."""

    trial: int
    values: Values
    state: StateName  # initial state of the job
    digest: str  # digest of the initial state
    epochs: int  # finished epochs


@dataclass(frozen=True, slots=True)
class UnitReport:
    """Result of a unit, apart from the resulting state."""

    metrics: dict[str, float]  # means over the samples of the partition
    samples: int  # weight of the metrics
    seconds: float  # duration without the wait for its state
    scores: dict[str, float] = field(default_factory=dict)  # metrics of the evaluation
    digest: str = ""  # SHA-256 of the state


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
