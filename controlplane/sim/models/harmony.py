"""Jobs as in Harmony's evaluation: gangs of workers with parameter servers, on small servers.

Bao et al., INFOCOM '19: six servers of two GPUs, six models, 1 to 3 workers and as many servers.
The paper says neither how fast they train nor for how long; `interference/demands` has what each
asks for, and lengths are drawn by the trace. What a job's own workers do to each other on a node is
part of its speed alone; what others do is up to `--interference`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal

from controlplane.sim.cluster import TraceError
from controlplane.sim.models.demands import Demand, demand_of
from controlplane.sim.models.interference import PER_SLOT, node_demand, stretch
from controlplane.sim.models.job_model import ChangeCosts, EpochMetrics, Placement, Throughput
from controlplane.sim.results import TraceJob
from schemas.ids import NodeId
from schemas.jobs import JobSpec, StopRule

BATCHES: Final[Mapping[str, int]] = {  # of a worker, samples; chosen, as tutorials have them
    "resnet50": 32, "vgg16": 32, "resnext110": 64, "seq2seq": 64, "ctc": 50, "wlm": 20,
}  # fmt: skip
EPOCHS: Final = 20  # of every job
JOB_S: Final = 900.0  # mean of a job by itself; chosen
SLOTS_PER_NODE: Final = 2
MOST_SERVERS: Final = 64
LOSS_FALLS: Final = 3.0  # by exp(-3) in all
# Chosen: containers are there; a process starts, reads its data, and joins.
COSTS: Final = ChangeCosts(start_s=10.0, restart_s=10.0, prepare_s=8.0, switch_s=1.0)


def workload_of(name: str) -> tuple[str, int]:
    """The model and the parameter servers of a workload such as `vgg16-2ps`; `vgg16`: a ring.

    Raises:
        TraceError: if there is no such model, or too many servers.
    """
    model, servers = name, 0
    found = re.fullmatch(r"(.+)-(\d{1,4})ps", name)
    if found is not None:
        model, servers = found[1], int(found[2])
    if model not in BATCHES or servers > MOST_SERVERS:
        what = f"{name[:60]!r} is no workload of Harmony's testbed"
        hint = f"choose from {', '.join(BATCHES)}, with up to {MOST_SERVERS} servers: vgg16-2ps"
        raise TraceError(what, hint, "workload")
    return model, servers


def slowest_node(demand: Demand, placement: Mapping[NodeId, int], slots_per_node: int) -> float:
    """How many times as long a job's step takes for its own workers that share nodes.

    Args:
        placement: its workers on each node, in rank order.
    """
    capacity = tuple(each * slots_per_node for each in PER_SLOT)
    asks = [node_demand(demand, placement, node) for node in placement]
    return max(stretch(demand, own, own, (capacity[0], capacity[1], capacity[2])) for own in asks)


class HarmonyModel:
    """Makes jobs of Harmony's testbed."""

    def __init__(
        self,
        costs: ChangeCosts = COSTS,
        *,
        slots_per_node: int = SLOTS_PER_NODE,
        job_s: float = JOB_S,
        stated: bool = False,
    ) -> None:
        """Choose what traces do not say.

        Args:
            job_s: seconds that a job trains by itself if its trace does not say its samples.
            stated: users state how many epochs their jobs take.
        """
        self._costs = costs
        self._slots_per_node = slots_per_node
        self._job_s = job_s
        self._stated = stated

    @property
    def whole_seconds(self) -> bool:
        """Epochs last as long as they last."""
        return False

    def job_model(
        self, job: TraceJob, batch: Literal["fixed", "elastic"], *, seed: int
    ) -> HarmonyJob:
        """The truth about `job`, a gang of fixed size and batch whatever the policy.

        Raises:
            TraceError: if there is no such workload.
        """
        model, servers = workload_of(job.workload)
        if job.slots < 1:
            what = f"job {job.name} asks for {job.slots} workers"
            raise TraceError(what, "give at least 1", "slots")
        return HarmonyJob(
            job,
            model,
            replace(demand_of(model), servers=servers),
            slots_per_node=self._slots_per_node,
            job_s=self._job_s,
            costs=self._costs,
            stated=self._stated,
        )


class HarmonyJob:
    """One job; see `JobModel`."""

    def __init__(
        self,
        job: TraceJob,
        model: str,
        demand: Demand,
        *,
        slots_per_node: int,
        job_s: float,
        costs: ChangeCosts,
        stated: bool,
    ) -> None:
        """Let it train a model.

        Args:
            model: that it trains.
            demand: of its workers, with its servers.
            job_s: seconds by itself, if the trace does not say its samples.
            stated: whether policies know how many epochs it takes.
        """
        self.demand = demand
        self._model = model
        self._batch = BATCHES[model] * job.slots
        self._slots_per_node = slots_per_node
        samples = job.samples or job_s * self._batch / demand.step_s
        self._epoch_samples = max(1, round(samples / EPOCHS))
        self._costs = costs
        self._steps: dict[Placement, float] = {}
        self._spec = JobSpec(
            name=re.sub(r"[^A-Za-z0-9_-]+", "-", job.name).lstrip("-_")[:48] or "job",
            script="train.py",
            args=(job.workload,),
            family=model,
            batch_size=self._batch,
            max_batch_size=self._batch,
            max_local_batch=self._batch,  # on fewer slots than it asks for: in several passes
            slots=(job.slots, job.slots),
            slots_wanted=job.slots,
            stop=StopRule(epochs=EPOCHS) if stated else None,
            retries=1,
        )

    @property
    def application(self) -> str:
        """Its model, however many servers it has."""
        return self._model

    @property
    def spec(self) -> JobSpec:
        """What its user submits."""
        return self._spec

    @property
    def epoch_samples(self) -> int:
        """||D||."""
        return self._epoch_samples

    @property
    def costs(self) -> ChangeCosts:
        """Of this job's changes."""
        return self._costs

    @property
    def epochs(self) -> int:
        """The same of all jobs: these differ in how long an epoch is."""
        return EPOCHS

    def throughput(self, placement: Placement, batch: int, epoch: int) -> Throughput:
        """As many samples as its slowest node lets all workers do."""
        step_s = self._steps.get(placement)
        if step_s is None:
            nodes = {NodeId(str(number)): many for number, many in enumerate(placement)}
            step_s = self.demand.step_s * slowest_node(self.demand, nodes, self._slots_per_node)
            self._steps[placement] = step_s
        return Throughput(batch / step_s, batch / step_s, step_s)

    def epoch_ends_at(self, epoch: int) -> float:
        """After so many passes over its data."""
        return float((epoch + 1) * self._epoch_samples)

    def lost_progress(self, before: int, batch: int, epoch: int) -> float:
        """None: its batch never changes."""
        return 0.0

    def noise_scale(self, epoch: int, batch: int) -> float | None:
        """It measures none."""
        return None

    def epoch_metrics(self, epoch: int, batch: int) -> EpochMetrics:
        """A made-up loss that falls exponentially."""
        loss = math.exp(-LOSS_FALLS * epoch / EPOCHS)
        return EpochMetrics(train_loss=loss, metrics={}, noise_scale=None)

    def loss_left(self, epoch: int) -> float | None:
        """Its loss is made up."""
        return None

    def remaining_steps(self, epoch: int, progress: float) -> float:
        """Steps that are left."""
        return max(0.0, EPOCHS * self._epoch_samples - progress) / self._batch
