"""Inputs of the core, which the journal keeps. `NodeReported` wraps the events of nodes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from controlplane.policy.api import Plan, SearchStats
from schemas.ids import BootId, JobId, NodeId, Rank, Seconds, SlotId, Term, Version, WorkerId
from schemas.jobs import JobSpec
from schemas.nodes import NodeSpec, Reservation
from schemas.sharing import Sharing
from schemas.sweeps import Value
from schemas.wire import Message
from schemas.wire.agent import AgentEvent, WorkerSeen


class Input(Message):
    """Message that changes the state of the core."""


class ControllerStarted(Input, tag="core.controller_started.1"):
    """A new controller process took over. Every node has to greet this process again."""

    term: Term
    release: str
    journal: str = ""  # id of the journal; a restored backup has a new one
    jobs: int = 0  # number of accepted jobs, including jobs that a restored backup lacks
    restored: bool = False  # the journal lacks inputs that nodes may have acted on


class JobSubmitted(Input, tag="core.job_submitted.1"):
    """A user submitted a job. Its spec is valid and its snapshot is stored."""

    spec: JobSpec
    snapshot: str
    user: str
    key: str  # key of the request; a second submission with this key is the same job
    project: str = ""  # its members see the job; empty: only the user sees the job
    states_key: str = ""  # random key of a sweep, see `SweepDelta`
    # final states of parents that have ended
    outcomes: dict[JobId, str] = msgspec.field(default_factory=dict)


class CancelRequested(Input, tag="core.cancel_requested.1"):
    """A user cancels a job."""

    job: JobId
    user: str


class NodeGreeted(Input, tag="core.node_greeted.1"):
    """An agent sent its hello, which lists everything that the node offers and runs."""

    node: NodeId
    boot: BootId
    spec: NodeSpec
    workers: tuple[WorkerSeen, ...]
    problems: tuple[str, ...] = ()  # reasons why the node cannot start workers
    jobs: tuple[JobId, ...] = ()  # jobs with files on the node; the agent asks if they ended
    run_id: str = ""  # id of the agent's run folder; empty: unknown
    events_dropped: int = 0  # events of this boot that some journal has committed
    term: Term = Term(0)  # highest term that the agent has seen
    highest_job: int = 0  # highest number of a job with files on the node, ended or not


class NodeHeard(Input, tag="core.node_heard.1"):
    """A suspect node sent a message within its session."""

    node: NodeId


class NodeSuspected(Input, tag="core.node_suspected.1"):
    """A node has been silent for a while."""

    node: NodeId
    silent_s: float


class NodeLost(Input, tag="core.node_lost.1"):
    """A node has been silent for too long."""

    node: NodeId
    silent_s: float


class NodeReported(Input, tag="core.node_reported.1"):
    """A node reported the next event of its numbered stream."""

    node: NodeId
    boot: BootId
    seq: int
    event: AgentEvent


class PlanProposed(Input, tag="core.plan_proposed.1"):
    """A policy proposed a plan, which may be based on an older state."""

    plan: Plan
    stats: SearchStats | None = None  # only from a policy that searches
    later: int = 0  # entries that follow in other inputs, as parts of the same plan


class StartExpired(Input, tag="core.start_expired.1"):
    """A group did not form in time."""

    job: JobId
    version: Version


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """A member for which the others of its group wait, according to telemetry."""

    worker: WorkerId
    rank: Rank
    idle_s: float  # time without a step; of a silent member, time for which the others have waited
    answers: bool  # False: nothing was heard from the member, its process may be stopped
    at: str = ""  # line of its script


class RescaleExpired(Input, tag="core.rescale_expired.1"):
    """A change of a job's group took too long."""

    job: JobId
    version: Version
    stragglers: tuple[Straggler, ...] | None = None  # None: older journal, no rank is ended


class JoinStalled(Input, tag="core.join_stalled.1"):
    """All members of the former group wait for newcomers, which do not wait for them."""

    job: JobId
    version: Version
    stragglers: tuple[Straggler, ...]


class ResizeRequested(Input, tag="core.resize_requested.1"):
    """An operator orders a size for a job, which overrides the policy.

    A field that is None keeps the value of an earlier override, or the current value without one.
    """

    job: JobId
    user: str
    slots: int | None  # 0: pause
    batch: int | None  # global, samples per step
    on: tuple[SlotId, ...] = ()


class PauseRequested(Input, tag="core.pause_requested.1"):
    """An operator pauses a job. The job loses its slots and keeps its training state."""

    job: JobId
    user: str


class ResumeRequested(Input, tag="core.resume_requested.1"):
    """An operator ends a pause, or returns the job to the policy's control."""

    job: JobId
    user: str
    auto: bool


class HoldRequested(Input, tag="core.hold_requested.1"):
    """A user holds a job. The job gets no slots until it is released; a running job goes on."""

    job: JobId
    user: str


class ReleaseRequested(Input, tag="core.release_requested.1"):
    """A user releases a job that is held."""

    job: JobId
    user: str


class StartDue(Input, tag="core.start_due.1"):
    """The earliest start of a job has come."""

    job: JobId


class OverrideDue(Input, tag="core.override_due.1"):
    """An operator's order that could not be carried out is due for another attempt."""

    job: JobId


class RunExpired(Input, tag="core.run_expired.1"):
    """The time of a job is over, by `max_run_s` or `deadline`, or its warning is due."""

    job: JobId


class UnitExpired(Input, tag="core.unit_expired.1"):
    """A unit of a sweep took too long."""

    job: JobId


class SweepChangeRequested(Input, tag="core.sweep_change_requested.1"):
    """A user changes one trial of a sweep, or adds one. The request has been validated."""

    job: JobId
    user: str
    change: Literal["add", "stop", "pause", "resume", "delete"]
    trial: int | None
    values: dict[str, Value]
    parent: int | None
    key: str  # key of the request; a second request with this key does nothing


class DrainRequested(Input, tag="core.drain_requested.1"):
    """An operator drains a node."""

    node: NodeId
    user: str
    reason: str
    within_s: float | None  # time until remaining workers are stopped; None: no limit
    cordon: bool = False  # its jobs stay
    begin: Seconds | None = None  # with `end`: planned maintenance, in older journals
    end: Seconds | None = None


class NodesReserved(Input, tag="core.nodes_reserved.1"):
    """An operator reserves nodes, for maintenance or for jobs of these projects and users."""

    nodes: tuple[NodeId, ...]
    reservation: Reservation


class ReservationCancelled(Input, tag="core.reservation_cancelled.1"):
    """An operator cancels a reservation on all its nodes."""

    id: str
    user: str


class UndrainRequested(Input, tag="core.undrain_requested.1"):
    """An operator returns a drained node to service."""

    node: NodeId
    user: str


class NodeForgotten(Input, tag="core.node_forgotten.1"):
    """A lost node is removed: an operator says that it is gone, or it was lost for too long."""

    node: NodeId
    user: str


class DrainExpired(Input, tag="core.drain_expired.1"):
    """The deadline of a drain has passed."""

    node: NodeId


class DrainDue(Input, tag="core.drain_due.1"):
    """A job on a draining node can be changed again, or a reservation begins or ends."""

    node: NodeId


class OrderTooLarge(Input, tag="core.order_too_large.1"):
    """An order to a node exceeds the largest message and cannot be sent."""

    job: JobId
    node: NodeId
    size: int  # bytes
    most: int  # bytes


class SharingChanged(Input, tag="core.sharing_changed.1"):
    """The rules by which accounts share the cluster are set for the first time, or changed."""

    sharing: Sharing
    user: str = ""  # who changed them; empty: the settings file


class SchedulingPaused(Input, tag="core.scheduling_paused.1"):
    """An operator pauses or resumes all starts and growths."""

    user: str
    paused: bool
    reason: str = ""


class PolicyChosen(Input, tag="core.policy_chosen.1"):
    """A policy plans from now on. The planner is exchanged outside of the core."""

    name: str
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    user: str = ""  # who chose it; empty: the settings file


class CommitsResumed(Input, tag="core.commits_resumed.1"):
    """The journal accepts inputs again after a period in which writes failed."""

    reason: str  # reason of the stall
    since: Seconds


class InputSkipped(Input, tag="core.input_skipped.1"):
    """`handle` raised an error for an input, so this input of the node's stream is skipped."""

    what: str
    error: str
    node: NodeId | None
    boot: BootId | None
    seq: int
