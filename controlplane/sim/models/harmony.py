"""Jobs of Harmony's evaluation: gangs of workers with parameter servers, on small servers.

Bao et al., INFOCOM '19: six servers of two GPUs, six models, 1 to 3 workers and 1 to 3 parameter
servers per job. The paper specifies neither speeds nor job lengths. `demands` defines the resources
that each model needs, and the trace draws the lengths. Workers of one job slow each other down on a
shared node; the speed of a job without neighbours includes this effect. `--interference` defines
the effect of other jobs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from controlplane.sim.cluster import TraceError
from controlplane.sim.models.demands import Demand, demand_of
from controlplane.sim.models.interference import capacity, node_demand, stretch
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
JOB_S: Final = 900.0  # mean duration of a job without other jobs; chosen
SLOTS_PER_NODE: Final = 2
MAX_SERVERS: Final = 64
LOSS_FALL: Final = 3.0  # the loss falls to exp(-3) of its first value
# Chosen: the container exists, so a process only has to start, read its data and join.
COSTS: Final = ChangeCosts(start_s=10.0, restart_s=10.0, prepare_s=8.0, switch_s=1.0)


def workload_of(name: str) -> tuple[str, int]:
    """Split a workload into model and parameter servers: `vgg16-2ps` has two, `vgg16` none."""
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
    """Return the factor, at least 1, by which the workers of one job lengthen its steps."""
    asks = [node_demand(demand, placement, node) for node in placement]
    return max(stretch(demand, own, own, capacity(slots_per_node)) for own in asks)


@dataclass(eq=False)
class HarmonyModel(TrainingModel):
    """Training model of the jobs in Harmony's testbed."""

    costs: ChangeCosts = COSTS
    slots_per_node: int = SLOTS_PER_NODE
    job_s: float = JOB_S  # training time alone, if the trace does not define the samples
    stated: bool = False  # True: users state the number of epochs

    def job_model(
        self, job: TraceJob, batch: Literal["fixed", "elastic"], *, seed: int
    ) -> HarmonyJob:
        """Return the model of a job. Every policy runs it with the same size and batch."""
        if job.slots < 1:
            problem = f"job {job.name} asks for {job.slots} workers"
            raise TraceError(problem, "give at least 1", "slots")
        return HarmonyJob(job, self)


class HarmonyJob(JobModel):
    """Job of Harmony's testbed; every job has `EPOCHS` epochs."""

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
            max_local_batch=self._batch,  # fewer slots than requested need several passes per step
            slots=(job.slots, job.slots),
            stop=StopRule(epochs=EPOCHS) if model.stated else None,
        )

    def throughput(self, placement: Placement, batch: int, epoch: int) -> Throughput:
        """Return the throughput of a group; its slowest node determines the speed."""
        step_s = self._steps.get(placement)
        if step_s is None:
            nodes = {NodeId(str(number)): many for number, many in enumerate(placement)}
            step_s = self.demand.step_s * slowest_node(self.demand, nodes, self._slots_per_node)
            self._steps[placement] = step_s
        return Throughput(batch / step_s, batch / step_s, step_s)

    def epoch_metrics(self, epoch: int, batch: int) -> EpochMetrics:
        """Return an invented loss that falls exponentially."""
        loss = math.exp(-LOSS_FALL * epoch / EPOCHS)
        return EpochMetrics(train_loss=loss, metrics={}, noise_scale=None)

    def remaining_steps(self, epoch: int, progress: float) -> float:
        """Return the number of steps until the end of the job."""
        return max(0.0, EPOCHS * self.epoch_samples - progress) / self._batch
