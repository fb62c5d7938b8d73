"""What every rule answers, and what it may ask of the jobs that train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from controlplane.sim.models.interference.demands import Demand
from schemas.ids import JobId, NodeId


class Interference(Protocol):
    """By how much a job is slowed down. Alone it never is; another job never makes it faster."""

    def remaining_speed(self, job: JobId, at: Mapping[NodeId, Mapping[JobId, int]]) -> float:
        """The share of its speed that `job` keeps, in (0, 1].

        Args:
            at: every node that it is on, and the workers of all jobs there, its own too.
        """
        ...


class TrainingJobs(Protocol):
    """The truth about jobs that train, as far as it matters to their neighbours."""

    def family(self, job: JobId) -> str:
        """What it trains.

        Args:
            job: that trains.
        """
        ...

    def placement(self, job: JobId) -> Mapping[NodeId, int]:
        """Its workers on each node, in rank order.

        Args:
            job: that trains.
        """
        ...

    def demand(self, job: JobId) -> Demand:
        """What its workers and servers ask of a node at full speed.

        Args:
            job: that trains.
        """
        ...

    def gpu(self, node: NodeId) -> str:
        """The type of its GPUs, as in `simulated_cluster.RELATIVE_SPEEDS`."""
        ...

    def slots(self, node: NodeId) -> int:
        """How many slots it has."""
        ...


def speed_shares(
    rule: Interference, on: Mapping[NodeId, Mapping[JobId, int]]
) -> dict[JobId, float]:
    """What every job keeps of its speed.

    Args:
        on: the workers of all jobs on every node.
    """
    nodes: dict[JobId, list[NodeId]] = {}
    for node, here in on.items():
        for job in here:
            nodes.setdefault(job, []).append(node)
    return {
        job: rule.remaining_speed(job, {node: on[node] for node in its})
        for job, its in nodes.items()
    }
