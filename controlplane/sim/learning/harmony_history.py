"""What a cluster would have in its logs: who was where, and how fast everybody was.

The reward model learns from history, by supervised learning.
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
    LARGEST,
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
    occupied: BoolArray  # nodes where others were, too; shape (R, K)
    spread: FloatArray  # inputs, shape (R, inputs)
    on_several: BoolArray  # nodes; shape (R,)
    log_speed: FloatArray  # of the speed alone on few nodes, as it was measured; shape (R,)


class Recorder:
    """Collects reports while an episode goes on."""

    def __init__(self, classes: int, noise: float, rng: Generator) -> None:
        """Begin with none.

        Args:
            noise: standard deviation of a report's logarithm.
        """
        self._classes, self._noise, self._rng = classes, noise, rng
        self._beside: list[FloatArray] = []
        self._spread: list[tuple[int, int, int]] = []  # class, size, nodes
        self._log_speed: list[float] = []

    def __call__(self, shared: SharedNodes, speeds: dict[str, float]) -> dict[str, float]:
        """The same speeds, of which noisy reports are kept.

        Args:
            speeds: of jobs that train, shares of their speed alone on few nodes.
        """
        for name, speed in speeds.items():
            job, seen = shared.jobs[name], shared.look(name)
            self._beside.append(np.c_[seen.others.sum(axis=1) > 0.0, seen.inputs()])
            self._spread.append((job.number, job.size, len(job.workers)))
            self._log_speed.append(math.log(speed) + self._noise * self._rng.standard_normal())
        return speeds

    def history(self) -> History:
        """All that was reported."""
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
    """Live through a trace in which every job is placed by another pattern.

    Args:
        model: of which nothing is used but the number of classes.
        actor: not asked either.
    """
    ways = [*map(pattern, EXPLORED_PATTERNS), at_random(rng)]

    def place(shared: SharedNodes, job: Arrival, _line: object) -> None:
        place_gang(shared, actor, job.name, ways[int(rng.integers(len(ways)))])

    def speeds(shared: SharedNodes, training: Sequence[str]) -> dict[str, float]:
        return record(shared, bed.speeds(shared, training))

    Episode(bed.arrivals, SharedNodes(model, bed.sizes), speeds, bed.start_s).run(place)


class RewardFit:
    """Least squares on logarithms of speeds, in small batches."""

    def __init__(self, beside: nn.Module, spread: nn.Module, history: History, rate: float) -> None:
        """Take what there is to learn from.

        Args:
            spread: network for jobs on several nodes.
        """
        self._nets = nn.ModuleList([beside, spread])
        self._beside = torch.tensor(history.beside, dtype=torch.float32)
        self._occupied = torch.tensor(history.occupied)
        self._spread = torch.tensor(history.spread, dtype=torch.float32)
        self._several = torch.tensor(history.on_several)
        self._target = torch.tensor(history.log_speed, dtype=torch.float32)
        self.optimiser = torch.optim.Adam(self._nets.parameters(), lr=rate)

    def epoch(self, generator: torch.Generator, batch: int = 256) -> float:
        """Once through the history.

        Returns:
            Root mean square error of logarithms of speeds, over the steps.
        """
        order, total = torch.randperm(len(self._target), generator=generator), 0.0
        for rows in torch.split(order, batch):
            loss = ((self._predicted(rows) - self._target[rows]) ** 2).mean()
            self.optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimiser.step()
            total += loss.item() * len(rows)
        return float((total / len(self._target)) ** 0.5)

    def _predicted(self, rows: Tensor) -> Tensor:
        """As `RewardModel` does it."""
        beside, spread = self._nets
        logs = nn.functional.softplus(beside(self._beside[rows])[..., 0]).clamp(max=LARGEST)
        worst = torch.where(self._occupied[rows], logs, 0.0).amax(dim=1)
        alone = spread(self._spread[rows])[:, 0].clamp(-LARGEST, LARGEST)
        return -(worst + torch.where(self._several[rows], alone, 0.0))
