"""Online training of the reward model on the speeds that jobs report beside their neighbours.

`gradient_step` is one step of gradient descent on a small network, in plain numpy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.random import default_rng

from controlplane.policy.learned.model_file import DenseNet
from controlplane.policy.learned.shared_nodes import (
    MAX_LOG_SLOWDOWN,
    RewardModel,
    SharedNodes,
    spread_inputs,
)
from controlplane.prediction import FloatArray


def gradient_step(net: DenseNet, inputs: FloatArray, slopes: FloatArray, rate: float) -> DenseNet:
    """Return the network after one step of gradient descent.

    `inputs` have shape (rows, in); `slopes`, derivatives of the loss by the outputs, (rows, out).
    """
    taken: list[FloatArray] = [inputs]
    for weight, bias in net.layers[:-1]:
        taken.append(np.tanh(taken[-1] @ weight + bias))
    layers = []
    for (weight, bias), values in zip(reversed(net.layers), reversed(taken), strict=True):
        layers.append((weight - rate * (values.T @ slopes), bias - rate * slopes.sum(axis=0)))
        slopes = (slopes @ weight.T) * (
            1.0 - values**2
        )  # of the layer before; not used at the first
    return DenseNet(tuple(reversed(layers)))


MAX_REPORTS: Final = 512  # latest reports; bounds memory
STEPS_PER_BUNDLE: Final = 6  # gradient descent steps per bundle of reports
BATCH: Final = 64
LEARNING_RATE: Final = 0.05  # learning rate; small, so that one odd report moves little
MAX_WEIGHT: Final = 20.0  # limit of the weight of earlier reports: a family's speed may change
MAX_SAMPLES_PER_S: Final = 1e12  # samples per second; faster reports are implausible


@dataclass(frozen=True, slots=True)
class Report:
    """Neighbours of a job, and its speed."""

    key: Hashable  # jobs of one key are equally fast alone
    beside: FloatArray  # inputs of the reward model for the worst node
    has_neighbours: bool
    spread: FloatArray  # inputs of the reward model, shape (inputs,)
    on_several: bool
    log_speed: float


@dataclass(slots=True)
class _Mean:
    value: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        self.weight = min(self.weight, MAX_WEIGHT) + 1.0
        self.value += (value - self.value) / self.weight


@dataclass(slots=True)
class _Alone:
    """Logarithm of a speed alone on few nodes."""

    measured: _Mean = field(default_factory=_Mean)  # from jobs that were alone
    corrected: _Mean = field(default_factory=_Mean)  # from all other jobs

    @property
    def log_speed(self) -> float:
        """Measured value, else the corrected one."""
        return self.measured.value if self.measured.weight else self.corrected.value


@dataclass(slots=True)
class ReportedSpeeds:
    """Reports of speeds, and the reward model trained on them.

    Reports are in samples per second. Jobs of one key are equally fast alone. The speed alone is
    the mean of what jobs of the key reported alone; if none did, of all their reports, corrected by
    the expected loss.
    """

    model: RewardModel
    _reports: deque[Report] = field(default_factory=lambda: deque(maxlen=MAX_REPORTS))
    _alone: dict[Hashable, _Alone] = field(default_factory=dict)
    _learnt: int = 0  # bundles so far
    _new: int = 0  # reports since the last bundle

    def add(self, shared: SharedNodes, name: str, key: Hashable, samples_per_s: float) -> bool:
        """Add a report; return False and ignore it if its speed is implausible."""
        if not 0.0 < samples_per_s < MAX_SAMPLES_PER_S:
            return False
        job, seen = shared.jobs[name], shared.look(name)
        beside = np.where(seen.others.sum(axis=1) > 0.0, self.model.beside(seen), -1.0)
        nodes, worst = len(job.workers), int(np.argmax(beside))
        report = Report(
            key=key,
            beside=seen.inputs()[worst],
            has_neighbours=bool(beside[worst] >= 0.0),
            spread=spread_inputs(
                np.array([job.number]), np.array([job.size]), np.array([nodes]), self.model.classes
            )[0],
            on_several=nodes > 1,
            log_speed=math.log(samples_per_s),
        )
        expected = max(0.0, float(beside[worst])) + self.model.spread(job.number, job.size, nodes)
        alone = self._alone.setdefault(key, _Alone())
        is_alone = not report.has_neighbours and not report.on_several
        (alone.measured if is_alone else alone.corrected).add(report.log_speed + expected)
        self._reports.append(report)
        self._new += 1
        return True

    def speed_alone(self, key: Hashable) -> float:
        """Return the samples/s of such jobs alone; 0: not reported."""
        known = self._alone.get(key)
        return math.exp(known.log_speed) if known is not None else 0.0

    def learn(self) -> RewardModel:
        """Return the model after training on the reports; unchanged without new ones."""
        if self._new and len(self._reports) >= BATCH // 4:
            self._new = 0
            rng = default_rng((self._learnt, len(self._reports)))
            self._learnt += 1
            for _ in range(STEPS_PER_BUNDLE):
                rows = rng.integers(len(self._reports), size=BATCH)
                self._step([self._reports[row] for row in rows])
        return self.model

    def _step(self, reports: list[Report]) -> None:
        """Take one step of least squares on logarithms."""
        beside = np.array([one.beside for one in reports])
        spread = np.array([one.spread for one in reports])
        has = np.array([one.has_neighbours for one in reports])
        several = np.array([one.on_several for one in reports])
        by_others = self.model.beside_net(beside)[:, 0]
        by_nodes = self.model.spread_net(spread)[:, 0]
        expected = np.where(has, np.logaddexp(0.0, by_others), 0.0)
        expected += np.where(several, by_nodes, 0.0)
        found = np.array([self._alone[one.key].log_speed - one.log_speed for one in reports])
        error = (expected - np.clip(found, -MAX_LOG_SLOWDOWN, MAX_LOG_SLOWDOWN)) / len(reports)
        slopes = (error * has * _sigmoid(by_others))[:, None], (error * several)[:, None]
        self.model = RewardModel(
            gradient_step(self.model.beside_net, beside, slopes[0], LEARNING_RATE),
            gradient_step(self.model.spread_net, spread, slopes[1], LEARNING_RATE),
            self.model.classes,
        )


def _sigmoid(values: FloatArray) -> FloatArray:
    found: FloatArray = np.exp(-np.logaddexp(0.0, -values))
    return found
