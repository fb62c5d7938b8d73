"""The reward model: how fast jobs train where they are, as history says (supervised)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from controlplane.policy.learned.dense_net import DenseNet
from controlplane.prediction.array_types import FloatArray, IntArray

LARGEST: Final = 2.5  # logarithm of the largest slow-down that is predicted
WORKERS: Final = 4.0  # unit of counts of workers and nodes: inputs are about 1


@dataclass(frozen=True, slots=True)
class Beside:
    """Jobs on a node each, and who is beside them there: P rows."""

    number: IntArray  # of the job's class, shape (P,)
    workers: FloatArray  # of the job on that node, shape (P,)
    spread: FloatArray  # 1 for a job on several nodes, else 0; shape (P,)
    others: FloatArray  # workers of other jobs there, by class, shape (P, classes)
    spread_others: FloatArray  # of them those of jobs on several nodes

    def inputs(self) -> FloatArray:
        """Of the network for neighbours, shape (P, 4 classes + 2)."""
        rows, classes = self.others.shape
        inputs = np.zeros((rows, 4 * classes + 2))
        inputs[np.arange(rows), self.number] = 1.0
        inputs[:, classes] = self.workers / WORKERS
        inputs[:, classes + 1] = self.spread
        inputs[:, classes + 2 : 2 * classes + 2] = self.others / WORKERS
        inputs[:, 2 * classes + 2 : 3 * classes + 2] = self.spread_others / WORKERS
        inputs[:, 3 * classes + 2 :] = self.others > 0.0
        return inputs


@dataclass(frozen=True, slots=True)
class RewardModel:
    """log(speed / speed alone on one node) = -(spread + the largest `beside` of its nodes).

    The two parts are networks of their own. Paper: one network for the job set and the placement
    as a whole, of a fixed number of jobs and servers. Here: for each job and node by itself, since
    a job waits for its slowest worker; so neither number is fixed.
    """

    beside_net: DenseNet  # inputs as of `Beside.inputs`
    spread_net: DenseNet  # inputs as of `spread_inputs`
    classes: int  # L of the paper
    _spread: dict[tuple[int, int, int], float] = field(default_factory=dict, compare=False)

    def beside(self, rows: Beside) -> FloatArray:
        """What neighbours on a node cost each job there; 0 without neighbours.

        Returns:
            Logarithms of factors on step times, in [0, LARGEST], shape (P,).
        """
        found = softplus(self.beside_net(rows.inputs())[:, 0])
        return np.where(rows.others.sum(axis=1) > 0.0, np.minimum(found, LARGEST), 0.0)

    def spread(self, number: int, size: int, nodes: int) -> float:
        """What it costs a job to be on several nodes, a logarithm; 0 on one.

        Below 0 it is faster there: its own workers have more of each node.
        """
        if nodes <= 1:
            return 0.0
        key = (number, size, nodes)
        known = self._spread.get(key)
        if known is None:
            inputs = spread_inputs(np.array([number]), np.array([size]), np.array([nodes]), self)
            known = min(max(float(self.spread_net(inputs)[0, 0]), -LARGEST), LARGEST)
            self._spread[key] = known
        return known


def spread_inputs(
    number: IntArray, size: IntArray, nodes: IntArray, model: RewardModel | int
) -> FloatArray:
    """Inputs of the network for jobs on several nodes, shape (P, classes + 3).

    Args:
        number: of the class of each job, shape (P,).
        model: that they are for, or how many classes it has.
    """
    classes = model if isinstance(model, int) else model.classes
    inputs = np.zeros((len(number), classes + 3))
    inputs[np.arange(len(number)), number] = 1.0
    inputs[:, classes] = size / WORKERS
    inputs[:, classes + 1] = nodes / WORKERS
    inputs[:, classes + 2] = nodes / np.maximum(size, 1)
    return inputs


def softplus(found: FloatArray) -> FloatArray:
    """log(1 + exp(x)), smooth and above 0."""
    return np.logaddexp(0.0, found)
