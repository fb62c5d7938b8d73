"""Sweep of a job, with the search engine and the units and states that were ordered on nodes."""

from __future__ import annotations

import msgspec

from controlplane.sweeps.search import expected_epochs
from controlplane.sweeps.sweep import Sweep
from schemas.ids import NodeId, Version, WorkerId
from schemas.sweeps import SweepSpec
from schemas.wire.sweeps import UnitOrder, WantedState


class PlacedUnit(msgspec.Struct, frozen=True, kw_only=True):
    """Unit that was ordered, with the node that runs the unit."""

    node: NodeId
    order: UnitOrder


class JobSweep(msgspec.Struct, kw_only=True):
    """Data of a sweep in addition to the data that every job has."""

    engine: Sweep
    states_key: str = ""  # see `SweepDelta`
    addresses: dict[WorkerId, str] = {}  # HOST:PORT of workers that take units
    units: dict[WorkerId, PlacedUnit] = {}  # units in progress by worker
    newest_in_memory: dict[
        int, tuple[int, WorkerId]
    ] = {}  # trial -> version of its newest state, and worker that has the state
    stopping: dict[WorkerId, None] = {}  # workers that are killed with their units
    exits: dict[WorkerId, tuple[str, bool]] = {}  # reason of the exit, and True for a fault
    workers_by_node: dict[NodeId, int] = {}  # number of workers by node at the last assignment
    faults: int = 0  # data faults at the last assignment of partitions
    notified_nodes: dict[NodeId, None] = {}  # nodes that have received a delta of the sweep
    stale_nodes: dict[NodeId, None] = {}  # nodes that need a new delta
    revision: int = 0
    keys: dict[str, int] = {}  # USER/KEY of a change -> trial
    units_done: int = 0  # repeated units are not included
    epoch_samples: int = 0  # samples of the units since the sweep's last epoch
    epoch_s: float = 0.0  # duration of these units
    epoch_group: Version | None = None  # group that ran all of these units; None: several
    trainable: int = 0  # trainable trials when a plan was last requested
    first_failure: str = ""
    closed: bool = False

    @property
    def units_left(self) -> int:
        """Expected number of units until the sweep is over, including repeated units.

        This is the larger of two numbers. One is the granted units that are not finished. The other
        is the total that the rungs are expected to grant, minus the finished units.
        """
        state, found = self.engine.state, 0
        for trial, model in zip(state.trials, state.models, strict=True):
            if not trial.ended:
                granted = trial.granted * state.partitions
                found += max(0, granted - model.at)
        if self.engine.over:
            return 0
        return max(found, expected_epochs(state.spec) * state.partitions - self.units_done)

    @property
    def unit_samples(self) -> float:
        """Mean number of samples in a partition, or 0 if no size is known yet."""
        sizes = [samples for samples, _ in self.engine.state.data.sizes.values()]
        return sum(sizes) / len(sizes) if sizes else 0.0


class LeftSweep(msgspec.Struct, kw_only=True):
    """Data of a sweep that left the state, which is sent to nodes that return."""

    revision: int  # revision of the last delta
    attempts: int  # number of ordered units
    wanted: dict[NodeId, tuple[WantedState, ...]]  # states that each node should keep
    journal: str = ""  # id of the journal in which the sweep was accepted
    states_key: str = ""  # see `SweepDelta`


def new_sweep(spec: SweepSpec, most: int, states_key: str = "") -> JobSweep:
    """Return a sweep that has not started. `most` is the largest number of slots for its job."""
    slots = most if spec.graduate_batch is not None else 0
    engine = Sweep(spec.search, spec.partitions, spec.keep, spec.order, graduate_slots=slots)
    return JobSweep(engine=engine, states_key=states_key)
