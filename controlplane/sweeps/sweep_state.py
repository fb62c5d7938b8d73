"""What is known of a sweep that runs.

How long units take, as far as they were measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from controlplane.sweeps.orders import Attempt, ReleaseWorker, RunUnit, StateName, StopUnit
from controlplane.sweeps.states import ModelState, StoredStates
from controlplane.sweeps.trials import Trial
from schemas.ids import NodeId, Seconds, WorkerId
from schemas.sweeps import SearchSpec, VisitOrder

FIRST_S: Final = 60.0  # of a unit, before any was measured
OF_THE_NEWEST: Final = 0.5  # weight of the last measurement
LEAST_S: Final = 1e-3


@dataclass(slots=True)
class UnitTimes:
    """Seconds of a unit = cost of its trial x slowness of its worker, each learnt in turns."""

    _cost: dict[int, float] = field(default_factory=dict)
    _slowness: dict[WorkerId, float] = field(default_factory=dict)

    def knows(self, trial: int) -> bool:
        """Whether a unit of this trial was measured."""
        return trial in self._cost

    def cost(self, trial: int) -> float:
        """Seconds of a unit of this trial on a worker of slowness 1; the mean of others before."""
        found = self._cost.get(trial)
        return self.usual if found is None else found

    @property
    def usual(self) -> float:
        """Mean of the trials that were measured."""
        return sum(self._cost.values()) / len(self._cost) if self._cost else FIRST_S

    def slowness(self, worker: WorkerId) -> float:
        """Of a worker beside the others, 1 until it was measured."""
        return self._slowness.get(worker, 1.0)

    def expected(self, trial: int, worker: WorkerId) -> float:
        """Seconds of the next unit."""
        return self.cost(trial) * self.slowness(worker)

    def measured(self, trial: int, worker: WorkerId, seconds: float) -> None:
        """A unit took so long.

        Args:
            seconds: without the wait for its state.
        """
        took = max(LEAST_S, seconds)
        if trial in self._cost:  # known from other units: what is left is the worker's
            share = took / self._cost[trial]
            self._slowness[worker] = _mixed(self._slowness.get(worker), share)
        self._cost[trial] = _mixed(self._cost.get(trial), took / self.slowness(worker))

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        self._slowness.pop(worker, None)


def _mixed(before: float | None, newest: float) -> float:
    if before is None:
        return newest
    return before + OF_THE_NEWEST * (newest - before)


@dataclass(slots=True)
class Place:
    """A worker of the sweep."""

    node: NodeId
    attempt: Attempt | None = None
    revoked: bool = False  # it takes no other unit
    revoked_at: Seconds = Seconds(0.0)  # if it was
    within_s: float = 0.0  # it has to be gone, whatever becomes of its unit

    @property
    def leaves_by(self) -> Seconds | None:
        """When its unit is given up; None: it stays."""
        return Seconds(self.revoked_at + self.within_s) if self.revoked else None


@dataclass(slots=True)
class Lease:
    """A unit that was ordered and has no result yet."""

    order: RunUnit
    trial: int  # whose training it is of, whoever's values it has
    began: Seconds  # when it was ordered, or its worker had state and data
    limit_s: float
    again: bool = False  # the visit was done before, and its state was lost
    trains: bool = False  # it has state and data
    void: bool = False  # its trial ended: what it leaves counts for nothing

    @property
    def deadline(self) -> Seconds:
        """When it is given up."""
        return Seconds(self.began + self.limit_s)


@dataclass(frozen=True, slots=True)
class ChosenWeights:
    """Weights of trials and workers in the order of visits, as plays chose them."""

    attempts: int  # units begun when they were chosen
    models: dict[int, float]  # of trials
    slots: dict[WorkerId, float]
    visits: float


@dataclass(slots=True)
class DataFaults:
    """What nodes have of the data, and what they could not give."""

    sizes: dict[int, tuple[int, NodeId]] = field(default_factory=dict)  # samples, who said so first
    failed: dict[tuple[NodeId, int], int] = field(default_factory=dict)  # node, partition: times


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
    deleted: set[int] = field(default_factory=set)  # trials that are no longer among the best
    workers: dict[WorkerId, Place] = field(default_factory=dict)
    staged: dict[NodeId, set[int]] = field(default_factory=dict)  # partitions on each node
    leases: dict[Attempt, Lease] = field(default_factory=dict)
    stored: StoredStates = field(default_factory=StoredStates)
    away: dict[NodeId, dict[StateName, str]] = field(default_factory=dict)  # lost nodes: digests
    copying: set[tuple[StateName, NodeId]] = field(default_factory=set)
    failed_copies: dict[StateName, int] = field(default_factory=dict)  # times
    times: UnitTimes = field(default_factory=UnitTimes)
    data: DataFaults = field(default_factory=DataFaults)
    hangs: dict[int, int] = field(default_factory=dict)
    crashes: dict[int, tuple[int, int]] = field(default_factory=dict)  # faults and kills in a row
    unreadable: dict[StateName, int] = field(default_factory=dict)  # times in a row
    full_disks: int = 0  # units that could not leave their state, in a row
    attempts: int = 0
    graduate_slots: int = 0  # fewer trials than half of these go on as jobs; 0: nobody does
    graduating: set[int] = field(default_factory=set)  # trials that do so after their epoch
    left_with: dict[int, StateName] = field(default_factory=dict)  # trials that did so
    weights: ChosenWeights | None = None  # of the order `rollouts`
    stuck: str = ""  # why nothing can go on, whatever comes

    def release(self, worker: WorkerId) -> list[StopUnit | ReleaseWorker]:
        """The worker is of the sweep no more, and its unit counts no more."""
        place = self.workers.pop(worker)
        lease = self.leases.pop(place.attempt, None) if place.attempt is not None else None
        stopped = [] if lease is None else [StopUnit(lease.order.attempt, worker)]
        return [*stopped, ReleaseWorker(worker)]

    def end_lease(self, attempt: Attempt) -> tuple[Lease, Place, list[ReleaseWorker]] | None:
        """A unit came to its end: its worker is idle, or leaves if it was revoked.

        Args:
            attempt: None is returned for one that counts no more.
        """
        lease = self.leases.pop(attempt, None)
        if lease is None:
            return None
        worker = lease.order.worker
        place = self.workers[worker]
        place.attempt = None
        if not place.revoked:
            return lease, place, []
        del self.workers[worker]
        return lease, place, [ReleaseWorker(worker)]

    def lease_of(self, trial: int) -> Lease | None:
        """The unit of a trial that is under way and counts."""
        return next((one for one in self.leases.values() if one.trial == trial), None)
