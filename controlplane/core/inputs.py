"""Everything that can happen, beside what crosses the wire; the journal keeps each of these."""

from __future__ import annotations

from typing import Final, Literal

from controlplane.policy.api import Plan, SearchStats
from schemas.ids import BootId, JobId, NodeId, Seconds, SlotId, Term, Version
from schemas.jobs import JobSpec
from schemas.nodes import NodeSpec
from schemas.sweeps import Value
from schemas.wire import Message
from schemas.wire.agent import AgentEvent, WorkerSeen

# Replay applies the rules of the release that wrote the input.
# 1: operators' orders are followed in part, and are decisions; a script that raised first failed.
RULES: Final = 1


class ControllerStarted(Message, tag="core.controller_started.1"):
    """A new incarnation took over; every node has to greet it again."""

    term: Term
    release: str
    ended_leave: bool = False  # jobs that have ended leave the state; former releases kept them
    sweeps_leave: bool = False  # sweeps, too
    rules: int = 0  # that its handlers follow, up to `RULES`


class JobSubmitted(Message, tag="core.job_submitted.1"):
    """A user asks for a job; it was validated and its snapshot is stored."""

    spec: JobSpec
    snapshot: str
    user: str
    key: str  # of the request; a second submission with it is the same job
    project: str = ""  # whose members see it; empty: only its user


class CancelRequested(Message, tag="core.cancel_requested.1"):
    """A user ends a job."""

    job: JobId
    user: str


class NodeGreeted(Message, tag="core.node_greeted.1"):
    """An agent said hello: everything that it offers and runs."""

    node: NodeId
    boot: BootId
    spec: NodeSpec
    workers: tuple[WorkerSeen, ...]
    problems: tuple[str, ...] = ()  # that keep it from starting workers
    jobs: tuple[JobId, ...] = ()  # that left something there: it wants to know which have ended
    run_id: str = ""  # of the agent's run folder; empty: not known


class NodeHeard(Message, tag="core.node_heard.1"):
    """A suspect node spoke again within its session."""

    node: NodeId


class NodeSuspected(Message, tag="core.node_suspected.1"):
    """A node has been silent for a while."""

    node: NodeId
    silent_s: float


class NodeLost(Message, tag="core.node_lost.1"):
    """A node has been silent for too long."""

    node: NodeId
    silent_s: float


class NodeReported(Message, tag="core.node_reported.1"):
    """The next event of a node's numbered stream."""

    node: NodeId
    boot: BootId
    seq: int
    event: AgentEvent


class PlanProposed(Message, tag="core.plan_proposed.1"):
    """A policy's answer, perhaps to a question of some time ago."""

    plan: Plan
    stats: SearchStats | None = None  # of a policy that searches


class StartExpired(Message, tag="core.start_expired.1"):
    """A group did not form in time."""

    job: JobId
    version: Version


class RescaleExpired(Message, tag="core.rescale_expired.1"):
    """A change of a job's group took too long."""

    job: JobId
    version: Version


class ResizeRequested(Message, tag="core.resize_requested.1"):
    """An operator overrides the policy: this size, whatever it thinks.

    What is None stays as an earlier override said, or as it is if there is none.
    """

    job: JobId
    user: str
    slots: int | None  # 0: pause
    batch: int | None  # global, samples per step
    on: tuple[SlotId, ...] = ()


class PauseRequested(Message, tag="core.pause_requested.1"):
    """An operator takes a job's slots away, its state kept."""

    job: JobId
    user: str


class ResumeRequested(Message, tag="core.resume_requested.1"):
    """An operator ends a pause, or gives the job back to the policy."""

    job: JobId
    user: str
    auto: bool


class OverrideDue(Message, tag="core.override_due.1"):
    """It is time to try an operator's order again."""

    job: JobId


class UnitExpired(Message, tag="core.unit_expired.1"):
    """A unit of a sweep took too long."""

    job: JobId


class SweepChangeRequested(Message, tag="core.sweep_change_requested.1"):
    """A user changes one trial of a sweep, or adds one; it was checked when it came."""

    job: JobId
    user: str
    change: Literal["add", "stop", "pause", "resume", "delete"]
    trial: int | None
    values: dict[str, Value]
    parent: int | None
    key: str  # of the request; a second one with it does nothing


class DrainRequested(Message, tag="core.drain_requested.1"):
    """An operator empties a node."""

    node: NodeId
    user: str
    reason: str
    within_s: float | None  # then what remains is stopped; None: it may take as long as it takes


class UndrainRequested(Message, tag="core.undrain_requested.1"):
    """An operator gives a node back."""

    node: NodeId
    user: str


class DrainExpired(Message, tag="core.drain_expired.1"):
    """A node that is drained was to be empty by now."""

    node: NodeId


class DrainDue(Message, tag="core.drain_due.1"):
    """A job on a node that is drained may be changed again."""

    node: NodeId


class OrderTooLarge(Message, tag="core.order_too_large.1"):
    """What a node was to be told of a job does not fit a message: nobody can carry it out."""

    job: JobId
    node: NodeId
    size: int  # bytes
    most: int


class CommitsResumed(Message, tag="core.commits_resumed.1"):
    """Inputs become durable again, after a time in which there was no room for them."""

    why: str  # they did not
    since: Seconds


class InputSkipped(Message, tag="core.input_skipped.1"):
    """An input that `handle` could not take; its place in the node's stream is passed over."""

    what: str
    error: str
    node: NodeId | None
    boot: BootId | None
    seq: int


Input = (
    ControllerStarted
    | JobSubmitted
    | CancelRequested
    | NodeGreeted
    | NodeHeard
    | NodeSuspected
    | NodeLost
    | NodeReported
    | PlanProposed
    | StartExpired
    | RescaleExpired
    | ResizeRequested
    | PauseRequested
    | ResumeRequested
    | OverrideDue
    | UnitExpired
    | SweepChangeRequested
    | DrainRequested
    | UndrainRequested
    | DrainExpired
    | DrainDue
    | InputSkipped
    | OrderTooLarge
    | CommitsResumed
)
