"""The simulator's own truth about jobs, for an environment without the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from msgspec.structs import replace
from numpy.random import default_rng

from controlplane.policy.harmony_drl.shared_nodes import SharedNodes
from controlplane.sim.engine.training_jobs import demand_of_model
from controlplane.sim.learning.harmony_drl.environment import Arrival
from controlplane.sim.models.harmony.harmony_model import BATCHES
from controlplane.sim.models.interference.demands import Demand
from controlplane.sim.models.interference.form import parse_interference
from controlplane.sim.models.interference.making import make_interference
from controlplane.sim.models.interference.rule import Interference
from controlplane.sim.models.job_model import JobModel, packed
from controlplane.sim.scenario import HARMONY, Scenario
from controlplane.sim.scenario_loading import model_of, trace_of, usual_demands
from schemas.ids import JobId, NodeId

TRAINED_FAMILIES: Final = tuple(BATCHES)
PATTERNS: Final[tuple[Literal["uniform", "poisson", "google"], ...]] = (
    "uniform",
    "poisson",
    "google",
)
LOADS: Final = (0.8, 1.3)  # times the usual interval between submissions
LOADS_DRAWN: Final = 7  # tells these draws from the trace's


@dataclass(slots=True)
class HarmonyTestbed:
    """One trace of a scenario: its jobs, and how fast they are wherever they are placed."""

    scenario: Scenario
    seed: int
    families: Sequence[str]  # by number of their class
    arrivals: tuple[Arrival, ...] = ()
    start_s: float = 0.0
    _jobs: dict[JobId, JobModel] = field(default_factory=dict)
    _demands: dict[JobId, Demand] = field(default_factory=dict)
    _shared: SharedNodes | None = None
    _rule: Interference | None = None

    def __post_init__(self) -> None:
        """Draw the trace, as the simulator does."""
        scenario, model = self.scenario, model_of(self.scenario)
        found: list[Arrival] = []
        for job in trace_of(scenario, self.seed).jobs:
            truth = self._jobs[JobId(job.name)] = model.job_model(job, "fixed", seed=self.seed)
            self._demands[JobId(job.name)] = demand_of_model(truth)
            number = self.families.index(truth.spec.family or "")
            work_s = _work_s(truth, job.slots, scenario.widest)
            found.append(Arrival(job.name, job.at, number, job.slots, work_s))
            self.start_s = truth.costs.start_s
        self.arrivals = tuple(found)
        demands = usual_demands(scenario)
        form = parse_interference(scenario.interference)
        self._rule = make_interference(form, self, self.seed, demands)

    @property
    def sizes(self) -> list[int]:
        """Slots of every node."""
        return [group.slots for group in self.scenario.nodes for _ in range(group.count)]

    def speeds(self, shared: SharedNodes, training: Sequence[str]) -> dict[str, float]:
        """Shares of their speed alone on few nodes that jobs have.

        Args:
            training: jobs that slow each other down; others there start only.
        """
        self._shared = shared
        here: dict[int, dict[JobId, int]] = {}
        for name in training:
            for node, workers in shared.jobs[name].workers.items():
                here.setdefault(node, {})[JobId(name)] = workers
        found: dict[str, float] = {}
        for name in training:
            job = JobId(name)
            found[name] = self._apart(job)
            if self._rule is not None:
                at = {_node(node): here[node] for node in shared.jobs[name].workers}
                found[name] *= self._rule.remaining_speed(job, at)
        return found

    def _apart(self, job: JobId) -> float:
        """Of its speed on few nodes, what it has where its nodes are."""
        model = self._jobs[job]
        placement = tuple(self.placement(job).values())
        few = packed(sum(placement), self.scenario.widest)
        batch = model.spec.batch_size
        now = model.throughput(placement, batch, 0).progress_per_s
        return now / model.throughput(few, batch, 0).progress_per_s

    # --- what rules of interference ask

    def family(self, job: JobId) -> str:
        """What it trains."""
        return self._jobs[job].application

    def placement(self, job: JobId) -> Mapping[NodeId, int]:
        """Its workers on each node."""
        if self._shared is None:
            return {}
        return {_node(at): many for at, many in self._shared.jobs[job].workers.items()}

    def demand(self, job: JobId) -> Demand:
        """What its workers and servers ask of a node."""
        return self._demands[job]

    def gpu(self, node: NodeId) -> str:
        """All nodes are alike."""
        return ""

    def slots(self, node: NodeId) -> int:
        """How many slots it has."""
        return self.sizes[int(node)]


def _node(number: int) -> NodeId:
    return NodeId(str(number))


def _work_s(model: JobModel, slots: int, widest: int) -> float:
    """Seconds that a job trains alone on as few nodes as possible."""
    total, progress, placement = 0.0, 0.0, packed(slots, widest)
    for epoch in range(model.epochs):
        ends = model.epoch_ends_at(epoch)
        rate = model.throughput(placement, model.spec.batch_size, epoch).progress_per_s
        total += (ends - progress) / rate
        progress = ends
    return total


def draw_testbed(seed: int, jobs: int) -> HarmonyTestbed:
    """A trace of Harmony's testbed: one of the paper's three arrival patterns, at some load.

    Args:
        seed: of the trace, and of its pattern and load.
    """
    rng = default_rng((seed, LOADS_DRAWN))
    scenario = replace(
        HARMONY,
        jobs=jobs,
        arrivals=PATTERNS[int(rng.integers(len(PATTERNS)))],
        interval_s=HARMONY.interval_s * float(rng.uniform(*LOADS)),
    )
    return HarmonyTestbed(scenario, seed, TRAINED_FAMILIES)
