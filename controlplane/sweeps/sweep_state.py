"""State of a running sweep, and measured times of its units."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from controlplane.sweeps.orders import Attempt, ReleaseWorker, RunUnit, StateName, StopUnit
from controlplane.sweeps.states import ModelState, StoredStates
from controlplane.sweeps.trials import Trial
from schemas.ids import NodeId, Seconds, WorkerId
from schemas.sweeps import SearchSpec, VisitOrder

FIRST_S: Final = 60.0  # expected duration of a unit before any measurement
NEWEST_WEIGHT: Final = 0.5  # weight of the newest measurement
MIN_UNIT_S: Final = 1e-3


@dataclass(slots=True)
class UnitTimes:
    """Model of unit times: seconds of a unit = cost of its trial x slowness of its worker."""

    _cost: dict[int, float] = field(default_factory=dict)
    _slowness: dict[WorkerId, float] = field(default_factory=dict)

    def knows(self, trial: int) -> bool:
        """True if a unit of this trial was measured."""
        return trial in self._cost

    def cost(self, trial: int) -> float:
        """Return a trial's seconds per unit at slowness 1, or `usual` if no unit was measured."""
        found = self._cost.get(trial)
        return self.usual if found is None else found

    @property
    def usual(self) -> float:
        """The mean seconds per unit over the measured trials; `FIRST_S` if none was measured."""
        return sum(self._cost.values()) / len(self._cost) if self._cost else FIRST_S

    def slowness(self, worker: WorkerId) -> float:
        """Return the slowness of a worker relative to the others, or 1 without a measurement."""
        return self._slowness.get(worker, 1.0)

    def expected(self, trial: int, worker: WorkerId) -> float:
        """Return the expected seconds of the next unit of `trial` on `worker`."""
        return self.cost(trial) * self.slowness(worker)

    def measured(self, trial: int, worker: WorkerId, seconds: float) -> None:
        """Record the seconds of a unit, without the wait for its state."""
        took = max(MIN_UNIT_S, seconds)
        if trial in self._cost:  # the cost is known, so the rest is due to the worker
            share = took / self._cost[trial]
            self._slowness[worker] = _moving_average(self._slowness.get(worker), share)
        self._cost[trial] = _moving_average(self._cost.get(trial), took / self.slowness(worker))

    def forget(self, worker: WorkerId) -> None:
        """Remove the measurements of a lost worker."""
        self._slowness.pop(worker, None)


def _moving_average(before: float | None, newest: float) -> float:
    if before is None:
        return newest
    return before + NEWEST_WEIGHT * (newest - before)


@dataclass(slots=True)
class SweepWorker:
    """Worker that takes units of the sweep."""

    node: NodeId
    attempt: Attempt | None = None
    revoked: bool = False  # the worker takes no further unit
    revoked_at: Seconds = Seconds(0.0)  # only meaningful if revoked
    within_s: float = 0.0  # seconds until the worker has to be gone, even if its unit runs

    @property
    def must_leave_by(self) -> Seconds | None:
        """Time when a revoked worker's unit is given up, or None if the worker is not revoked."""
        return Seconds(self.revoked_at + self.within_s) if self.revoked else None


@dataclass(slots=True)
class Lease:
    """Unit that was ordered and has no result yet."""

    order: RunUnit
    trial: int  # trial that is trained; the values may be a parent's
    started_at: Seconds  # time of the order, or later the arrival of state and data
    limit_s: float
    again: bool = False  # the visit is repeated because its state was lost
    training: bool = False  # state and data have arrived
    ignored: bool = False  # the trial has ended, so the result will be ignored

    @property
    def deadline(self) -> Seconds:
        """Time when the unit is given up."""
        return Seconds(self.started_at + self.limit_s)


@dataclass(frozen=True, slots=True)
class ChosenWeights:
    """The weights of trials and workers in the order of visits, chosen by rollouts."""

    attempts: int  # attempts so far when the weights were chosen
    models: dict[int, float]  # by trial
    slots: dict[WorkerId, float]
    visit_exponent: float


@dataclass(slots=True)
class DataFaults:
    """The sizes of partitions, and partitions that nodes could not provide."""

    sizes: dict[int, tuple[int, NodeId]] = field(default_factory=dict)  # samples, first reporter
    failed: dict[tuple[NodeId, int], int] = field(default_factory=dict)  # node, partition -> times


@dataclass(slots=True)
class SweepState:
    """State of one sweep; only `sweep.Sweep` changes this state."""

    spec: SearchSpec
    partitions: int
    keep: int = 1  # number of best trials with kept states
    order: VisitOrder = "greedy"
    trials: list[Trial] = field(default_factory=list)
    models: list[ModelState] = field(default_factory=list)
    paused: set[int] = field(default_factory=set)
    deleted: set[int] = field(default_factory=set)  # trials excluded from the best
    workers: dict[WorkerId, SweepWorker] = field(default_factory=dict)
    staged: dict[NodeId, set[int]] = field(default_factory=dict)  # partitions by node
    leases: dict[Attempt, Lease] = field(default_factory=dict)
    stored: StoredStates = field(default_factory=StoredStates)
    # Digests of the states of lost nodes.
    lost_states: dict[NodeId, dict[StateName, str]] = field(default_factory=dict)
    copying: set[tuple[StateName, NodeId]] = field(default_factory=set)
    failed_copies: dict[StateName, int] = field(default_factory=dict)  # number of failures
    times: UnitTimes = field(default_factory=UnitTimes)
    data: DataFaults = field(default_factory=DataFaults)
    hung_units: dict[int, int] = field(default_factory=dict)
    crashes: dict[int, tuple[int, int]] = field(default_factory=dict)  # faults and kills in a row
    unreadable: dict[StateName, int] = field(default_factory=dict)  # consecutive failed reads
    full_disks: int = 0  # consecutive units that could not store their state
    attempts: int = 0
    graduate_slots: int = 0  # trials continue as jobs if fewer than half of these remain; 0: never
    graduating: set[int] = field(default_factory=set)  # trials that graduate after their epoch
    graduated_states: dict[int, StateName] = field(default_factory=dict)  # by graduated trial
    weights: ChosenWeights | None = None  # for the order `rollouts`
    stuck_reason: str = ""  # why the sweep cannot continue; empty if it can

    def release(self, worker: WorkerId) -> list[StopUnit | ReleaseWorker]:
        """Remove a worker from the sweep; the result of its unit will be ignored."""
        record = self.workers.pop(worker)
        lease = self.leases.pop(record.attempt, None) if record.attempt is not None else None
        stopped = [] if lease is None else [StopUnit(lease.order.attempt, worker)]
        return [*stopped, ReleaseWorker(worker)]

    def end_lease(self, attempt: Attempt) -> tuple[Lease, SweepWorker, list[ReleaseWorker]] | None:
        """End a lease, or return None for an old attempt.

        Return the lease, its worker, and an order to release the worker if it was revoked.
        """
        lease = self.leases.pop(attempt, None)
        if lease is None:
            return None
        worker = lease.order.worker
        record = self.workers[worker]
        record.attempt = None
        if not record.revoked:
            return lease, record, []
        del self.workers[worker]
        return lease, record, [ReleaseWorker(worker)]

    def lease_of(self, trial: int) -> Lease | None:
        """Return the lease of a trial's running unit, or None."""
        return next((one for one in self.leases.values() if one.trial == trial), None)
