"""Ground truth about simulated jobs, for reference policies and models of interference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from controlplane.policy.api import JobView
from controlplane.sim.engine.event_queue import Kernel
from controlplane.sim.engine.jobs import JobProcesses
from controlplane.sim.models.demands import Demand, Interference, demand_of
from controlplane.sim.models.job_model import JobModel, packed, training_s
from schemas.ids import JobId, NodeId
from schemas.nodes import NodeSpec


class SimulatedTrainingJobs:
    """Implementation of `TrainingJobs` with default values for jobs that no longer exist."""

    def __init__(self, jobs: Mapping[JobId, JobProcesses], nodes: Iterable[NodeSpec]) -> None:
        self._jobs = jobs
        self._nodes = {node.node: node for node in nodes}

    def family(self, job: JobId) -> str:
        """Return the job's application, or "" if the job no longer exists."""
        return self._jobs[job].training.model.application if job in self._jobs else ""

    def placement(self, job: JobId) -> Mapping[NodeId, int]:
        """Return the number of workers of the training group on each node."""
        return self._jobs[job].nodes() if job in self._jobs else {}

    def demand(self, job: JobId) -> Demand:
        """Return the demand in the job's model, or the usual demand of its application."""
        known = self._jobs.get(job)
        return demand_of_model(known.training.model) if known else demand_of("")

    def gpu(self, node: NodeId) -> str:
        """Return the GPU model of the node's first slot."""
        slots = self._nodes[node].slots
        return slots[0].model if slots else ""

    def slots(self, node: NodeId) -> int:
        """Return the number of slots on the node."""
        return len(self._nodes[node].slots)


class ImaginedJobs(SimulatedTrainingJobs):
    """Jobs in hypothetical placements, to which rules of interference can be applied."""

    layouts: Mapping[JobId, Mapping[NodeId, int]] = {}  # workers of each job on each of its nodes

    def placement(self, job: JobId) -> Mapping[NodeId, int]:
        """Return the hypothetical placement of the job."""
        return self.layouts.get(job, {})


def demand_of_model(model: JobModel) -> Demand:
    """Return the demand that a model specifies, or the usual demand of its application."""
    return model.demand or demand_of(model.application)


@dataclass(frozen=True, eq=False)
class SimulatorOracle:
    """Implementation of `policy.api.Oracle` that reads every job's model."""

    kernel: Kernel
    jobs: Mapping[JobId, JobProcesses]
    widest: int  # slots of the largest node
    imagined: ImaginedJobs | None = None  # jobs to which `rule` applies
    rule: Interference | None = None

    def remaining_s(self, job: JobView, slots: int) -> float:
        """Return the remaining training seconds on `slots` slots that fill whole nodes first."""
        training = self.jobs[job.job].training
        training.advance(self.kernel.now)
        placement, position = packed(slots, self.widest), (training.epoch, training.progress)
        return training_s(training.model, placement, job.batch_size, *position)

    def remaining_steps(self, job: JobView) -> float:
        """Return the remaining steps according to the job's model."""
        training = self.jobs[job.job].training
        training.advance(self.kernel.now)
        return training.model.remaining_steps(training.epoch, training.progress)

    def step_s(self, job: JobView, slots: int) -> float:
        """Return the seconds of a step with the first batch; slots fill whole nodes first."""
        training = self.jobs[job.job].training
        placement = packed(slots, self.widest)
        rate = training.model.throughput(placement, job.batch_size, training.epoch)
        return rate.step_s or job.batch_size / rate.samples_per_s

    def speed_share(
        self,
        job: JobId,
        layouts: Mapping[JobId, Mapping[NodeId, int]],
        on: Mapping[NodeId, Mapping[JobId, int]],
    ) -> float:
        """Return a job's speed in a hypothetical layout, relative to its speed alone on few nodes.

        `layouts` has the workers of each job by node. `on` has the workers of all jobs on each node
        of the job.
        """
        training = self.jobs[job].training
        model, batch, epoch = training.model, training.model.spec.batch_size, training.epoch
        placement = tuple(layouts[job].values())
        together = model.throughput(packed(sum(placement), self.widest), batch, epoch)
        apart = model.throughput(placement, batch, epoch).samples_per_s
        share = apart / together.samples_per_s if together.samples_per_s else 1.0
        if self.rule is None or self.imagined is None:
            return min(1.0, share)
        self.imagined.layouts = layouts
        return min(1.0, share) * self.rule(job, on)
