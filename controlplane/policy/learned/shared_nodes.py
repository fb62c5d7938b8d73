"""Who has how many workers on which node, and what they are expected to cost each other.

The reward model: how fast jobs train where they are, as history says (supervised).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from controlplane.policy.learned.model_file import DenseNet
from controlplane.prediction import FloatArray, IntArray

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


SPREAD: Final = 2  # nodes from which on a job sends its gradients over the network


@dataclass(slots=True)
class PlacedJob:
    """A job, or as much of it as is placed by now."""

    name: str
    number: int  # of its class, below `classes` of the model
    size: int  # workers that it has when it is placed
    workers: dict[int, int] = field(default_factory=dict)  # by node
    logs: dict[int, float] = field(default_factory=dict)  # what neighbours cost it on each node

    @property
    def spread(self) -> bool:
        """Whether it is on several nodes."""
        return len(self.workers) >= SPREAD


class Row(NamedTuple):
    """A job on a node."""

    name: str
    job: PlacedJob
    workers: int  # of the job there
    node: int
    added: int = 0  # workers of the job that is being placed, on that node


class SharedNodes:
    """The placement d and the free slots v of the paper's state, kept up to date step by step."""

    def __init__(self, model: RewardModel, sizes: Sequence[int]) -> None:
        """Begin with nobody there."""
        self.model = model
        self.sizes: IntArray = np.array(sizes, dtype=np.int64)
        self.free: IntArray = self.sizes.copy()
        self.jobs: dict[str, PlacedJob] = {}
        self._here: list[dict[str, PlacedJob]] = [{} for _ in sizes]
        self._counts: FloatArray = np.zeros((len(sizes), model.classes))  # workers
        self._spread: FloatArray = self._counts.copy()  # of jobs on several nodes

    def on(self, node: int) -> dict[str, PlacedJob]:
        """Jobs on a node, by name."""
        return self._here[node]

    def present(self, nodes: IntArray) -> FloatArray:
        """Workers of each class on each node, shape (len(nodes), classes)."""
        return self._counts[nodes]

    def look(self, name: str) -> Beside:
        """A job on each of its nodes, in order, and who is beside it.

        Args:
            name: of the job, with at least one worker.
        """
        job = self.jobs[name]
        return self._look([Row(name, job, workers, node) for node, workers in job.workers.items()])

    def losses(self) -> dict[str, float]:
        """The share of its speed that each job is expected to lose."""
        return {name: lost(self._spread_log(job), job.logs) for name, job in self.jobs.items()}

    def add(self, name: str, number: int, size: int) -> PlacedJob:
        """A job comes that has no worker yet."""
        job = self.jobs[name] = PlacedJob(name, number, size)
        return job

    def put(self, name: str, node: int, workers: int = 1, *, predict: bool = True) -> None:
        """Workers of a job begin on a node.

        Args:
            predict: what that costs; else somebody calls `predict` when all are there.
        """
        job = self.jobs[name]
        self._count(job, -1.0)
        job.workers[node] = job.workers.get(node, 0) + workers
        self.free[node] -= workers
        self._here[node][name] = job
        self._count(job, 1.0)
        if predict:
            self.predict(job.workers)

    def remove(self, name: str) -> None:
        """A job leaves."""
        job = self.jobs.pop(name)
        self._count(job, -1.0)
        for node, workers in job.workers.items():
            self.free[node] += workers
            del self._here[node][name]
        self.predict(job.workers)

    def costs_of_next(self, name: str, nodes: IntArray) -> tuple[FloatArray, FloatArray]:
        """What one more worker of a job on each of some nodes costs.

        Args:
            nodes: candidates, shape (M,), with a free slot each.

        Returns:
            Expected losses of speed, as shares of it: of the job itself, in all, and of its
            neighbours, by this worker; each of shape (M,).
        """
        job = self.jobs[name]
        rows: list[Row] = []
        at: list[int] = []  # place of the candidate of each row
        for place, node in enumerate(nodes.tolist()):
            found = self._rows_of_next(job, node)
            rows += found
            at += [place] * len(found)
        logs = self.model.beside(self._look(rows, extra=job)).tolist()
        own, neighbours = np.zeros(len(nodes)), np.zeros(len(nodes))
        after: list[dict[str, dict[int, float]]] = [{} for _ in at]  # logs that change
        for row, place, log in zip(rows, at, logs, strict=True):
            after[place].setdefault(row.name, {})[row.node] = log
        for place, node in enumerate(nodes.tolist()):
            for other, changed in after[place].items():
                one = self.jobs[other]
                if one is job:
                    spans = len(job.workers) + (node not in job.workers)
                    spread_log = self.model.spread(job.number, job.size, spans)
                    own[place] = lost(spread_log, job.logs | changed)
                else:
                    spread_log = self._spread_log(one)
                    neighbours[place] += lost(spread_log, one.logs | changed)
                    neighbours[place] -= lost(spread_log, one.logs)
        return own, neighbours

    def _rows_of_next(self, job: PlacedJob, node: int) -> list[Row]:
        """Everybody whom one more worker of a job on a node concerns.

        With it the job may come to be on several nodes; then those beside it on the first one are
        concerned, too.
        """
        becomes_spread = len(job.workers) == 1 and node not in job.workers
        rows: list[Row] = []
        for where, added in ((node, 1), *((one, 0) for one in job.workers if becomes_spread)):
            rows.append(Row(job.name, job, job.workers.get(where, 0) + added, where, added))
            rows += [
                Row(name, other, other.workers[where], where, added)
                for name, other in self._here[where].items()
                if other is not job
            ]
        return rows

    def _spread_log(self, job: PlacedJob) -> float:
        return self.model.spread(job.number, job.size, len(job.workers))

    def _count(self, job: PlacedJob, sign: float) -> None:
        for node, workers in job.workers.items():
            self._counts[node, job.number] += sign * workers
            if job.spread:
                self._spread[node, job.number] += sign * workers

    def predict(self, nodes: Iterable[int]) -> None:
        """Predict anew what the jobs on these nodes cost each other there."""
        rows = [
            Row(name, job, job.workers[node], node)
            for node in nodes
            for name, job in self._here[node].items()
        ]
        if rows:
            logs = self.model.beside(self._look(rows)).tolist()
            for row, log in zip(rows, logs, strict=True):
                row.job.logs[row.node] = log

    def _look(self, rows: Sequence[Row], extra: PlacedJob | None = None) -> Beside:
        """Jobs with so many workers on a node, and who is beside them."""
        number = np.array([row.job.number for row in rows])
        mine = np.array([float(row.workers) for row in rows])
        node = np.array([row.node for row in rows])
        spread = np.array([row.job.spread for row in rows], dtype=np.float64)
        counts, spread_counts = self._counts[node], self._spread[node]
        at = np.arange(len(rows))
        if extra is not None:
            added = np.array([float(row.added) for row in rows])
            counts[:, extra.number] += added
            for place, row in enumerate(rows):
                nodes = extra.workers.keys() | ({row.node} if row.added else set())
                if len(nodes) >= SPREAD or not row.added:
                    before = 0 if extra.spread else extra.workers.get(row.node, 0)
                    spread_counts[place, extra.number] += row.added + before
                    spread[place] = 1.0 if row.job is extra else spread[place]
        counts[at, number] -= mine
        spread_counts[at, number] -= mine * spread
        return Beside(number, mine, spread, counts, np.maximum(spread_counts, 0.0))


def lost(spread_log: float, logs: Mapping[int, float]) -> float:
    """The share of its speed alone on few nodes that a job loses.

    Args:
        spread_log: what its nodes cost it, a logarithm.
        logs: what neighbours cost it on each node.
    """
    return 1.0 - math.exp(-spread_log - max(logs.values(), default=0.0))
