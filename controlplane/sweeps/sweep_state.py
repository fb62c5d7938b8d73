"""What is known of a sweep that runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from controlplane.sweeps.model_states import ModelState, StoredStates
from controlplane.sweeps.orders import Attempt, RunUnit, StateName, StopUnit
from controlplane.sweeps.trials import Trial
from controlplane.sweeps.unit_times import UnitTimes
from schemas.ids import NodeId, Seconds, WorkerId
from schemas.sweeps import SearchSpec, VisitOrder


@dataclass(slots=True)
class Place:
    """A worker of the sweep."""

    node: NodeId
    attempt: Attempt | None = None
    revoked: bool = False  # it takes no other unit


@dataclass(frozen=True, slots=True)
class Lease:
    """A unit that was ordered and has no result yet."""

    order: RunUnit
    trial: int  # whose training it is of, whoever's values it has
    began: Seconds


@dataclass(frozen=True, slots=True)
class ChosenWeights:
    """Weights of trials and workers in the order of visits, as plays chose them."""

    attempts: int  # units begun when they were chosen
    models: dict[int, float]  # of trials
    slots: dict[WorkerId, float]
    visits: float


@dataclass(slots=True)
class SweepState:
    """The state of one sweep; changed by `sweep.Sweep` alone."""

    spec: SearchSpec
    partitions: int
    keep: int = 1  # best trials whose states are kept
    order: VisitOrder = "greedy"
    trials: list[Trial] = field(default_factory=list)
    models: list[ModelState] = field(default_factory=list)
    paused: set[int] = field(default_factory=set)
    workers: dict[WorkerId, Place] = field(default_factory=dict)
    staged: dict[NodeId, set[int]] = field(default_factory=dict)  # partitions on each node
    leases: dict[Attempt, Lease] = field(default_factory=dict)
    stored: StoredStates = field(default_factory=StoredStates)
    copying: set[tuple[StateName, NodeId]] = field(default_factory=set)
    times: UnitTimes = field(default_factory=UnitTimes)
    hangs: dict[int, int] = field(default_factory=dict)
    attempts: int = 0
    weights: ChosenWeights | None = None  # of the order `rollouts`

    def give_up(self, attempt: Attempt | None) -> list[StopUnit]:
        """The unit counts no more, whatever becomes of it.

        Args:
            attempt: None: there is none.
        """
        lease = self.leases.pop(attempt, None) if attempt is not None else None
        if lease is None:
            return []
        self.workers[lease.order.worker].attempt = None
        return [StopUnit(lease.order.attempt, lease.order.worker)]
