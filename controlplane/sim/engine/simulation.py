"""Users, nodes and jobs around one controller core, in virtual time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from controlplane.core import policy_events
from controlplane.core.commands import Accept, Announce, AskForPlan, Command, SendDelta
from controlplane.core.events import (
    CancelRequested,
    ControllerStarted,
    Input,
    JobSubmitted,
    NodeGreeted,
    NodeLost,
    NodeReported,
    NodeSuspected,
)
from controlplane.core.model.job import HOLDING
from controlplane.core.reactor import Reactor
from controlplane.policy.api import Policy, StepsSeen
from controlplane.sim.engine.kernel import AFTER, FIRST, Kernel
from controlplane.sim.engine.node_agents import Agents, Crew
from controlplane.sim.engine.simulated_planner import Planner
from controlplane.sim.engine.training_progress import Training
from controlplane.sim.models.interference import Interference
from controlplane.sim.models.job_model import Pace, Work
from controlplane.sim.node_groups import RELEASE, SPEEDS
from controlplane.sim.simulation_result import JobStory, Stay
from controlplane.sim.trace_jobs import TraceJob
from schemas.cluster import NodeSpec
from schemas.ids import BootId, JobId, NodeId, Seconds, SlotId, Term, node_of, slot_id
from schemas.messages.agent import AgentEvent, EpochReported

SUSPECT_S: Final = 6.0  # of silence, as in the service
LOST_S: Final = 30.0
FIRST_NEWS_S: Final = 2.0  # telemetry of a new group, then twice as late each time
WARM_STEPS: Final = 12  # that a first telemetry tells of, at least
Record = Callable[[Seconds, Input, Sequence[Command]], None]


@dataclass(frozen=True, slots=True)
class Habits:
    """How this world's time passes."""

    at_once: bool  # slots change hands in no time, and stalls follow
    whole_seconds: bool  # epochs end at whole seconds
    telemetry_s: float  # between reports of a job's steps, at most; 0: none
    round_s: float
    stall_s: float | None = None  # of every change, instead of what jobs need
    first_stall_s: float | None = None  # of every start
    relatives: bool = True  # jobs of one application are one family; else each is its own


@dataclass(slots=True)
class _Story:
    trace: TraceJob
    work: Work
    counted: bool
    started_at: Seconds | None = None
    stays: list[Stay] | None = None
    since: Seconds = Seconds(0.0)
    on: tuple[SlotId, ...] = ()


class World:
    """Feeds the core what users, agents and workers would, and does what it orders."""

    def __init__(
        self,
        kernel: Kernel,
        nodes: Sequence[NodeSpec],
        habits: Habits,
        *,
        record: Record | None = None,
        stays: bool = False,
    ) -> None:
        self.kernel = kernel
        self.reactor = Reactor()
        self.crews: dict[JobId, Crew] = {}
        self.planner: Planner | None = None
        self.interference: Interference | None = None
        self.events = 0
        self._habits = habits
        self._agents = Agents(kernel, self._say, self, self.crews, at_once=habits.at_once)
        self._record = record
        self._wants_stays = stays
        self._specs = {spec.node: spec for spec in nodes}
        self._speed = {
            slot_id(spec.node, slot.index): SPEEDS.get(slot.model, 1.0)
            for spec in nodes
            for slot in spec.slots
        }
        self._mixed = len(set(self._speed.values())) > 1 or set(self._speed.values()) != {1.0}
        self._boots: dict[NodeId, BootId] = {}
        self._said: dict[NodeId, int] = {}
        self._at: dict[NodeId, dict[JobId, None]] = {}  # who trains on a node
        self._stories: dict[JobId, _Story] = {}
        self._left = 0  # submissions and jobs that have not ended
        self._inbox: deque[Input] = deque()
        self._busy = False
        self._accepted: JobId | None = None
        self.busy_slot_s = 0.0

    # --- before it begins

    def begin(self) -> None:
        """The controller starts and every node greets it."""
        self._take(ControllerStarted(term=Term(1), release=RELEASE))
        for spec in self._specs.values():
            self._greet(spec.node)

    def plan_with(
        self,
        policy: Policy,
        *,
        latency_s: float,
        generations: int,
        think_s: float,
        epochs: bool,
        seed: int,
    ) -> Planner:
        """Let `policy` decide."""
        self.planner = Planner(
            self.kernel,
            self.reactor,
            policy,
            self._take,
            round_s=self._habits.round_s,
            latency_s=latency_s,
            generations=generations,
            think_s=think_s,
            epochs=epochs,
            seed=seed,
        )
        return self.planner

    def submit(self, job: TraceJob, work: Callable[[], Work], *, counted: bool) -> None:
        """Let a user submit `job` when its time comes."""
        self._left += 1
        self.kernel.at(job.at, self._submitted, job, work, counted, urgency=FIRST)

    def lose(self, node: NodeId, at: float, back_after_s: float) -> None:
        """Let a node die, and come back empty."""
        self.kernel.at(at, self._node_dies, node, back_after_s)

    # --- what the core hears and says

    def _take(self, event: Input) -> None:
        """Handle `event` and what follows from it at once, one after the other."""
        self._inbox.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox:
                self._handle(self._inbox.popleft())
        finally:
            self._busy = False

    def _handle(self, event: Input) -> None:
        now = self.kernel.now
        self.events += 1
        commands = self.reactor.handle(event, now)
        is_epoch = isinstance(event, NodeReported) and isinstance(event.event, EpochReported)
        if self._record is not None:
            self._record(now, event, commands)
        for command in commands:
            match command:
                case SendDelta():
                    self._agents.obey(command.node, command.delta)
                case Announce():
                    self._announced(command)
                case AskForPlan() if self.planner is not None:
                    self.planner.ask(leisurely=is_epoch)
                case Accept():
                    self._accepted = command.job

    def _say(self, node: NodeId, event: AgentEvent) -> None:
        self._said[node] += 1
        self._take(
            NodeReported(node=node, boot=self._boots[node], seq=self._said[node], event=event)
        )

    def _announced(self, command: Announce) -> None:
        told = command.event
        name = told.job
        if self.planner is not None:
            learnt = policy_events.of_event(told, self.reactor.state)
            if learnt is not None:
                self.planner.observe(learnt)
        if name is None or not told.event.startswith("job."):
            return
        job = self.reactor.state.jobs[name]
        story = self._stories.get(name)
        if story is not None:
            if story.started_at is None and job.phase in HOLDING:
                story.started_at = self.kernel.now
            if story.stays is not None:
                self._note_stay(story, tuple(job.size.slots))
        if job.ended and name in self.crews and told.event == f"job.{job.phase.value}":
            self._left -= 1
            self.crews[name].over = True  # newcomers may still be told to stop
            if not self.crews[name].processes:
                del self.crews[name]
            self.busy_slot_s += job.slot_s
            if not self._left:
                self.kernel.stopped = True

    def _note_stay(self, story: _Story, on: tuple[SlotId, ...]) -> None:
        if on == story.on or story.stays is None:
            return
        now = self.kernel.now
        story.stays += [Stay(slot=slot, since=story.since, until=now) for slot in story.on]
        story.since, story.on = now, on

    # --- users

    def _submitted(self, job: TraceJob, make: Callable[[], Work], counted: bool) -> None:  # noqa: FBT001
        work = make()
        self._accepted = None
        spec = work.spec
        if not self._habits.relatives:
            spec = msgspec.structs.replace(spec, family=job.name)
        submission = JobSubmitted(spec=spec, snapshot="", user=job.user, key=job.name)
        self._take(submission)
        name = self._accepted
        if name is None:
            return
        training = Training(work)
        costs = work.costs.told(self._habits.stall_s, self._habits.first_stall_s)
        crew = Crew(job=name, training=training, costs=costs)
        self.crews[name] = crew
        self._stories[name] = _Story(
            trace=job, work=work, counted=counted, stays=[] if self._wants_stays else None
        )
        if job.cancelled_after_s is not None:
            self.kernel.at(self.kernel.now + job.cancelled_after_s, self._cancelled, name, job.user)

    def _cancelled(self, name: JobId, user: str) -> None:
        if name in self.crews and not self.crews[name].over:
            self._take(CancelRequested(job=name, user=user))

    # --- nodes

    def _greet(self, node: NodeId) -> None:
        life = int(self._boots.get(node, BootId("0"))) + 1
        self._boots[node], self._said[node] = BootId(str(life)), 0
        self._take(
            NodeGreeted(node=node, boot=self._boots[node], spec=self._specs[node], workers=())
        )

    def _node_dies(self, node: NodeId, back_after_s: float) -> None:
        now = self.kernel.now
        if self._agents.is_down(node):
            return
        for crew in self._agents.node_dies(node):
            self._agents.break_group(crew)
        self.kernel.at(now + SUSPECT_S, self._take, NodeSuspected(node=node, silent_s=SUSPECT_S))
        self.kernel.at(now + LOST_S, self._take, NodeLost(node=node, silent_s=LOST_S))
        self.kernel.at(now + max(back_after_s, LOST_S + 1.0), self._node_returns, node)

    def _node_returns(self, node: NodeId) -> None:
        self._agents.node_returns(node)
        self._greet(node)

    # --- training

    def trains(self, crew: Crew, stall_s: float) -> None:
        """A group begins: count its progress, and foresee the end of its epoch."""
        now, training, group = self.kernel.now, crew.training, crew.group
        if group is None:
            return
        training.catch_up(now)
        batch = group.global_batch
        lost = training.work.setback(training.batch, batch, training.epoch) if training.batch else 0
        if lost:
            training.fall_back(training.progress - lost)
        training.batch = batch
        training.stalled_until = now + stall_s
        self._leave(crew.job)
        if self.interference is not None:
            for member in group.members:
                self._at.setdefault(node_of(member.slot), {})[crew.job] = None
        training.go_on(self._pace(crew), now)
        self._foresee(crew)
        self._slow_down_neighbours(crew)
        if self._habits.telemetry_s > 0.0:
            step_s = training.pace.step_s or batch / max(training.pace.samples_per_s, 1e-9)
            wait_s = max(FIRST_NEWS_S, WARM_STEPS * step_s)
            begin = max(now, training.stalled_until)
            self.kernel.at(begin + wait_s, self._tell_steps, crew, group.version, wait_s, 0)

    def rests(self, crew: Crew) -> None:
        """Nobody trains: nothing is foreseen."""
        crew.training.stop(self.kernel.now)
        neighbours = self._neighbours(crew.job)
        self._leave(crew.job)
        self._refresh(neighbours)

    def _pace(self, crew: Crew) -> Pace:
        training = crew.training
        pace = training.work.pace(crew.placement(), training.batch, training.epoch)
        factor = 1.0
        if self._mixed and crew.group is not None:
            factor = min(self._speed[member.slot] for member in crew.group.members)
        if self.interference is not None:
            at = {node: self._at[node] for node in self._nodes(crew.job)}
            factor *= self.interference.kept(crew.job, at)
        if factor == 1.0:
            return pace
        return Pace(pace.samples_per_s * factor, pace.progress_per_s * factor, pace.step_s / factor)

    def _foresee(self, crew: Crew) -> None:
        training = crew.training
        exact = training.epoch_due(self.kernel.now)
        if not math.isfinite(exact):
            return
        crash_at = self._crash_progress(crew)
        if crash_at is not None and crash_at < training.work.epoch_ends_at(training.epoch):
            begin = max(training.since, training.stalled_until)
            left = max(0.0, crash_at - training.progress) / training.pace.progress_per_s
            self.kernel.at(begin + left, self._crashes, crew, training.edition)
            return
        when, urgency = exact, 1
        if self._habits.whole_seconds:
            when = float(round(exact))
            on_round = self._habits.round_s > 0 and when % self._habits.round_s == 0
            urgency = AFTER if on_round and exact > when else 1
        self.kernel.at(when, self._epoch_ends, crew, training.edition, urgency=urgency)

    def _epoch_ends(self, crew: Crew, edition: int) -> None:
        training = crew.training
        if training.edition != edition or crew.group is None:
            return
        mean = training.finish_epoch(self.kernel.now)
        self._agents.epoch_over(crew, mean)
        if crew.group is not None and training.pace.progress_per_s > 0.0:
            training.go_on(self._pace(crew), self.kernel.now)
            self._foresee(crew)

    def _crash_progress(self, crew: Crew) -> float | None:
        share = self._stories[crew.job].trace.crashes_at if crew.job in self._stories else None
        if share is None or crew.crashed:
            return None
        work = crew.training.work
        return share * work.epoch_ends_at(work.epochs - 1)

    def _crashes(self, crew: Crew, edition: int) -> None:
        if crew.training.edition == edition and crew.group is not None:
            self._agents.crash(crew)

    def _tell_steps(self, crew: Crew, version: int, wait_s: float, told: int) -> None:
        """Telemetry, while the same group trains."""
        group, training = crew.group, crew.training
        job = self.reactor.state.jobs[crew.job]
        if group is None or group.version != version or job.group is None or self.planner is None:
            return
        now = self.kernel.now
        training.catch_up(now)
        if training.pace.samples_per_s > 0.0 and job.group.version == version:
            slots = [member.slot for member in group.members]
            scale = training.work.noise_scale(training.epoch, group.global_batch)
            self.planner.observe(
                StepsSeen(
                    job=crew.job,
                    family=job.family,
                    group=version,
                    slots=len(slots),
                    nodes=len({node_of(slot) for slot in slots}),
                    global_batch=group.global_batch,
                    step=int(training.steps),
                    samples_done=int(training.progress),
                    samples_per_s=training.pace.samples_per_s,
                    noise_scale=policy_events.first_noise_scale(scale),
                )
            )
            if told == 1:  # its speed is known now
                self.planner.ask()
        wait_s = min(2.0 * wait_s if told else wait_s, max(self._habits.telemetry_s, wait_s))
        self.kernel.at(now + wait_s, self._tell_steps, crew, version, wait_s, told + 1)

    # --- neighbours

    def _nodes(self, job: JobId) -> list[NodeId]:
        crew = self.crews.get(job)
        group = crew.group if crew else None
        return list(dict.fromkeys(node_of(m.slot) for m in group.members)) if group else []

    def _leave(self, job: JobId) -> None:
        for here in self._at.values() if self.interference is not None else ():
            here.pop(job, None)

    def _neighbours(self, job: JobId) -> list[JobId]:
        if self.interference is None:
            return []
        return list(dict.fromkeys(
            other for here in self._at.values() if job in here for other in here if other != job
        ))  # fmt: skip

    def _slow_down_neighbours(self, crew: Crew) -> None:
        if self.interference is not None:
            self._refresh(self._neighbours(crew.job))

    def _refresh(self, jobs: Sequence[JobId]) -> None:
        for name in jobs:
            crew = self.crews.get(name)
            if crew is not None and crew.group is not None and crew.training.pace.progress_per_s:
                crew.training.go_on(self._pace(crew), self.kernel.now)
                self._foresee(crew)

    # --- afterwards

    def stories(self) -> tuple[JobStory, ...]:
        """What became of every job, in order of submission."""
        found = []
        for name, story in self._stories.items():
            job = self.reactor.state.jobs[name]
            if story.stays is not None:
                self._note_stay(story, ())
            found.append(
                JobStory(
                    job=story.trace.name,
                    application=story.work.application,
                    submitted_at=job.submitted_at,
                    started_at=story.started_at,
                    ended_at=job.since if job.ended else None,
                    state=job.phase.value,
                    queued_s=job.queued_s,
                    exec_s=job.running_s,
                    slot_s=job.slot_s,
                    rescales=job.rescales,
                    batch_changes=job.batch_changes,
                    counted=story.counted,
                    stays=tuple(story.stays or ()),
                )
            )
        return tuple(found)
