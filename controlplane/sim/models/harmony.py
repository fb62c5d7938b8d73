"""Jobs as in Harmony's evaluation: gangs of workers with parameter servers, on small servers.

Bao et al., INFOCOM '19: six servers of two GPUs, six models, 1 to 3 workers and as many servers.
The paper states neither speeds nor lengths; `demands` has what each job asks for, and lengths are
drawn by the trace. The effect of a job's own workers on each other within a node is part of its
speed alone; the effect of other jobs is defined by `--interference`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from controlplane.sim.cluster import TraceError
from controlplane.sim.models.demands import Demand, demand_of
from controlplane.sim.models.interference import PER_SLOT, node_demand, stretch
from controlplane.sim.models.job_model import (
    ChangeCosts,
    EpochMetrics,
    JobModel,
    Placement,
    Throughput,
    TrainingModel,
    job_spec,
)
from controlplane.sim.results import TraceJob
from schemas.ids import NodeId
from schemas.jobs import StopRule

BATCHES: Final[Mapping[str, int]] = {  # per worker, samples; chosen as in tutorials
    "resnet50": 32, "vgg16": 32, "resnext110": 64, "seq2seq": 64, "ctc": 50, "wlm": 20,
}  # fmt: skip
EPOCHS: Final = 20  # per job
JOB_S: Final = 900.0  # mean duration of a job alone; chosen
SLOTS_PER_NODE: Final = 2
MAX_SERVERS: Final = 64
LOSS_FALL: Final = 3.0  # total fall of the loss: exp(-3)
# Chosen: the container exists; a process starts, reads its data, and joins.
COSTS: Final = ChangeCosts(start_s=10.0, restart_s=10.0, prepare_s=8.0, switch_s=1.0)


def workload_of(name: str) -> tuple[str, int]:
    """Split a workload into model and number of parameter servers.

    `vgg16-2ps` has two servers; `vgg16` uses a ring.
    """
    model, servers = name, 0
    found = re.fullmatch(r"(.+)-(\d{1,4})ps", name)
    if found is not None:
        model, servers = found[1], int(found[2])
    if model not in BATCHES or servers > MAX_SERVERS:
        problem = f"{name[:60]!r} is not a workload of Harmony's testbed"
        hint = f"choose from {', '.join(BATCHES)}, with up to {MAX_SERVERS} servers: vgg16-2ps"
        raise TraceError(problem, hint, "workload")
    return model, servers


def slowest_node(demand: Demand, placement: Mapping[NodeId, int], slots_per_node: int) -> float:
    """Return the factor by which a job's own workers on shared nodes slow its steps down."""
    capacity = tuple(each * slots_per_node for each in PER_SLOT)
    asks = [node_demand(demand, placement, node) for node in placement]
    return max(stretch(demand, own, own, (capacity[0], capacity[1], capacity[2])) for own in asks)


@dataclass(eq=False)
class HarmonyModel(TrainingModel):
    """Model of jobs in Harmony's testbed."""

    costs: ChangeCosts = COSTS
    slots_per_node: int = SLOTS_PER_NODE
    job_s: float = JOB_S  # of training alone, for jobs whose trace does not state their samples
    stated: bool = False  # users state the number of epochs

    def job_model(
        self, job: TraceJob, batch: Literal["fixed", "elastic"], *, seed: int
    ) -> HarmonyJob:
        """Return the model of a job, a gang of fixed size and batch under any policy."""
        if job.slots < 1:
            problem = f"job {job.name} asks for {job.slots} workers"
            raise TraceError(problem, "give at least 1", "slots")
        return HarmonyJob(job, self)


class HarmonyJob(JobModel):
    """Job of Harmony's testbed; all have the same number of epochs."""

    demand: Demand

    def __init__(self, job: TraceJob, model: HarmonyModel) -> None:
        name, servers = workload_of(job.workload)
        self.demand = replace(demand_of(name), servers=servers)
        self._batch = BATCHES[name] * job.slots
        self._slots_per_node = model.slots_per_node
        samples = job.samples or model.job_s * self._batch / self.demand.step_s
        self.epoch_samples = max(1, round(samples / EPOCHS))
        self.application, self.costs, self.epochs = name, model.costs, EPOCHS
        self._steps: dict[Placement, float] = {}
        self.spec = job_spec(
            job,
            args=(job.workload,),
            family=name,
            batch_size=self._batch,
            max_batch_size=self._batch,
            max_local_batch=self._batch,  # on fewer slots than requested: in several passes
            slots=(job.slots, job.slots),
            stop=StopRule(epochs=EPOCHS) if model.stated else None,
        )

    def throughput(self, placement: Placement, batch: int, epoch: int) -> Throughput:
        """Return the throughput, which the slowest node limits."""
        step_s = self._steps.get(placement)
        if step_s is None:
            nodes = {NodeId(str(number)): many for number, many in enumerate(placement)}
            step_s = self.demand.step_s * slowest_node(self.demand, nodes, self._slots_per_node)
            self._steps[placement] = step_s
        return Throughput(batch / step_s, batch / step_s, step_s)

    def epoch_metrics(self, epoch: int, batch: int) -> EpochMetrics:
        """Return a made-up loss that falls exponentially."""
        loss = math.exp(-LOSS_FALL * epoch / EPOCHS)
        return EpochMetrics(train_loss=loss, metrics={}, noise_scale=None)

    def remaining_steps(self, epoch: int, progress: float) -> float:
        """Return the remaining steps."""
        return max(0.0, EPOCHS * self.epoch_samples - progress) / self._batch
