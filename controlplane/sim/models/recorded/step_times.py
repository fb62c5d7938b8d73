"""How long the steps of a recorded family take, at every size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from controlplane.prediction.throughput import Sample, fit
from controlplane.sim.models.recorded.recording import Family, Submission

FULL_WEIGHT: Final = 10.0  # measurements after which one size counts no more in the fit
Placement = tuple[int, ...]  # slots on each node
Size = tuple[int, int, int]  # nodes, slots, global batch


class StepTimes:
    """Steps of one family."""

    def __init__(self, family: Family, first_batch: int) -> None:
        self._known: dict[tuple[Placement, int], float] = {}
        seen: dict[Size, list[float]] = {}
        for speed in family.speeds:
            size = (speed.nodes, speed.slots, speed.batch)
            seen.setdefault(size, []).append(speed.batch / speed.samples_per_s)
        samples = [
            Sample(nodes, slots, batch / slots, float(np.mean(times)), _weight(times))
            for (nodes, slots, batch), times in sorted(seen.items())
        ]
        self._model = fit(samples, first_batch)
        self._own: dict[Size, float] = {
            size: (float(np.mean(times)) / self._modelled(size)) ** (len(times) / (len(times) + 1))
            for size, times in seen.items()
        }

    def step_s(self, placement: Placement, batch: int) -> float:
        """Seconds of a step."""
        key = (placement, batch)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._usual((len(placement), sum(placement), batch))
        return known

    def slowdown(self, job: Submission) -> float:
        """How much longer one job's steps took than its family's; the less sure, the fewer."""
        seen = [epoch.speed for epoch in job.epochs if epoch.speed is not None]
        if not seen:
            return 1.0
        took = [1.0 / speed.samples_per_s for speed in seen]
        usual = [self._usual((s.nodes, s.slots, s.batch)) / s.batch for s in seen]
        believed = float(np.mean(usual))  # one more epoch, at the usual speed
        return (math.fsum(took) + believed) / (math.fsum(usual) + believed)

    def _usual(self, size: Size) -> float:
        return self._modelled(size) * self._own.get(size, 1.0)

    def _modelled(self, size: Size) -> float:
        nodes, slots, batch = size
        said = self._model.step_s(np.array(nodes), np.array(slots), np.array(batch / slots))
        return max(1e-9, float(said))


def _weight(times: Sequence[float]) -> float:
    return min(FULL_WEIGHT, float(len(times)))
