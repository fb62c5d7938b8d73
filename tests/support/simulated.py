"""Small worlds in virtual time whose every moment can be computed by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from controlplane.core import invariants
from controlplane.core.commands import Command
from controlplane.core.events import Input
from controlplane.core.state import State
from controlplane.policy.api import Budget, ClusterView, Plan, Policy, PolicyEvent, SearchStats
from controlplane.policy.registry import entry, make
from controlplane.sim.engine.kernel import Kernel
from controlplane.sim.engine.simulation import Habits, World
from controlplane.sim.engine.simulator_oracle import Truth
from controlplane.sim.engine.training_progress import Training
from controlplane.sim.models.interference import Interference
from controlplane.sim.models.job_model import Costs, Pace, Placement, Report
from controlplane.sim.node_groups import Nodes, specs
from controlplane.sim.simulation_result import JobStory
from controlplane.sim.trace_jobs import TraceJob
from schemas.ids import JobId, NodeId, Seconds, SlotId, slot_id
from schemas.jobs import JobSpec

if TYPE_CHECKING:
    from numpy.random import Generator

RATE: Final = 10.0  # samples per second of one slot
FREE: Final = Costs(start_s=0.0, restart_s=0.0, prepare_s=0.0, switch_s=0.0)
DEAR: Final = Costs(start_s=8.0, restart_s=4.0, prepare_s=6.0, switch_s=0.5)
N0, N1 = NodeId("n0000"), NodeId("n0001")
S0, S1 = slot_id(N0, 0), slot_id(N0, 1)
T0, T1 = slot_id(N1, 0), slot_id(N1, 1)
A, B, C = JobId("a-1"), JobId("b-2"), JobId("c-3")
Event = tuple[Seconds, Input, list[Command]]


@dataclass(slots=True)
class ToyWork:
    """So many epochs of so many samples; n slots are n times as fast, whatever the batch."""

    spec: JobSpec
    costs: Costs = DEAR
    epochs: int = 4
    epoch_samples: int = 100
    rate: float = RATE
    application: str = "toy"
    jump: float = 0.0  # progress that a change of the batch costs
    noise: float | None = None  # scale in the first epoch; as much more in each later one

    @property
    def samples(self) -> float:
        """Of all epochs."""
        return float(self.epochs * self.epoch_samples)

    def pace(self, placement: Placement, batch: int, epoch: int) -> Pace:
        speed = self.rate * sum(placement)
        return Pace(samples_per_s=speed, progress_per_s=speed, step_s=batch / speed)

    def epoch_ends_at(self, epoch: int) -> float:
        return float((min(epoch, self.epochs - 1) + 1) * self.epoch_samples)

    def setback(self, before: int, batch: int, epoch: int) -> float:
        return self.jump if before != batch else 0.0

    def noise_scale(self, epoch: int, batch: int) -> float | None:
        return None if self.noise is None else self.noise * (1 + epoch)

    def report(self, epoch: int, batch: int) -> Report:
        noise_scale = self.noise_scale(max(0, epoch - 1), batch)
        return Report(train_loss=1.0 / (1 + epoch), metrics={}, noise_scale=noise_scale)

    def remaining_steps(self, epoch: int, progress: float) -> float:
        return (self.samples - progress) / self.spec.batch_size


@dataclass(frozen=True, slots=True)
class Toy:
    """Makes the work of jobs: what a trace calls `workload` is its family."""

    costs: Costs = DEAR
    epochs: int = 4
    epoch_samples: int = 100
    most: int = 8  # slots
    jump: float = 0.0
    retries: int = 1
    whole_seconds: bool = False
    noise: float | None = None

    def work(self, job: TraceJob, batch: Literal["fixed", "elastic"], *, seed: int) -> ToyWork:
        spec = JobSpec(
            name=job.name,
            script="train.py",
            family=job.workload,
            batch_size=64,
            max_batch_size=1024,
            max_local_batch=128,
            slots=(1, self.most),
            slots_wanted=job.slots,
            retries=self.retries,
        )
        return ToyWork(
            spec,
            costs=self.costs,
            epochs=self.epochs,
            epoch_samples=job.samples or self.epoch_samples,
            application=job.workload,
            jump=self.jump,
            noise=self.noise,
        )


Step = tuple[float, Mapping[JobId, Mapping[SlotId, int]]]  # from when on, and who has what


class Script:
    """A policy that wants what it was told, from when on it was told."""

    def __init__(self, *steps: Step) -> None:
        self.steps = steps
        self.heard: list[tuple[float, PolicyEvent]] = []

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        self.heard.append((now, event))

    def improve(self, view: ClusterView, budget: Budget, rng: Generator, now: Seconds) -> bool:
        return False

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
class Life:
    """One small world, everything that its core heard, and what was checked on the way."""

    kernel: Kernel
    world: World = field(init=False)
    events: list[Event] = field(default_factory=list)
    trainings: dict[JobId, Training] = field(default_factory=dict)

    @property
    def state(self) -> State:
        return self.world.reactor.state

    @property
    def stories(self) -> dict[str, JobStory]:
        return {story.job: story for story in self.world.stories()}

    def run(self, until: float = float("inf")) -> Life:
        self.kernel.run(until)
        return self

    def note(self, now: Seconds, event: Input, commands: Sequence[Command]) -> None:
        """Keep it, and check what must hold at every moment."""
        self.events.append((now, event, list(commands)))
        invariants.check(self.state)
        assert self.world.reactor.due(now) == [], "a deadline passed"
        self.trainings |= {name: crew.training for name, crew in self.world.crews.items()}
        owners, busy = self.state.owners(), dict[SlotId, JobId]()
        for name, crew in self.world.crews.items():
            if crew.group is not None and crew.training.pace.progress_per_s > 0.0:
                for member in crew.group.members:
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

    def announced(self, *kinds: str, job: JobId | None = None) -> list[tuple[float, str]]:
        """When the core announced these, or everything, of a job, or of all."""
        told = [
            command.event
            for _, _, commands in self.events
            for command in commands
            if hasattr(command, "event")
        ]
        return [
            (float(event.time), event.event)
            for event in told
            if (not kinds or event.event in kinds) and job in {None, event.job}
        ]

    def stays(self, name: str) -> list[tuple[str, float, float]]:
        return [(stay.slot, stay.since, stay.until) for stay in self.stories[name].stays]


def job(name: str, at: float = 0.0, slots: int = 1, **more: object) -> TraceJob:
    given = {"workload": "toy", **more}
    return TraceJob(name=name, at=Seconds(at), slots=slots, **given)  # type: ignore[arg-type] # the caller names fields


def life(
    policy: str | Policy,
    *jobs: TraceJob,
    nodes: tuple[Nodes, ...] = (Nodes(count=1, slots=2),),
    physics: Toy | None = None,
    round_s: float = 0.0,
    latency_s: float = 0.0,
    telemetry_s: float = 0.0,
    generations: int = 2,
    losses: Sequence[tuple[NodeId, float, float]] = (),
    interference: Callable[[World], Interference] | None = None,
) -> Life:
    """A world with these jobs to come, wired as a simulation of a scenario is.

    Args:
        policy: its name in the registry, or one of one's own.
        jobs: to be submitted.
        nodes: of the cluster.
        physics: of the jobs; `Toy()` if it is left out.
        round_s: between plans; then slots change hands in no time.
        latency_s: from a question to its answer.
        telemetry_s: between reports of steps.
        generations: of a policy that searches.
        losses: node, when it dies, and how long it is away.
        interference: made for the world.
    """
    kernel, toy = Kernel(), physics or Toy()
    habits = Habits(round_s > 0.0, toy.whole_seconds, telemetry_s, round_s)
    lived = Life(kernel)
    world = World(kernel, specs(nodes), habits, record=lived.note, stays=True)
    lived.world = world
    searches = isinstance(policy, str) and entry(policy).searches
    elastic = not isinstance(policy, str) or entry(policy).batch == "elastic"
    widest = max(group.slots for group in nodes)
    decider = policy
    if isinstance(decider, str):
        decider = make(decider, {}, Truth(kernel, world.crews, widest))
    world.plan_with(
        decider,
        latency_s=latency_s,
        generations=generations if searches else 0,
        think_s=0.0,
        epochs=isinstance(policy, str) and entry(policy).epochs,
        seed=1,
    )
    world.interference = interference(world) if interference else None
    world.begin()
    for each in jobs:
        make_work = partial(toy.work, each, "elastic" if elastic else "fixed", seed=1)
        world.submit(each, make_work, counted=True)
    for node, at, back_after_s in losses:
        world.lose(node, at, back_after_s)
    return lived
