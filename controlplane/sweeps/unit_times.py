"""How long units take, as far as they were measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from schemas.ids import WorkerId

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
