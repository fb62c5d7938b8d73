"""A job that is a sweep: the sweep itself, and what of it was ordered where."""

from __future__ import annotations

import msgspec

from controlplane.sweeps.search import expected_epochs
from controlplane.sweeps.sweep import Sweep
from schemas.ids import NodeId, Version, WorkerId
from schemas.sweeps import SweepSpec
from schemas.wire.sweeps import UnitOrder, WantedState


class PlacedUnit(msgspec.Struct, frozen=True, kw_only=True):
    """A unit that was ordered, as its node is told."""

    node: NodeId
    order: UnitOrder


class JobSweep(msgspec.Struct, kw_only=True):
    """What a sweep has beside what every job has."""

    engine: Sweep
    addresses: dict[WorkerId, str] = {}  # HOST:PORT of workers that take units
    units: dict[WorkerId, PlacedUnit] = {}  # under way
    memory: dict[int, tuple[int, WorkerId]] = {}  # who has a trial's newest state, and its version
    stopping: dict[WorkerId, None] = {}  # that are killed with their units
    exits: dict[WorkerId, tuple[str, bool]] = {}  # how workers ended, and whether by a fault
    holders: dict[NodeId, int] = {}  # nodes with workers that take units, when shares were made
    faults: int = 0  # of the data, at that time
    told: dict[NodeId, None] = {}  # nodes that ever heard of it
    stale: dict[NodeId, None] = {}  # nodes that have to hear of it again
    revision: int = 0
    keys: dict[str, int] = {}  # USER/KEY of changes: their trials
    units_done: int = 0  # for the first time
    epoch_samples: int = 0  # of units since the sweep's last epoch
    epoch_s: float = 0.0  # that they took
    epoch_group: Version | None = None  # that all of them were done in
    can_train: int = 0  # trials, when policies were asked last
    first_failure: str = ""
    closed: bool = False

    @property
    def units_left(self) -> int:
        """Units to the end of what is granted now, or of what its rungs will grant.

        Those that are done again are among them.
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
        """Mean samples of a partition; 0: none is known yet."""
        sizes = [samples for samples, _ in self.engine.state.data.sizes.values()]
        return sum(sizes) / len(sizes) if sizes else 0.0


class LeftSweep(msgspec.Struct, kw_only=True):
    """What nodes that come back have to hear of a sweep that left the state."""

    revision: int  # of what was told last
    attempts: int  # of units that were ordered
    wanted: dict[NodeId, tuple[WantedState, ...]]  # states that each node should keep


def new_sweep(spec: SweepSpec, most: int) -> JobSweep:
    """A sweep of which nothing has begun.

    Args:
        spec: checked.
        most: slots of its job.
    """
    slots = most if spec.graduate_batch is not None else 0
    engine = Sweep(spec.search, spec.partitions, spec.keep, spec.order, graduate_slots=slots)
    return JobSweep(engine=engine)
