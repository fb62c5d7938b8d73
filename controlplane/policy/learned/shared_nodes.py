"""The placed workers by node, and the speed that jobs are expected to lose to each other there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from controlplane.policy.learned.model_file import DenseNet
from controlplane.prediction import FloatArray, IntArray

MAX_LOG_SLOWDOWN: Final = 2.5  # logarithm of the largest predicted slow-down
WORKER_SCALE: Final = 4.0  # scales numbers of workers and nodes to about 1


@dataclass(frozen=True, slots=True)
class NodeNeighbours:
    """P pairs of a job and one of its nodes, with the other jobs on this node."""

    number: IntArray  # class of the job, shape (P,)
    workers: FloatArray  # workers of the job on that node, shape (P,)
    spread: FloatArray  # 1 for a job on several nodes, else 0; shape (P,)
    others: FloatArray  # workers of other jobs there, by class, shape (P, classes)
    spread_others: FloatArray  # workers of jobs on several nodes only; same shape

    def inputs(self) -> FloatArray:
        """Return the inputs of the network `beside_net`, shape (P, 4 classes + 2)."""
        rows, classes = self.others.shape
        inputs = np.zeros((rows, 4 * classes + 2))
        inputs[np.arange(rows), self.number] = 1.0
        inputs[:, classes] = self.workers / WORKER_SCALE
        inputs[:, classes + 1] = self.spread
        inputs[:, classes + 2 : 2 * classes + 2] = self.others / WORKER_SCALE
        inputs[:, 2 * classes + 2 : 3 * classes + 2] = self.spread_others / WORKER_SCALE
        inputs[:, 3 * classes + 2 :] = self.others > 0.0
        return inputs


@dataclass(frozen=True, slots=True)
class RewardModel:
    """log(speed / speed alone on one node) = -(spread + the largest `beside` of its nodes).

    Each of the two parts is a network. In the paper one network rates the whole job set and
    placement, for a fixed number of jobs and servers. Here each job and node is rated separately,
    because a job waits for its slowest worker. Therefore any number of jobs and servers is
    possible.
    """

    beside_net: DenseNet  # its inputs are `NodeNeighbours.inputs`
    spread_net: DenseNet  # its inputs are `spread_inputs`
    classes: int  # L of the paper
    _spread: dict[tuple[int, int, int], float] = field(default_factory=dict, compare=False)

    def beside(self, rows: NodeNeighbours) -> FloatArray:
        """Return the cost that neighbours cause each job on its node, shape (P,).

        Costs are logarithms of factors on step times, in [0, MAX_LOG_SLOWDOWN]. A job without
        neighbours has cost 0.
        """
        found = np.logaddexp(0.0, self.beside_net(rows.inputs())[:, 0])
        return np.where(rows.others.sum(axis=1) > 0.0, np.minimum(found, MAX_LOG_SLOWDOWN), 0.0)

    def spread(self, number: int, size: int, nodes: int) -> float:
        """Return the cost for a job of being on several nodes, as a logarithm; 0 on one node.

        A negative value is a speed-up, because the job's workers have more of each node.
        """
        if nodes <= 1:
            return 0.0
        key = (number, size, nodes)
        known = self._spread.get(key)
        if known is None:
            found = float(self.spread_net(spread_inputs(*key, self.classes))[0, 0])
            known = min(max(found, -MAX_LOG_SLOWDOWN), MAX_LOG_SLOWDOWN)
            self._spread[key] = known
        return known


def spread_inputs(
    number: npt.ArrayLike, size: npt.ArrayLike, nodes: npt.ArrayLike, classes: int
) -> FloatArray:
    """Return the inputs of `spread_net` for P jobs on several nodes, shape (P, classes + 3).

    `number` is the class of each job, and `size` its number of workers.
    """
    number, size, nodes = np.atleast_1d(number, size, nodes)
    inputs = np.zeros((len(number), classes + 3))
    inputs[np.arange(len(number)), number] = 1.0
    inputs[:, classes] = size / WORKER_SCALE
    inputs[:, classes + 1] = nodes / WORKER_SCALE
    inputs[:, classes + 2] = nodes / np.maximum(size, 1)
    return inputs


SPREAD_NODES: Final = 2  # from this number of nodes on, a job sends gradients over the network


@dataclass(slots=True)
class PlacedJob:
    """Job with the workers that are placed so far."""

    name: str
    number: int  # class, below `classes` of the model
    size: int  # number of workers when completely placed
    workers: dict[int, int] = field(default_factory=dict)  # workers placed so far, by node
    logs: dict[int, float] = field(default_factory=dict)  # cost of neighbours on each node

    @property
    def spread(self) -> bool:
        """True if the job is on several nodes."""
        return len(self.workers) >= SPREAD_NODES


class Row(NamedTuple):
    """Job on one of its nodes."""

    job: PlacedJob
    node: int
    added: int = 0  # new workers on this node, of the job that is being placed


class SharedNodes:
    """Placement d and free slots v of the paper's state, updated step by step."""

    def __init__(self, model: RewardModel, sizes: Sequence[int]) -> None:
        self.model = model
        self.sizes: IntArray = np.array(sizes, dtype=np.int64)
        self.free: IntArray = self.sizes.copy()
        self.jobs: dict[str, PlacedJob] = {}
        self._here: list[dict[str, PlacedJob]] = [{} for _ in sizes]
        self._counts: FloatArray = np.zeros((len(sizes), model.classes))  # workers by class
        self._spread: FloatArray = self._counts.copy()  # only of jobs on several nodes

    def on(self, node: int) -> dict[str, PlacedJob]:
        """Return the jobs on a node, by name."""
        return self._here[node]

    def present(self, nodes: IntArray) -> FloatArray:
        """Return the number of workers of each class on each node, shape (len(nodes), classes)."""
        return self._counts[nodes]

    def look(self, name: str) -> NodeNeighbours:
        """Return a row for each node of a job, with its neighbours; the job must have a worker."""
        job = self.jobs[name]
        return self._look([Row(job, node) for node in job.workers])

    def losses(self) -> dict[str, float]:
        """Return the share of its speed that each job is expected to lose, by name."""
        return {
            name: lost_share(self._spread_log(job), job.logs) for name, job in self.jobs.items()
        }

    def add(self, name: str, number: int, size: int) -> PlacedJob:
        """Add a job without workers."""
        job = self.jobs[name] = PlacedJob(name, number, size)
        return job

    def put(self, name: str, node: int, workers: int = 1, *, predict: bool = True) -> None:
        """Place workers on a node; with `predict` False, the caller updates costs later."""
        job = self.jobs[name]
        self._count(job, -1.0)
        job.workers[node] = job.workers.get(node, 0) + workers
        self.free[node] -= workers
        self._here[node][name] = job
        self._count(job, 1.0)
        if predict:
            self.predict(job.workers)

    def remove(self, name: str) -> None:
        """Remove a job with its workers."""
        job = self.jobs.pop(name)
        self._count(job, -1.0)
        for node, workers in job.workers.items():
            self.free[node] += workers
            del self._here[node][name]
        self.predict(job.workers)

    def costs_of_next(self, name: str, nodes: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return the costs of placing one more worker of a job on each of M nodes with a free slot.

        The costs are expected losses of speed, as shares: the total loss of the job itself, and the
        added loss of its neighbours; shape (M,) each.
        """
        job = self.jobs[name]
        rows: list[Row] = []
        at: list[int] = []  # candidate of each row, by index
        for place, node in enumerate(nodes.tolist()):
            found = self._rows_of_next(job, node)
            rows += found
            at += [place] * len(found)
        logs = self.model.beside(self._look(rows, extra=job)).tolist()
        own, neighbours = np.zeros(len(nodes)), np.zeros(len(nodes))
        after: list[dict[str, dict[int, float]]] = [{} for _ in at]  # changed logs by candidate
        for row, place, log in zip(rows, at, logs, strict=True):
            after[place].setdefault(row.job.name, {})[row.node] = log
        for place, node in enumerate(nodes.tolist()):
            for other, changed in after[place].items():
                one = self.jobs[other]
                if one is job:
                    spans = len(job.workers) + (node not in job.workers)
                    spread_log = self.model.spread(job.number, job.size, spans)
                    own[place] = lost_share(spread_log, job.logs | changed)
                else:
                    spread_log = self._spread_log(one)
                    neighbours[place] += lost_share(spread_log, one.logs | changed)
                    neighbours[place] -= lost_share(spread_log, one.logs)
        return own, neighbours

    def _rows_of_next(self, job: PlacedJob, node: int) -> list[Row]:
        """Return the (job, node) rows that one more worker of `job` on `node` would affect.

        If the job would then be on several nodes, its neighbours on the first node are affected,
        too.
        """
        becomes_spread = len(job.workers) == 1 and node not in job.workers
        rows: list[Row] = []
        for where, added in ((node, 1), *((one, 0) for one in job.workers if becomes_spread)):
            others = [one for one in self._here[where].values() if one is not job]
            rows += [Row(one, where, added) for one in (job, *others)]
        return rows

    def _spread_log(self, job: PlacedJob) -> float:
        return self.model.spread(job.number, job.size, len(job.workers))

    def _count(self, job: PlacedJob, sign: float) -> None:
        for node, workers in job.workers.items():
            self._counts[node, job.number] += sign * workers
            if job.spread:
                self._spread[node, job.number] += sign * workers

    def predict(self, nodes: Iterable[int]) -> None:
        """Update the expected costs that the jobs on these nodes cause each other."""
        rows = [Row(job, node) for node in nodes for job in self._here[node].values()]
        if rows:
            logs = self.model.beside(self._look(rows)).tolist()
            for row, log in zip(rows, logs, strict=True):
                row.job.logs[row.node] = log

    def _look(self, rows: Sequence[Row], extra: PlacedJob | None = None) -> NodeNeighbours:
        """Return these rows with their neighbours, after adding the `added` workers of `extra`."""
        number = np.array([row.job.number for row in rows])
        mine = np.array([
            float(row.job.workers.get(row.node, 0) + row.added * (row.job is extra)) for row in rows
        ])  # fmt: skip
        node = np.array([row.node for row in rows])
        spread = np.array([row.job.spread for row in rows], dtype=np.float64)
        counts, spread_counts = self._counts[node], self._spread[node]
        at = np.arange(len(rows))
        if extra is not None:
            added = np.array([float(row.added) for row in rows])
            counts[:, extra.number] += added
            for place, row in enumerate(rows):
                nodes = extra.workers.keys() | ({row.node} if row.added else set())
                if len(nodes) >= SPREAD_NODES or not row.added:
                    before = 0 if extra.spread else extra.workers.get(row.node, 0)
                    spread_counts[place, extra.number] += row.added + before
                    spread[place] = 1.0 if row.job is extra else spread[place]
        counts[at, number] -= mine
        spread_counts[at, number] -= mine * spread
        return NodeNeighbours(number, mine, spread, counts, np.maximum(spread_counts, 0.0))


def lost_share(spread_log: float, logs: Mapping[int, float]) -> float:
    """Return the share of its speed alone that a job loses at these costs, given as logarithms."""
    return 1.0 - math.exp(-spread_log - max(logs.values(), default=0.0))
