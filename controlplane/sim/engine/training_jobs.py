"""The truth about jobs that train, as rules of interference ask for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from controlplane.sim.engine.simulated_job import JobProcesses
from controlplane.sim.models.interference.demands import Demand, StatesDemand, demand_of
from controlplane.sim.models.job_model import JobModel
from schemas.ids import JobId, NodeId, node_of
from schemas.nodes import NodeSpec


class SimulatedTrainingJobs:
    """See `TrainingJobs`; a job that is not there any more asks for nothing by name."""

    def __init__(self, jobs: Mapping[JobId, JobProcesses], nodes: Iterable[NodeSpec]) -> None:
        """Look at these from now on."""
        self._jobs = jobs
        self._nodes = {node.node: node for node in nodes}

    def family(self, job: JobId) -> str:
        """Its application."""
        return self._jobs[job].training.model.application if job in self._jobs else ""

    def placement(self, job: JobId) -> Mapping[NodeId, int]:
        """Of the group that trains."""
        group = self._jobs[job].group if job in self._jobs else None
        return Counter(node_of(member.slot) for member in group.members) if group else {}

    def demand(self, job: JobId) -> Demand:
        """As its model states it, or what its application usually asks for."""
        if job not in self._jobs:
            return demand_of("")
        return demand_of_model(self._jobs[job].training.model)

    def gpu(self, node: NodeId) -> str:
        """The type of its first slot."""
        slots = self._nodes[node].slots
        return slots[0].model if slots else ""

    def slots(self, node: NodeId) -> int:
        """How many it has."""
        return len(self._nodes[node].slots)


class ImaginedJobs(SimulatedTrainingJobs):
    """The same jobs in other places: how fast they would be is asked of the same rules."""

    layouts: Mapping[JobId, Mapping[NodeId, int]] = {}  # workers of each job on each of its nodes

    def placement(self, job: JobId) -> Mapping[NodeId, int]:
        """Where it would be."""
        return self.layouts.get(job, {})


def demand_of_model(model: JobModel) -> Demand:
    """What a job asks for: as it states it, else what its application usually asks for."""
    return model.demand if isinstance(model, StatesDemand) else demand_of(model.application)
