"""Small simulations whose every moment can be computed by hand, and results and recordings of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from controlplane.core import invariants
from controlplane.core.commands import Command
from controlplane.core.inputs import Input, NodeGreeted, NodeLost, NodeSuspected
from controlplane.core.model.job import Job
from controlplane.core.state import State
from controlplane.policy.api import Budget, ClusterView, Plan, Policy, PolicyEvent, SearchStats
from controlplane.policy.registry import entry, make
from controlplane.sim.cluster import NodeGroup, node_specs
from controlplane.sim.engine.event_queue import Kernel, PlannerOptions, SimOptions
from controlplane.sim.engine.jobs import TrainingProgress
from controlplane.sim.engine.oracle import SimulatorOracle
from controlplane.sim.engine.simulation import Simulation
from controlplane.sim.models.demands import Interference
from controlplane.sim.models.job_model import ChangeCosts, EpochMetrics, Placement, Throughput
from controlplane.sim.models.recording import (
    ChangeTimes,
    Epoch,
    EpochSpeed,
    Family,
    Recording,
    Submission,
)
from controlplane.sim.results import JobResult, SimulationResult, TraceJob
from controlplane.sim.scenario import Scenario
from schemas.ids import JobId, NodeId, Seconds, SlotId, slot_id
from schemas.jobs import JobSpec, StopRule
from schemas.wire.agent import (
    EpochReported,
    GroupBroken,
    GroupFormed,
    ScriptFailed,
    Suspended,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
)
from tests.support import builders

if TYPE_CHECKING:
    from numpy.random import Generator


RATE: Final = 10.0  # samples per second of one slot
FREE: Final = ChangeCosts(start_s=0.0, restart_s=0.0, prepare_s=0.0, switch_s=0.0)
DEAR: Final = ChangeCosts(start_s=8.0, restart_s=4.0, prepare_s=6.0, switch_s=0.5)
N0, N1 = NodeId("n0000"), NodeId("n0001")
S0, S1 = slot_id(N0, 0), slot_id(N0, 1)
T0, T1 = slot_id(N1, 0), slot_id(N1, 1)
A, B, C = JobId("a-1"), JobId("b-2"), JobId("c-3")
Event = tuple[Seconds, Input, list[Command]]
TOLD: Final = {  # in a story
    NodeGreeted: "greeted", NodeSuspected: "suspected", NodeLost: "lost", WorkerStarted: "started",
    WorkerReady: "ready", GroupFormed: "formed", EpochReported: "epochs", Suspended: "suspended",
    ScriptFailed: "raised", GroupBroken: "broken", WorkerExited: "exited",
}  # fmt: skip


@dataclass(slots=True)
class ToyJob:
    """So many epochs of so many samples; n slots are n times as fast, whatever the batch."""

    spec: JobSpec
    costs: ChangeCosts = DEAR
    epochs: int = 4
    epoch_samples: int = 100
    rate: float = RATE
    application: str = "toy"
    demand: None = None
    jump: float = 0.0  # progress that a change of the batch costs
    noise: float | None = None  # scale in the first epoch; as much more in each later one
    loss_epochs: int | None = None  # until its loss is at its least, falling evenly; None: made up

    @property
    def samples(self) -> float:
        """Of all epochs."""
        return float(self.epochs * self.epoch_samples)

    def throughput(self, placement: Placement, batch: int, epoch: int) -> Throughput:
        speed = self.rate * sum(placement)
        return Throughput(samples_per_s=speed, progress_per_s=speed, step_s=batch / speed)

    def epoch_ends_at(self, epoch: int) -> float:
        return float((min(epoch, self.epochs - 1) + 1) * self.epoch_samples)

    def lost_progress(self, before: int, batch: int, epoch: int) -> float:
        return self.jump if before != batch else 0.0

    def noise_scale(self, epoch: int, batch: int) -> float | None:
        return None if self.noise is None else self.noise * (1 + epoch)

    def epoch_metrics(self, epoch: int, batch: int) -> EpochMetrics:
        noise_scale = self.noise_scale(max(0, epoch - 1), batch)
        return EpochMetrics(train_loss=1.0 / (1 + epoch), metrics={}, noise_scale=noise_scale)

    def loss_left(self, epoch: int) -> float | None:
        return None if self.loss_epochs is None else max(0.0, 1.0 - epoch / self.loss_epochs)

    def remaining_steps(self, epoch: int, progress: float) -> float:
        return (self.samples - progress) / self.spec.batch_size


@dataclass(frozen=True, slots=True)
class ToyModel:
    """Makes toy jobs: what a trace calls `workload` is their family."""

    costs: ChangeCosts = DEAR
    epochs: int = 4
    epoch_samples: int = 100
    most: int = 8  # slots
    jump: float = 0.0
    retries: int = 1
    whole_seconds: bool = False
    noise: float | None = None
    loss_epochs: int | None = None

    def job_model(self, job: TraceJob, batch: Literal["fixed", "elastic"], *, seed: int) -> ToyJob:
        spec = JobSpec(
            name=job.name, script="train.py", family=job.workload, batch_size=64,
            max_batch_size=1024, max_local_batch=128, slots=(1, self.most), slots_wanted=job.slots,
            retries=self.retries,
        )  # fmt: skip
        return ToyJob(
            spec, costs=self.costs, epochs=self.epochs,
            epoch_samples=job.samples or self.epoch_samples, application=job.workload,
            jump=self.jump, noise=self.noise, loss_epochs=self.loss_epochs,
        )  # fmt: skip


Step = tuple[float, Mapping[JobId, Mapping[SlotId, int]]]  # from when on, and who has what


class ScriptedPolicy:
    """A policy that wants what it was told, from when on it was told."""

    def __init__(self, *steps: Step) -> None:
        self.steps = steps
        self.observed: list[tuple[float, PolicyEvent]] = []

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        self.observed.append((now, event))

    def improve(self, view: ClusterView, budget: Budget, rng: Generator, now: Seconds) -> bool:
        return False

    def batches(self, view: ClusterView, now: Seconds) -> Plan:
        return Plan(based_on=view.version)

    def stats(self) -> SearchStats:
        return SearchStats()

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        due = [placed for at, placed in self.steps if at <= now]
        later = [at for at, _ in self.steps if at > now]
        wanted = due[-1] if due else {}
        usable = {slot.slot for slot in view.slots if slot.up}
        return Plan(
            based_on=view.version,
            local_batch={
                name: dict(placed)
                for name, placed in wanted.items()
                if name in view.jobs and placed.keys() <= usable
            },
            wake_at=Seconds(min(later)) if later else None,
        )


@dataclass
class SimulatedRun:
    """One small simulation, everything that its core heard, and what was checked on the way."""

    simulation: Simulation = field(init=False)
    events: list[Event] = field(default_factory=list)
    trainings: dict[JobId, TrainingProgress] = field(default_factory=dict)

    @property
    def state(self) -> State:
        return self.simulation.reactor.state

    def job(self, name: str) -> Job:
        """Return a job of the state, or the last version of a job that left it."""
        return self.simulation._job_log.job(JobId(name), self.state)

    @property
    def jobs(self) -> dict[str, JobResult]:
        return {ended.job: ended for ended in self.simulation.results()}

    def run(self, until: float = float("inf")) -> SimulatedRun:
        self.simulation.kernel.run(until)
        return self

    def note(self, now: Seconds, event: Input, commands: Sequence[Command]) -> None:
        """Keep it, and check what must hold at every moment."""
        self.events.append((now, event, list(commands)))
        invariants.check(self.state)
        assert self.simulation.reactor.due(now) == [], "a deadline passed"
        known = self.simulation.jobs
        self.trainings |= {name: processes.training for name, processes in known.items()}
        owners, busy = self.state.slot_index.owners(), dict[SlotId, JobId]()
        for name, processes in known.items():
            if processes.group is not None and processes.training.is_training:
                for member in processes.group.members:
                    assert owners.get(member.slot) == name, f"{name} trains on {member.slot}"
                    assert busy.setdefault(member.slot, name) == name

    def times(self, kind: type, job: JobId | None = None) -> list[float]:
        """When the core heard events of that kind, of the nodes' streams too."""
        found = []
        for now, event, _ in self.events:
            inner = getattr(event, "event", event)
            if isinstance(inner, kind) and job in {None, getattr(inner, "job", None)}:
                found.append(float(now))
        return found

    def allocations(self, name: str) -> list[tuple[str, float, float]]:
        return [(each.slot, each.since, each.until) for each in self.jobs[name].allocations]

    def story(self) -> str:
        """Return what happened to each lost node and to each job, and when; two lines for a job."""
        results = self.jobs
        found: dict[str, dict[str, list[float]]] = {name: {} for name in results}
        for now, event, _ in self.events:
            inner = getattr(event, "event", event)
            about = str(getattr(inner, "job", "")).rpartition("-")[0] or getattr(inner, "node", "")
            if word := TOLD.get(type(inner)):
                found.setdefault(about, {}).setdefault(word, []).append(float(now))
        told = []
        for about, times in sorted(found.items()):
            said = [f"{word} {_spaced(times[word])}" for word in TOLD.values() if word in times]
            if (ended := results.get(about)) or "lost" in times:
                told.append(f"{about}: {', '.join(said) or 'never started'}")
            if ended:
                held = [
                    f"{each.slot.removeprefix('n000')} {each.since:g}-{each.until:g}"
                    for each in ended.allocations
                ]
                figures = {
                    "at": ended.ended_at or 0.0, "queued": ended.queued_s, "ran": ended.exec_s,
                    "rescales": ended.rescales, "batches": ended.batch_changes,
                }  # fmt: skip
                parts = [f"{key} {value:g}" for key, value in figures.items() if value]
                told.append(f"on {', '.join(held) or 'nothing'}; {ended.state} {', '.join(parts)}")
        return "\n".join(told)


def _spaced(numbers: Sequence[float]) -> str:
    return " ".join(f"{number:.10g}" for number in numbers)


def job(name: str, at: float = 0.0, slots: int = 1, **more: object) -> TraceJob:
    given = {"workload": "toy", **more}
    return TraceJob(name=name, at=Seconds(at), slots=slots, **given)  # type: ignore[arg-type] # the caller names fields


def simulated_run(
    policy: str | Policy,
    *jobs: TraceJob,
    nodes: tuple[NodeGroup, ...] = (NodeGroup(count=1, slots=2),),
    model: ToyModel | None = None,
    round_s: float = 0.0,
    latency_s: float = 0.0,
    telemetry_s: float = 0.0,
    generations: int = 2,
    losses: Sequence[tuple[NodeId, float, float]] = (),
    interference: Callable[[Simulation], Interference] | None = None,
    changes: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> SimulatedRun:
    """A simulation with these jobs to come, wired as that of a scenario is.

    Args:
        policy: its name in the registry, or one of one's own.
        jobs: to be submitted.
        nodes: of the cluster.
        model: of the jobs; `ToyModel()` if it is left out.
        round_s: between plans; then slots change hands in no time.
        latency_s: from a question to its answer.
        telemetry_s: between reports of steps.
        generations: of a policy that searches.
        losses: node, when it dies, and how long it is away.
        interference: made for the simulation.
        changes: of the scenario: fields and their values.
        seed: of the errors of measurements.
    """
    kernel, toy, run = Kernel(), model or ToyModel(), SimulatedRun()
    scenario = Scenario(
        nodes=nodes,
        round_s=round_s,
        record_allocations=True,
        **{"information": "perfect", **(changes or {})},
    )
    options = SimOptions(
        scenario, whole_seconds=toy.whole_seconds, telemetry_s=telemetry_s, seed=seed
    )
    simulation = Simulation(kernel, node_specs(nodes), options, record=run.note)
    run.simulation = simulation
    searches = isinstance(policy, str) and entry(policy).searches
    elastic = not isinstance(policy, str) or entry(policy).batch == "elastic"
    decider = policy
    if isinstance(decider, str):
        widest = max(group.slots for group in nodes)
        decider = make(decider, {}, SimulatorOracle(kernel, simulation.jobs, widest))
    planning = PlannerOptions(
        round_s=round_s, latency_s=latency_s, generations=generations if searches else 0,
        think_s=0.0, asks_after_epochs=isinstance(policy, str) and entry(policy).epochs, seed=1,
        rebatches=not isinstance(policy, str) or entry(policy).rebatches,
    )  # fmt: skip
    simulation.use_policy(decider, planning)
    if interference is not None:
        simulation.use_interference(interference(simulation))
    simulation.begin()
    for each in jobs:
        make_model = partial(toy.job_model, each, "elastic" if elastic else "fixed", seed=1)
        simulation.submit(each, make_model, counted=True)
    for node, at, back_after_s in losses:
        simulation.lose_node(node, at, back_after_s)
    return run


def job_result(name: str, jct: float | None, at: float = 0.0, **changes: object) -> JobResult:
    """A job that waited for a quarter of its time; with None it did not end."""
    made = JobResult(
        job=name, application="bert", submitted_at=Seconds(at), started_at=Seconds(at),
        ended_at=None if jct is None else Seconds(at + jct),
        state="running" if jct is None else "succeeded", queued_s=(jct or 0.0) / 4,
        exec_s=(jct or 0.0) * 3 / 4, slot_s=jct or 0.0, rescales=2, batch_changes=0,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def result(
    *jobs: JobResult, policy: str = "ones", seed: int = 5, **changes: object
) -> SimulationResult:
    """A simulation of these jobs on four slots."""
    made = SimulationResult(
        policy=policy, options={}, setting={"physics": "table2"}, seed=seed, slots=4, jobs=jobs,
        ended_at=Seconds(max((job.ended_at or 0.0 for job in jobs), default=0.0)),
        busy_slot_s=100.0, decisions_ms=(1.0, 3.0), events=70, wall_s=0.5,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def times(policy: str, *jct: float, seed: int = 5) -> SimulationResult:
    """A result of jobs with these completion times."""
    jobs = [job_result(f"job-{index}", value) for index, value in enumerate(jct)]
    return result(*jobs, policy=policy, seed=seed)


ONE_SLOT: Final = EpochSpeed(1, 1, 64, 640.0)


def a_job(**changes: Any) -> Submission:
    """Four epochs of 1000 samples on one slot, each as fast as `ONE_SLOT`."""
    job = Submission(
        name="a-1", at=0.0, user="user-1", family="m",
        spec=builders.job_spec(
            "a", max_batch_size=512, slots=(1, 4), stop=StopRule(epochs=4), retries=2,
        ),
        ended="succeeded", ended_after_s=60.0, samples=4000, stated_samples=4000,
        epoch_samples=1000,
        epochs=tuple(Epoch(number, 64, None, None, ONE_SLOT) for number in (1, 2, 3, 4)),
    )  # fmt: skip
    return msgspec.structs.replace(job, **changes)


def recording(*jobs: Submission, **changes: Any) -> Recording:
    """These jobs of one family, measured on one slot, if `changes` of the family do not say more."""
    family = Family(name="m", speeds=(ONE_SLOT,) * 4, epoch_samples=1000)
    return Recording(
        name="week", nodes=(NodeGroup(count=1, slots=4),), took=ChangeTimes(),
        families=(msgspec.structs.replace(family, **changes),), jobs=jobs, left_out={},
    )  # fmt: skip
