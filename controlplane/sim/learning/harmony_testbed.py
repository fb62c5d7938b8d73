"""Environment for training `harmony-drl`: jobs arrive, are placed, slow each other down and end.

It uses the simulator's traces, models and interference rules, but not the simulator itself.
Exploration is job-aware: one pattern places a whole job, instead of single workers at random.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from msgspec.structs import replace
from numpy.random import Generator, default_rng

from controlplane.policy.learned.gang_model import Candidates, Choose
from controlplane.policy.learned.shared_nodes import SharedNodes
from controlplane.sim.engine.oracle import demand_of_model
from controlplane.sim.models.demands import Demand
from controlplane.sim.models.harmony import BATCHES
from controlplane.sim.models.interference import make_interference
from controlplane.sim.models.job_model import JobModel, packed, training_s
from controlplane.sim.scenario import HARMONY, Scenario, model_of, trace_of, usual_demands
from schemas.ids import JobId, NodeId

WORK_TOLERANCE: Final = 1e-9  # a job ends when this share of its work is left
Speeds = Callable[[SharedNodes, Sequence[str]], Mapping[str, float]]
Place = Callable[[SharedNodes, "Arrival", Sequence["Arrival"]], None]


@dataclass(frozen=True, slots=True)
class Arrival:
    """Submitted job with its class, size and work."""

    name: str
    at: float  # seconds
    number: int  # number of the job's class
    size: int  # number of workers
    work_s: float  # training time alone on the fewest nodes


@dataclass(slots=True)
class _Running:
    arrival: Arrival
    left_s: float  # remaining work
    trains_at: float  # time at which its start is complete


@dataclass(slots=True)
class Episode:
    """Episode from the first submission until the last job ends.

    Paper: intervals of equal length. Here: an interval ends when a job arrives, starts training or
    ends, because a decision is possible only when jobs arrive or end.
    """

    arrivals: Sequence[Arrival]  # in order of time
    shared: SharedNodes  # empty at first
    speeds: Speeds  # returns the speeds of training jobs, relative to their speed alone
    start_s: float = 0.0  # time from the placement to the first step
    now: float = 0.0
    ends: dict[str, float] = field(default_factory=dict)  # job -> end, seconds
    # For each interval: start and end in seconds, sum of relative speeds, number of active jobs.
    intervals: list[tuple[float, float, float, int]] = field(default_factory=list)
    _coming: deque[Arrival] = field(default_factory=deque)
    _queue: deque[Arrival] = field(default_factory=deque)
    _running: dict[str, _Running] = field(default_factory=dict)

    def run(self, place: Place) -> None:
        """Run the episode.

        `place` puts the workers of a job that fits onto nodes. Its arguments are the nodes, on
        which the job is registered without workers, the job, and the jobs that still wait.
        """
        self._coming.extend(self.arrivals)
        while self._coming or self._queue or self._running:
            while self._coming and self._coming[0].at <= self.now:
                self._queue.append(self._coming.popleft())
            while self._queue and self._queue[0].size <= int(self.shared.free.sum()):
                job = self._queue.popleft()
                self.shared.add(job.name, job.number, job.size)
                place(self.shared, job, self._queue)
                self._running[job.name] = _Running(job, job.work_s, self.now + self.start_s)
            self._advance()

    def _advance(self) -> None:
        training = [name for name, job in self._running.items() if job.trains_at <= self.now]
        speeds = self.speeds(self.shared, training) if training else {}
        until = self._coming[0].at if self._coming else math.inf
        for name, job in self._running.items():
            due = self.now + job.left_s / speeds[name] if name in speeds else job.trains_at
            until = min(until, due)
        passed = until - self.now
        jobs = len(self._running) + len(self._queue)
        self.intervals.append((self.now, until, math.fsum(speeds.values()), jobs))
        self.now = until
        for name, speed in speeds.items():
            job = self._running[name]
            if job.left_s <= speed * passed * (1.0 + WORK_TOLERANCE):
                self.ends[name] = until
                del self._running[name]
                self.shared.remove(name)
            else:
                job.left_s -= speed * passed


TRAINED_FAMILIES: Final = tuple(BATCHES)
PATTERNS: Final[tuple[Literal["uniform", "poisson", "google"], ...]] = (
    "uniform", "poisson", "google",
)  # fmt: skip
LOADS: Final = (0.8, 1.3)  # range of the factor on the usual time between submissions
LOAD_STREAM: Final = 7  # random stream of these draws


class HarmonyTestbed:
    """The trace of a scenario, with the true speed of its jobs under any placement."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        """Draw the trace with the functions that the simulator uses."""
        model = model_of(scenario)
        self.scenario = scenario
        self.arrivals: list[Arrival] = []
        self._jobs: dict[JobId, JobModel] = {}
        self._shared: SharedNodes | None = None
        for job in trace_of(scenario, seed).jobs:
            truth = self._jobs[JobId(job.name)] = model.job_model(job, "fixed", seed=seed)
            number = TRAINED_FAMILIES.index(truth.spec.family or "")
            placement = packed(job.slots, scenario.widest)
            work_s = training_s(truth, placement, truth.spec.batch_size)
            self.arrivals.append(Arrival(job.name, job.at, number, job.slots, work_s))
            self.start_s = truth.costs.start_s
        self._rule = make_interference(scenario.interference, self, seed, usual_demands(scenario))

    @property
    def sizes(self) -> list[int]:
        """Number of slots of every node."""
        return [group.slots for group in self.scenario.nodes for _ in range(group.count)]

    def speeds(self, shared: SharedNodes, training: Sequence[str]) -> dict[str, float]:
        """Return the speed of each training job, relative to its speed alone on few nodes."""
        self._shared = shared
        on_node: dict[int, dict[JobId, int]] = {}
        for name in training:
            for node, workers in shared.jobs[name].workers.items():
                on_node.setdefault(node, {})[JobId(name)] = workers
        found: dict[str, float] = {}
        for name in training:
            job = JobId(name)
            found[name] = self._apart(job)
            if self._rule is not None:
                at = {_node(node): on_node[node] for node in shared.jobs[name].workers}
                found[name] *= self._rule(job, at)
        return found

    def _apart(self, job: JobId) -> float:
        """Return a job's speed on its nodes without neighbours, relative to its packed speed."""
        model = self._jobs[job]
        placement = tuple(self.placement(job).values())
        few = packed(sum(placement), self.scenario.widest)
        batch = model.spec.batch_size
        now = model.throughput(placement, batch, 0).progress_per_s
        return now / model.throughput(few, batch, 0).progress_per_s

    # --- `TrainingJobs`, for rules of interference

    def family(self, job: JobId) -> str:
        """Return the job's application."""
        return self._jobs[job].application

    def placement(self, job: JobId) -> Mapping[NodeId, int]:
        """Return the number of the job's workers on each node."""
        if self._shared is None:
            return {}
        return {_node(at): many for at, many in self._shared.jobs[job].workers.items()}

    def demand(self, job: JobId) -> Demand:
        """Return the demand of the job's workers and servers."""
        return demand_of_model(self._jobs[job])

    def gpu(self, node: NodeId) -> str:
        """Return an empty GPU model, because all nodes are equal."""
        return ""

    def slots(self, node: NodeId) -> int:
        """Return the number of slots on the node."""
        return self.sizes[int(node)]


def _node(number: int) -> NodeId:
    return NodeId(str(number))


def draw_testbed(seed: int, jobs: int) -> HarmonyTestbed:
    """Draw a testbed: a trace with a random load and one of the paper's arrival patterns."""
    rng = default_rng((seed, LOAD_STREAM))
    scenario = replace(
        HARMONY,
        jobs=jobs,
        arrivals=PATTERNS[int(rng.integers(len(PATTERNS)))],
        interval_s=HARMONY.interval_s * float(rng.uniform(*LOADS)),
    )
    return HarmonyTestbed(scenario, seed)


# Columns of `gang_model.features_of`.
FREE_SLOTS, OWN_WORKERS, FITS, JOBS = 2, 3, 4, 11
EXPLORED_PATTERNS: Final[Mapping[str, Mapping[int, float]]] = {
    # Packed: few nodes, those with the fewest free slots that fit. Balanced: one worker on each of
    # the emptiest nodes. Least loaded: the nodes with the fewest jobs.
    "packed": {FITS: 4.0, OWN_WORKERS: 8.0, FREE_SLOTS: -1.0},
    "balanced": {OWN_WORKERS: -8.0, FREE_SLOTS: 1.0},
    "least loaded": {JOBS: -8.0, OWN_WORKERS: 1.0},
}


def pattern(name: str) -> Choose:
    """Return a rule that places each worker of a job by the pattern `name`."""
    weights = EXPLORED_PATTERNS[name]

    def choose(among: Candidates) -> int:
        found = sum(among.features[:, column] * weight for column, weight in weights.items())
        return int(np.argmax(found))

    return choose


def at_random(rng: Generator) -> Choose:
    """Return a rule that places each worker on a random node."""

    def choose(among: Candidates) -> int:
        return int(rng.integers(len(among.scores)))

    return choose
