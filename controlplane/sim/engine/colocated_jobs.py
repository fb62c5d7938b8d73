"""Which jobs train on each node, where neighbours slow each other down."""

from __future__ import annotations

from collections.abc import Mapping

from controlplane.sim.engine.simulated_job import JobProcesses
from controlplane.sim.models.interference.rule import Interference
from schemas.ids import JobId, NodeId, node_of


class SharedNodes:
    """Keeps who trains where, and asks the model of interference what that costs."""

    def __init__(self, interference: Interference) -> None:
        """Begin with nobody training.

        Args:
            interference: is asked anew for every speed.
        """
        self._interference = interference
        self._training_on: dict[NodeId, dict[JobId, int]] = {}  # workers of each

    def enter(self, job: JobProcesses) -> None:
        """The job's group trains on its nodes from now on, and nowhere else.

        Args:
            job: without a group, it trains nowhere.
        """
        self.leave(job.id)
        for member in job.group.members if job.group is not None else ():
            here = self._training_on.setdefault(node_of(member.slot), {})
            here[job.id] = here.get(job.id, 0) + 1

    def leave(self, job: JobId) -> None:
        """It trains nowhere.

        Args:
            job: may train nowhere already.
        """
        for here in self._training_on.values():
            here.pop(job, None)

    def neighbours(self, job: JobId) -> list[JobId]:
        """The other jobs that train on any of its nodes, each once.

        Args:
            job: itself is not among them; if it trains nowhere, it has none.
        """
        return list(dict.fromkeys(
            other
            for here in self._training_on.values() if job in here
            for other in here if other != job
        ))  # fmt: skip

    def remaining_speed(self, job: JobProcesses) -> float:
        """The share of its speed that a training job keeps, in (0, 1]."""
        at: Mapping[NodeId, dict[JobId, int]] = {
            node: self._training_on[node] for node in job.nodes()
        }
        return self._interference.remaining_speed(job.id, at)
