"""Tells policies that are there to be compared with what no cluster can know.

The truth about jobs that train, as rules of interference ask for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from controlplane.policy.api import JobView
from controlplane.sim.engine.event_queue import Kernel
from controlplane.sim.engine.jobs import JobProcesses
from controlplane.sim.models.demands import Demand, Interference, StatesDemand, demand_of
from controlplane.sim.models.job_model import JobModel, packed
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


class SimulatorOracle:
    """Knows every job's model; an `Oracle` of `policy.api`."""

    def __init__(
        self,
        kernel: Kernel,
        jobs: Mapping[JobId, JobProcesses],
        widest: int,
        imagined: ImaginedJobs | None = None,
        rule: Interference | None = None,
    ) -> None:
        """Look at the jobs of a simulation.

        Args:
            rule: what neighbours cost; None: nothing.
        """
        self._kernel = kernel
        self._jobs = jobs
        self._widest = widest
        self._imagined, self._rule = imagined, rule

    def remaining_s(self, job: JobView, slots: int) -> float:
        """Seconds that a job still trains, epoch by epoch, on whole nodes first."""
        training = self._jobs[job.job].training
        training.advance(self._kernel.now)
        model, progress, total = training.model, training.progress, 0.0
        placement = packed(slots, self._widest)
        for epoch in range(training.epoch, model.epochs):
            ends = model.epoch_ends_at(epoch)
            rate = model.throughput(placement, job.batch_size, epoch).progress_per_s
            total += max(0.0, ends - progress) / rate if rate > 0 else math.inf
            progress = max(progress, ends)
        return total

    def remaining_steps(self, job: JobView) -> float:
        """Steps that are left, as the job's model counts them."""
        training = self._jobs[job.job].training
        training.advance(self._kernel.now)
        return training.model.remaining_steps(training.epoch, training.progress)

    def step_s(self, job: JobView, slots: int) -> float:
        """Seconds of a step with the first batch, on whole nodes first."""
        training = self._jobs[job.job].training
        placement = packed(slots, self._widest)
        rate = training.model.throughput(placement, job.batch_size, training.epoch)
        return rate.step_s or job.batch_size / rate.samples_per_s

    def speed_share(
        self,
        job: JobId,
        layouts: Mapping[JobId, Mapping[NodeId, int]],
        on: Mapping[NodeId, Mapping[JobId, int]],
    ) -> float:
        """What being spread and its neighbours leave, as the models say.

        Args:
            layouts: workers of every job on each of its nodes, as they would be.
            on: each node that it would be on, and the workers there of every job, itself too.
        """
        training = self._jobs[job].training
        model, batch, epoch = training.model, training.model.spec.batch_size, training.epoch
        placement = tuple(layouts[job].values())
        together = model.throughput(packed(sum(placement), self._widest), batch, epoch)
        apart = model.throughput(placement, batch, epoch).samples_per_s
        share = apart / together.samples_per_s if together.samples_per_s else 1.0
        if self._rule is None or self._imagined is None:
            return min(1.0, share)
        self._imagined.layouts = layouts
        return min(1.0, share) * self._rule.remaining_speed(job, on)
