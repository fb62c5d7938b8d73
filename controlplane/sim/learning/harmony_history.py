"""Recorded history of placements and speeds, and the reward model that is fitted to it.

The fit is supervised learning, by least squares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor, nn

from controlplane.policy.learned.gang_model import Actor, place_gang
from controlplane.policy.learned.shared_nodes import (
    MAX_LOG_SLOWDOWN,
    RewardModel,
    SharedNodes,
    spread_inputs,
)
from controlplane.prediction import BoolArray, FloatArray
from controlplane.sim.learning.harmony_testbed import (
    EXPLORED_PATTERNS,
    Arrival,
    Episode,
    HarmonyTestbed,
    at_random,
    pattern,
)


@dataclass(frozen=True, slots=True)
class History:
    """R reports of jobs that trained, each on up to K nodes."""

    beside: FloatArray  # inputs of the reward model, shape (R, K, inputs)
    occupied: BoolArray  # nodes shared with other jobs; shape (R, K)
    spread: FloatArray  # inputs, shape (R, inputs)
    on_several: BoolArray  # nodes; shape (R,)
    log_speed: FloatArray  # measured, relative to the speed alone on few nodes; shape (R,)


class Recorder:
    """Collects reports during an episode."""

    def __init__(self, classes: int, noise: float, rng: Generator) -> None:
        """Start without reports; `noise` is the standard deviation of a report's logarithm."""
        self._classes, self._noise, self._rng = classes, noise, rng
        self._beside: list[FloatArray] = []
        self._spread: list[tuple[int, int, int]] = []  # class, size, nodes
        self._log_speed: list[float] = []

    def __call__(self, shared: SharedNodes, speeds: dict[str, float]) -> dict[str, float]:
        """Return the speeds unchanged, and keep noisy reports of them."""
        for name, speed in speeds.items():
            job, seen = shared.jobs[name], shared.look(name)
            self._beside.append(np.c_[seen.others.sum(axis=1) > 0.0, seen.inputs()])
            self._spread.append((job.number, job.size, len(job.workers)))
            self._log_speed.append(math.log(speed) + self._noise * self._rng.standard_normal())
        return speeds

    def history(self) -> History:
        """Return all reports."""
        most = max(len(rows) for rows in self._beside)
        inputs = np.zeros((len(self._beside), most, self._beside[0].shape[1]))
        for at, rows in enumerate(self._beside):
            inputs[at, : len(rows)] = rows
        number, size, nodes = np.array(self._spread).T
        return History(
            beside=inputs[:, :, 1:],
            occupied=inputs[:, :, 0] > 0.0,
            spread=spread_inputs(number, size, nodes, self._classes),
            on_several=nodes > 1,
            log_speed=np.array(self._log_speed),
        )


def record_history(
    bed: HarmonyTestbed, model: RewardModel, actor: Actor, record: Recorder, rng: Generator
) -> None:
    """Simulate a trace in which every job is placed by a random pattern."""
    ways = [*map(pattern, EXPLORED_PATTERNS), at_random(rng)]

    def place(shared: SharedNodes, job: Arrival, _line: object) -> None:
        place_gang(shared, actor, job.name, ways[int(rng.integers(len(ways)))])

    def speeds(shared: SharedNodes, training: Sequence[str]) -> dict[str, float]:
        return record(shared, bed.speeds(shared, training))

    Episode(bed.arrivals, SharedNodes(model, bed.sizes), speeds, bed.start_s).run(place)


class RewardFit:
    """Least squares on logarithms of speeds, in mini-batches."""

    def __init__(self, beside: nn.Module, spread: nn.Module, history: History, rate: float) -> None:
        self._nets = nn.ModuleList([beside, spread])
        self._beside = torch.tensor(history.beside, dtype=torch.float32)
        self._occupied = torch.tensor(history.occupied)
        self._spread = torch.tensor(history.spread, dtype=torch.float32)
        self._several = torch.tensor(history.on_several)
        self._target = torch.tensor(history.log_speed, dtype=torch.float32)
        self.optimiser = torch.optim.Adam(self._nets.parameters(), lr=rate)

    def epoch(self, generator: torch.Generator, batch: int = 256) -> float:
        """Train one epoch; return the root mean square error of logarithms of speeds."""
        order, total = torch.randperm(len(self._target), generator=generator), 0.0
        for rows in torch.split(order, batch):
            loss = ((self._predicted(rows) - self._target[rows]) ** 2).mean()
            self.optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimiser.step()
            total += loss.item() * len(rows)
        return float((total / len(self._target)) ** 0.5)

    def _predicted(self, rows: Tensor) -> Tensor:
        beside, spread = self._nets
        logs = nn.functional.softplus(beside(self._beside[rows])[..., 0]).clamp(
            max=MAX_LOG_SLOWDOWN
        )
        worst = torch.where(self._occupied[rows], logs, 0.0).amax(dim=1)
        alone = spread(self._spread[rows])[:, 0].clamp(-MAX_LOG_SLOWDOWN, MAX_LOG_SLOWDOWN)
        return -(worst + torch.where(self._several[rows], alone, 0.0))
