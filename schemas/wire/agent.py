"""Messages between controller and node agent: greeting, deltas down, numbered events up."""

from __future__ import annotations

from msgspec.structs import replace

from schemas.epochs import EpochFacts, StepTimes
from schemas.ids import BootId, JobId, NodeId, Rank, Term, Version
from schemas.jobs import JobSpec
from schemas.nodes import Group, Member, NodeSpec
from schemas.sweeps import are_bounded, bounded_metrics
from schemas.wire import Message, files
from schemas.wire.sweeps import StateCopied, StateNotCopied, SweepDelta, SweepDeltaAcked

PREPARE, SWITCH, SETTLED, ABANDONED = 1, 2, 3, 3  # stages of one version; they only grow
START, JOIN, RECOVER, SUSPEND = "start", "join", "recover", "suspend"  # cause of a version


# --- events of workers: numbered, spooled by the agent until the controller has committed them


class OfJournal(Message, kw_only=True):
    """Base of messages about a job: the job's identity is its name and the journal."""

    journal: str = ""  # see `GroupDelta`; the agent fills it in


class WorkerEvent(OfJournal):
    """Base of events of one worker; `version` and `rank` are those with which it started."""

    job: JobId
    version: Version
    rank: Rank


class WorkerStarted(WorkerEvent, tag="worker.started.1"):
    """The process exists."""

    pid: int
    started_ticks: int  # /proc/PID/stat field 22; identifies a process together with pid


class ScriptReport(WorkerEvent):
    """Base of what the training library writes into the worker's report file."""

    index: int  # 1-based position in that file; identifies repeated reports


class WorkerReady(ScriptReport, tag="worker.ready.2"):
    """Model, optimizer and data are on the granted device; the worker waits for its group."""

    epoch_samples: int  # ||D||, samples of one pass over the training set
    resumed_epoch: int  # last finished epoch of its checkpoint; 0: none
    parameters: int  # trainable scalars of the model
    store_port: int = 0  # of the group's TCPStore; rank 0 only


class SlotAwaited(ScriptReport, tag="worker.slot_awaited.1"):
    """The worker has built what needs no device, and waits until the slot's owner has exited."""


class StoreOpened(ScriptReport, tag="worker.store_opened.1"):
    """An incumbent that is rank 0 of group `group` serves the group's TCPStore."""

    group: Version
    port: int


class GroupFormed(ScriptReport, tag="worker.group_formed.2"):
    """The worker is a full member of group `group`: its next step is taken in that group."""

    group: Version
    epoch: int  # finished epochs at that moment
    step: int
    pause_ms: float = 0.0  # of the training thread: the switch and a long wait for peers after it
    step_ms: float = 0.0  # of a usual step before the switch; 0: not measured


class JoinFailed(ScriptReport, tag="worker.join_failed.1"):
    """Group `group` could not be built; the worker continues in its current group."""

    group: Version
    error: str


class GroupBroken(ScriptReport, tag="worker.group_broken.1"):
    """A collective operation of group `group` failed; the worker waits for a new group."""

    group: Version
    error: str


class Quiesced(ScriptReport, tag="worker.quiesced.2"):
    """The training thread has stopped, as group `group` asked, and no operation is in progress."""

    group: Version
    step: int  # last finished step
    epoch: int  # finished
    has_full_state: bool  # the worker has the full state of the job
    port: int  # of a TCPStore for the next group


class Suspended(ScriptReport, tag="worker.suspended.1"):
    """The job was paused as version `group` asked; its checkpoint is durable."""

    group: Version
    epoch: int  # finished
    step: int
    samples_done: int


class EpochReported(ScriptReport, tag="worker.epoch_reported.3"):
    """A finished epoch (ONES section 3.1), sent when its checkpoint is durable."""

    group: Version  # that wrote the checkpoint
    stated_epochs: int | None  # of the active stop rule, the script's own if the job file has none
    duration_s: float
    facts: EpochFacts

    @property
    def epoch(self) -> int:
        """Number of the finished epoch."""
        return self.facts.epoch

    def without_excess_metrics(self) -> EpochReported:
        """Return the report without excess or infinite metrics."""
        if are_bounded(self.facts.metrics):
            return self
        facts = replace(self.facts, metrics=bounded_metrics(self.facts.metrics))
        return replace(self, facts=facts)


class TrainingFinished(ScriptReport, tag="worker.training_finished.2"):
    """The stop rule is met; the script may still evaluate or save before it exits."""

    reason: str


class SweepWorkerReady(ScriptReport, tag="sweep.worker_ready.1"):
    """The worker accepts units of its sweep, and serves the states that it has in memory."""

    address: str  # HOST:PORT


class UnitStarted(ScriptReport, tag="sweep.unit_started.1"):
    """Data and state are loaded; user code starts."""

    attempt: int
    samples: int  # of the partition; the same on every node
    waited_s: float  # for the state
    staged_s: float  # for the data; 0: already on the node


class UnitEnded(ScriptReport, tag="sweep.unit_ended.1"):
    """The unit's state is on the node's disk, fsynced."""

    attempt: int
    metrics: dict[str, float]  # means over the partition's samples
    samples: int
    seconds: float  # of user code
    scores: dict[str, float]  # of the evaluation
    digest: str  # SHA-256 of the state's frames
    size: int  # of the state, bytes


class UnitFailed(ScriptReport, tag="sweep.unit_failed.1"):
    """The unit failed; the worker accepts the next one."""

    attempt: int
    reason: str
    fault: str  # trial, state or data


class ScriptFailed(ScriptReport, tag="worker.script_failed.1"):
    """The script raised an exception; the process is about to exit."""

    error: str  # class and message of the exception, one line
    where: str  # file:line of the script's innermost frame
    refused: bool = False  # by the library because of the script; a restart would fail too


class WorkerExited(WorkerEvent, tag="worker.exited.1"):
    """The process has exited."""

    code: int | None  # exit status; None: killed by a signal, or unseen
    signal: int | None
    unseen: bool = False  # not reaped, because the zygote died too
    memory_limit: int | None = None  # bytes, of the job on the node; set if it killed the worker


class WorkerRefused(WorkerEvent, tag="worker.refused.1"):
    """The agent could not start the process."""

    error: str
    hint: str = ""
    node_fault: bool = False  # the worker may start on another node


class JobCleared(Message, tag="worker.cleared.1"):
    """The node has no process of `job` older than `version`, except members of its group."""

    job: JobId
    version: Version


class NodeHealth(Message, tag="node.health.1"):
    """Problems that keep the node from starting workers; sent on changes, and in each `Hello`."""

    problems: tuple[str, ...]  # with their remedies; empty: it can start workers


class StepsReported(WorkerEvent, tag="worker.steps.3"):
    """Telemetry of a group's rank 0, about once a second; not numbered, and may be lost."""

    group: Version

    epoch: int  # current, 1-based
    step: int
    samples_done: int
    samples_per_s: float
    train_loss: float | None
    global_batch: int
    lr: float
    noise_scale: float | None = None  # as in `EpochReported`, current
    cpu_cores: float | None = None  # recent mean, worker and children; None: not yet known
    sent_bytes_per_s: float | None = None  # gradients, recent mean; None: not yet known
    # Steps of this group with this batch; the speed, too, is a mean over recent steps.
    group_steps: int = 0  # 0: none yet
    step_times: StepTimes | None = None  # recent mean; None: not yet known


AgentEvent = (
    WorkerStarted
    | WorkerReady
    | SlotAwaited
    | StoreOpened
    | GroupFormed
    | JoinFailed
    | GroupBroken
    | Quiesced
    | Suspended
    | EpochReported
    | TrainingFinished
    | SweepWorkerReady
    | UnitStarted
    | UnitEnded
    | UnitFailed
    | ScriptFailed
    | WorkerExited
    | WorkerRefused
    | JobCleared
    | StateCopied
    | StateNotCopied
    | NodeHealth
)


class Numbered(Message, tag="agent.numbered.1"):
    """An event with its place in the stream of (node, boot)."""

    node: NodeId
    boot: BootId
    seq: int  # 1-based
    event: AgentEvent


class Telemetry(Message, tag="agent.telemetry.3"):
    """Telemetry of a node's workers, about once a second; not numbered, and may be lost."""

    node: NodeId
    steps: StepsReported


# --- the session


class WorkerSeen(Message, tag="agent.worker_seen.1"):
    """A worker as the agent finds it when it greets the controller."""

    job: JobId
    version: Version
    rank: Rank
    slot: int
    pid: int | None
    started_ticks: int | None
    ended: bool
    code: int | None = None
    signal: int | None = None
    journal: str = ""  # of the job, see `GroupDelta`


class Hello(Message, tag="agent.hello.1"):
    """Agent to controller: identity, workers, and the range of this boot's events."""

    node: NodeId
    boot: BootId
    spec: NodeSpec
    workers: tuple[WorkerSeen, ...]
    events_sent: int  # highest sequence number of this boot
    events_dropped: int = 0  # highest sequence number that was committed and dropped from the spool
    problems: tuple[str, ...] = ()  # as in `NodeHealth`
    echo: str | None = None  # of the last `HelloRequest`; empty: none; None: an older agent
    jobs: tuple[JobId, ...] = ()  # with files on the node, and not known to have ended
    run_id: str = ""  # id of the run folder, new when its content was lost; empty: not known
    term: Term = Term(0)  # highest that the agent has seen


class Welcome(Message, tag="agent.welcome.1"):
    """Controller to agent: `session` is open with controller incarnation `term`."""

    session: str
    boot: BootId  # of the hello
    term: Term
    committed: int  # events of this boot that are durable
    log_port: int
    event_port: int
    report_again: bool = False  # the journal lost reports: send those that the node still has


class Refused(Message, tag="agent.refused.1"):
    """Controller to agent: the hello cannot be accepted."""

    code: str
    message: str
    hint: str


class Heartbeat(Message, tag="agent.heartbeat.1"):
    """Agent to controller: sign of life, with the last event sent."""

    session: str
    events_sent: int
    number: int = 0  # repeated in the reply; 0: an older agent


class HeartbeatAck(Message, tag="agent.heartbeat_ack.1"):
    """Controller to agent: reply to a heartbeat."""

    session: str
    term: Term
    committed: int
    number: int = 0  # of the heartbeat; 0: one of the two is older


class HelloRequest(Message, tag="agent.hello_request.1"):
    """Controller to agent: the session is unknown; send a hello."""

    term: Term
    echo: str = ""  # to be repeated in the hello, as proof that it was received


class EventsCommitted(Message, tag="agent.events_committed.1"):
    """Controller to agent: events up to `through` are durable and can be dropped."""

    boot: BootId
    through: int


class ResendEvents(Message, tag="agent.resend_events.1"):
    """Controller to agent: events from `first` on are missing."""

    boot: BootId
    first: int


class Resent(Message, tag="agent.resent.1"):
    """Agent to controller: the events that were missing."""

    events: tuple[Numbered, ...]


# --- deltas


class GroupDelta(Message, tag="agent.group_delta.3"):
    """The full desired state of one job on one node, ordered by (term, version, stage).

    `group` lists all members of the job, on all nodes. The agent runs those whose slot is on its
    node, and those of `former`, which leave by themselves or stay if the change is abandoned.
    Without both, nothing of the job may run on this node.
    """

    job: JobId
    term: Term
    version: Version
    stage: int
    group: Group | None
    spec: JobSpec | None  # with `group`
    snapshot: str = ""  # sha256 of the working directory's archive, with `group`
    forget: bool = False  # the job ended: delete its folder once its logs are stored
    kind: str = START  # start, join, recover or suspend: cause of this version
    former: tuple[Member, ...] = ()  # members of the previous group, until the change is settled
    store: str = ""  # HOST:PORT of the group's TCPStore, from stage SWITCH on
    source: Rank | None = None  # recover: rank whose state all members take; None: equal states
    user: str = ""  # owner of the job, with `group`; empty: an older controller
    journal: str = ""  # id of the journal in which the job was accepted; with `job` its identity


class DeltaAcked(Message, tag="agent.delta_acked.1"):
    """Agent to controller: the newest (term, version, stage) that the agent holds for `job`."""

    job: JobId
    term: Term
    version: Version
    stage: int
    applied: bool  # False: the delta was older than the held one, and refused


FromAgent = Hello | Heartbeat | Resent | DeltaAcked | SweepDeltaAcked
ToSession = (
    Welcome
    | Refused
    | HeartbeatAck
    | HelloRequest
    | EventsCommitted
    | ResendEvents
    | GroupDelta
    | SweepDelta
)
ToAgent = ToSession | files.ToNode
Published = Numbered | Telemetry
