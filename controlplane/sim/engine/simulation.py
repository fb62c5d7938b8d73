"""Simulation of users and nodes around one live controller core, in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from controlplane.core import policy_events
from controlplane.core.commands import Accept, Announce, Command, RequestPlan, SendDelta
from controlplane.core.history import JobHistories
from controlplane.core.inputs import (
    CancelRequested,
    ControllerStarted,
    Input,
    JobSubmitted,
    NodeGreeted,
    NodeLost,
    NodeReported,
    NodeSuspected,
    SharingChanged,
)
from controlplane.core.reactor import Reactor
from controlplane.policy.api import Policy
from controlplane.sim.cluster import RELEASE
from controlplane.sim.engine.agents import GroupTraining, NodeAgents, SharedNodes
from controlplane.sim.engine.event_queue import FIRST, Kernel, PlannerOptions, SimOptions
from controlplane.sim.engine.jobs import JobLog, JobProcesses, TrainingProgress, WorkerProcesses
from controlplane.sim.engine.planner import SimulatedPlanner
from controlplane.sim.engine.telemetry import MeasuredFigures, StepTelemetry
from controlplane.sim.models.demands import Interference
from controlplane.sim.models.job_model import JobModel, job_name
from controlplane.sim.results import JobResult, TraceJob
from schemas.ids import BootId, JobId, NodeId, Seconds, Term
from schemas.jobs import JobSpec
from schemas.nodes import NodeSpec
from schemas.sharing import Sharing
from schemas.wire.agent import AgentEvent, EpochReported


class SimulatedNodes:
    """Sender of the nodes' messages to the controller: greetings and numbered reports."""

    def __init__(self, specs: Sequence[NodeSpec], handle: Callable[[Input], None]) -> None:
        self._specs = {spec.node: spec for spec in specs}
        self._handle = handle
        self._boots: dict[NodeId, BootId] = {}
        self._reported: dict[NodeId, int] = {}

    def greet(self, node: NodeId) -> None:
        """Boot a node without workers and send its greeting; number its reports from 1 again."""
        life = int(self._boots.get(node, BootId("0"))) + 1
        self._boots[node], self._reported[node] = BootId(str(life)), 0
        boot, spec = self._boots[node], self._specs[node]
        self._handle(NodeGreeted(node=node, boot=boot, spec=spec, workers=()))

    def report(self, node: NodeId, event: AgentEvent) -> None:
        """Send a node's event with the next report number of the node's boot."""
        self._reported[node] += 1
        boot, seq = self._boots[node], self._reported[node]
        self._handle(NodeReported(node=node, boot=boot, seq=seq, event=event))


SUSPECT_S: Final = 6.0  # silence after which a node is suspected, as in the service
LOST_S: Final = 30.0  # silence after which a node is lost, as in the service
RETURN_S: Final = LOST_S + 1.0  # minimum time between loss and return of a node
Recorder = Callable[[Seconds, Input, Sequence[Command]], None]


def _program(submission: TraceJob) -> JobSpec:
    """Return the specification of a rigid job of a trace."""
    limit_s = submission.max_run_s
    return JobSpec(
        name=job_name(submission.name),
        kind="torchrun",
        command=("python", "train.py"),
        slots=(submission.slots, submission.slots),
        max_run_s=msgspec.UNSET if limit_s is None else limit_s,
        retries=1,
    )


class Simulation:
    """Simulation that feeds the core with users' and nodes' inputs and executes its commands."""

    def __init__(
        self,
        kernel: Kernel,
        nodes: Sequence[NodeSpec],
        options: SimOptions,
        *,
        record: Recorder | None = None,
    ) -> None:
        """Build a cluster without jobs; `record` receives every core input and its commands."""
        self.kernel = kernel
        self.reactor = Reactor()
        self.histories = JobHistories()
        self.jobs: dict[JobId, JobProcesses] = {}  # jobs that have processes or can still get some
        self.planner: SimulatedPlanner | None = None
        self.events = 0  # number of inputs that the core handled
        self._options = options
        self._record = record
        self._specs = nodes
        self._nodes = SimulatedNodes(nodes, self._handle)
        self._measured = MeasuredFigures(options)
        processes = WorkerProcesses(kernel, self._nodes.report, self.jobs)
        self._training = GroupTraining(kernel, self.jobs, processes, nodes, options, self._measured)
        self._agents = NodeAgents(
            kernel, self._nodes.report, self.jobs, processes, self._training,
            instant_changes=options.scenario.instant_changes,
        )  # fmt: skip
        self._job_log = JobLog(record_allocations=options.scenario.record_allocations)
        self._left = 0  # number of future submissions and of jobs that have not ended
        self._inputs: deque[Input] = deque()
        self._handling = False
        self._accepted: JobId | None = None  # job of the last submission

    # --- set-up

    def use_policy(self, policy: Policy, options: PlannerOptions) -> SimulatedPlanner:
        """Connect a policy, which observes steps if there is telemetry; return its planner."""
        self.planner = SimulatedPlanner(
            self.kernel, self.reactor, policy, self._handle, options, hear=self._job_log.forecast
        )
        if self._options.telemetry_s > 0.0:
            parts = (self.kernel, self.reactor, self.planner, self._measured)
            self._training.telemetry = StepTelemetry(*parts, self._options.telemetry_s)
        return self.planner

    def use_interference(self, interference: Interference) -> None:
        """Apply a rule by which jobs on the same node slow each other down."""
        self._training.shared_nodes = SharedNodes(interference)

    def begin(self) -> None:
        """Start the controller, and send the greeting of every node."""
        self._handle(ControllerStarted(term=Term(1), release=RELEASE))
        for spec in self._specs:
            self._nodes.greet(spec.node)

    def share(self, sharing: Sharing) -> None:
        """Divide the cluster among the accounts of the trace by these rules."""
        self._handle(SharingChanged(sharing=sharing))

    def submit(
        self, submission: TraceJob, make_model: Callable[[], JobModel], *, counted: bool
    ) -> None:
        """Schedule the submission of a job; `make_model` is called at the time of submission."""
        self._left += 1
        arguments = (submission, make_model, counted)
        self.kernel.call_at(submission.at, self._submit, *arguments, priority=FIRST)

    def lose_node(self, node: NodeId, at: float, back_after_s: float) -> None:
        """Schedule the loss of a node at virtual second `at`, and its return without workers.

        The node returns `back_after_s` seconds after the loss, or `RETURN_S` if this is longer.
        """
        self.kernel.call_at(at, self._lose_node, node, back_after_s)

    # --- the core's inputs and commands

    def _handle(self, event: Input) -> None:
        """Handle `event`, then one by one the inputs that follow from `event`."""
        self._inputs.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._inputs:
                self._handle_one(self._inputs.popleft())
        finally:
            self._handling = False

    def _handle_one(self, event: Input) -> None:
        now = self.kernel.now
        self.events += 1
        commands = self.reactor.handle(event, now)
        is_epoch = isinstance(event, NodeReported) and isinstance(event.event, EpochReported)
        if self._record is not None:
            self._record(now, event, commands)
        self.histories.add(self.reactor.records)
        self._job_log.keep(self.reactor.records)
        self._notify_policy()
        for command in commands:
            match command:
                case SendDelta():
                    self._agents.apply(command.node, command.delta)
                case Announce():
                    self._handle_announcement(command)
                case RequestPlan() if self.planner is not None:
                    self.planner.ask(can_wait=is_epoch)
                case Accept():
                    self._accepted = command.job

    def _notify_policy(self) -> None:
        if self.planner is not None:
            for record in self.reactor.records:
                observed = policy_events.event_of_record(record, self.reactor.state)
                if observed is not None:
                    self.planner.observe(observed)

    def _handle_announcement(self, command: Announce) -> None:
        event = command.event
        name = event.job
        if name is None or not event.event.startswith("job."):
            return
        job = self.reactor.state.jobs[name]
        self._job_log.note(job, self.kernel.now)
        if job.ended and name in self.jobs and event.event == f"job.{job.phase.value}":
            self._end_job(name)

    def _end_job(self, name: JobId) -> None:
        self.jobs[name].ended = True  # its workers may still have to be stopped
        if not self.jobs[name].workers:
            del self.jobs[name]
        self._left -= 1
        if not self._left:
            self.kernel.stopped = True

    # --- users

    def _submit(
        self,
        submission: TraceJob,
        make_model: Callable[[], JobModel],
        counted: bool,  # noqa: FBT001 - `call_at` passes no keywords
    ) -> None:
        model = make_model()
        self._accepted = None
        spec = model.spec
        rigid = submission.kind == "torchrun"
        fixed_batch = spec.batch_size if rigid else None
        if rigid:
            spec = _program(submission)
        if submission.utility is not None:
            spec = msgspec.structs.replace(spec, utility=submission.utility)
        if not self._options.scenario.share_families:
            spec = msgspec.structs.replace(spec, family=submission.name)
        submitted = JobSubmitted(
            spec=spec,
            snapshot="",
            user=submission.user,
            key=submission.name,
            project=submission.project,
        )
        self._handle(submitted)
        name = self._accepted
        if name is None:
            return
        given = self._options.scenario
        costs = model.costs.overridden(given.stall_s, given.first_stall_s, given.prepare_s)
        training = TrainingProgress(model)
        processes = JobProcesses(name, training, costs, submission.crashes_at, fixed_batch)
        self.jobs[name] = processes
        self._job_log.add(name, submission, training, counted=counted)
        if submission.cancelled_after_s is not None:
            when = self.kernel.now + submission.cancelled_after_s
            self.kernel.call_at(when, self._cancel, name, submission.user)

    def _cancel(self, name: JobId, user: str) -> None:
        if name in self.jobs and not self.jobs[name].ended:
            self._handle(CancelRequested(job=name, user=user))

    # --- nodes

    def _lose_node(self, node: NodeId, back_after_s: float) -> None:
        now = self.kernel.now
        if node in self._agents.down:
            return
        for job in self._agents.lose_node(node):
            self._training.break_group(job)
        suspected = NodeSuspected(node=node, silent_s=SUSPECT_S)
        self.kernel.call_at(now + SUSPECT_S, self._handle, suspected)
        self.kernel.call_at(now + LOST_S, self._handle, NodeLost(node=node, silent_s=LOST_S))
        self.kernel.call_at(now + max(back_after_s, RETURN_S), self._return_node, node)

    def _return_node(self, node: NodeId) -> None:
        self._agents.down.discard(node)
        self._nodes.greet(node)

    # --- results

    def results(self) -> tuple[JobResult, ...]:
        """Return the results of all jobs, in order of submission."""
        return self._job_log.results(self.reactor.state, self.kernel.now)
