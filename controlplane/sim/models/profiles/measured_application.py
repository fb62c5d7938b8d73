"""How a measured application trains: times by placement and batch, progress by batch and epoch."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from controlplane.sim.models.job_model import Placement
from controlplane.sim.models.profiles.profile_tables import (
    EpochProfile,
    PassTimes,
    read_placements,
    read_sizes,
    read_validation,
    smallest_rotation,
)
from controlplane.sim.simulator_errors import TraceError

EPOCHS: Final[Mapping[str, int]] = {  # after which a job of each application is done
    "bert": 2,
    "cifar10": 100,
    "deepspeech2": 80,
    "imagenet": 90,
    "ncf": 10,
    "yolov3": 50,
}
MOST_LOCAL: Final[Mapping[str, int]] = {"yolov3": 8}  # its larger measured ones ran out of memory
MOST_NODES: Final = 16  # that were measured


class MeasuredApplication:
    """One application's tables."""

    def __init__(self, folder: Path) -> None:
        """Read the tables of a folder, which is named after the application.

        Args:
            folder: of one application, with the tables of Pollux' published profiles.

        Raises:
            TraceError: if one is missing or damaged, or nobody knows the application.
        """
        self.name = folder.name
        if self.name not in EPOCHS:
            known = ", ".join(sorted(EPOCHS))
            raise TraceError(f"{folder}: nobody knows how many epochs it takes", f"known: {known}")
        self.epochs = EPOCHS[self.name]
        self._placements = read_placements(folder / "placements.csv")
        self._sizes = read_sizes(folder / "scalability.csv")
        locals_ = [local for table in self._placements.values() for local in table]
        self.least_local = min(self._placements[1,])
        self.most_local = MOST_LOCAL.get(self.name, max(locals_))
        self._validation = read_validation(folder, self.epochs)
        self.batches = sorted(self._validation)
        self.first_batch, self.most_batch = self.batches[0], self.batches[-1]
        tables = list(self._validation.values())
        self.ends = [min(table[epoch].progress for table in tables) for epoch in range(self.epochs)]
        self._speeds: dict[tuple[Placement, int], tuple[float, float]] = {}
        self._surface: Any = None

    def speed(self, placement: Placement, local: int) -> tuple[float, float]:
        """Seconds of one pass and of its synchronisation.

        Args:
            placement: slots on each node.
            local: batch of each slot, samples.

        Raises:
            TraceError: if nothing near was measured.
        """
        key = (placement, local)
        known = self._speeds.get(key)
        if known is None:
            known = self._speeds[key] = self._measured(smallest_rotation(placement), local)
        return known

    def _measured(self, placement: Placement, local: int) -> tuple[float, float]:
        table = self._placements.get(placement)
        low = max(local, self.least_local)  # a smaller batch takes no less
        if table is not None:
            batches = list(table)
            if low > batches[-1]:
                self._missing(placement, local)
            step = np.interp(low, batches, [table[batch][0] for batch in batches])
            sync = np.interp(low, batches, [table[batch][1] for batch in batches])
            return float(step), float(sync)
        point = (min(len(placement), MOST_NODES), sum(placement), low)
        step, sync = self._interpolated()([point])[0].tolist()
        if math.isnan(step):
            self._missing(placement, local)
        return step, sync

    def _missing(self, placement: Placement, local: int) -> None:
        where = "+".join(str(count) for count in placement)
        what = f"{self.name} was never measured near {where} slots with a local batch of {local}"
        raise TraceError(what, "give a smaller batch, or tables with more measurements")

    def _interpolated(self) -> Any:
        """Linear over (nodes, slots, local batch), placements of one shape averaged."""
        if self._surface is None:
            from scipy.interpolate import LinearNDInterpolator  # noqa: PLC0415 - slow to load

            seen: dict[tuple[int, int, int], list[PassTimes]] = {}
            for placement, table in self._placements.items():
                for local, times in table.items():
                    seen.setdefault((len(placement), sum(placement), local), []).append(times)
            means = {point: np.mean(times, axis=0) for point, times in seen.items()}
            points = self._sizes | means
            order = sorted(points)
            self._surface = LinearNDInterpolator(
                np.array(order, dtype=np.float64), np.array([points[point] for point in order])
            )
        return self._surface

    def noise(self, batch: float, epoch: int) -> tuple[float, float]:
        """|g|^2 and the trace of its covariance, linear between measured batches.

        Args:
            batch: global, samples.
            epoch: 0-based; later ones than measured are like the last.
        """
        at = min(epoch, self.epochs - 1)
        if batch <= self.first_batch or batch >= self.most_batch:
            row = self._edge(batch)[at]
            return row.sqr, row.var
        low, high, share = self._between(batch)
        one, other = self._validation[low][at], self._validation[high][at]
        mixed = one.sqr * (1 - share) + other.sqr * share
        return mixed, one.var * (1 - share) + other.var * share

    def iterations(self, batch: float, epoch: int) -> float:
        """Steps to the end of an epoch, linear between measured batches.

        Args:
            batch: global, samples.
            epoch: 0-based.
        """
        if batch <= self.first_batch or batch >= self.most_batch:
            return self._edge(batch)[epoch].iteration
        low, high, share = self._between(batch)
        one, other = self._validation[low][epoch], self._validation[high][epoch]
        return one.iteration * (1 - share) + other.iteration * share

    def _edge(self, batch: float) -> list[EpochProfile]:
        return self._validation[self.first_batch if batch <= self.first_batch else self.most_batch]

    def _between(self, batch: float) -> tuple[int, int, float]:
        place = bisect_left(self.batches, batch)
        low, high = self.batches[place - 1], self.batches[place]
        return low, high, (batch - low) / (high - low)
