"""Messages between controller and node agent, which are greetings, deltas and numbered events."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec.structs import fields, replace

from schemas.epochs import EpochFacts, StepTimes
from schemas.ids import BootId, JobId, NodeId, Pid, Rank, Term, Version
from schemas.jobs import JobSpec
from schemas.nodes import Group, Member, NodeSpec
from schemas.sweeps import are_bounded, bounded_metrics
from schemas.wire import Message, files, streams
from schemas.wire.sweeps import StateCopied, StateNotCopied, SweepDelta, SweepDeltaAcked

# Stages of a version, in increasing order. WARNED: the job's time is over soon.
PREPARE, SWITCH, SETTLED, ABANDONED, WARNED = 1, 2, 3, 3, 4
START, JOIN, RECOVER, SUSPEND = "start", "join", "recover", "suspend"  # causes of a version


# --- events of workers, which the agent numbers and stores until the controller has committed them


class OfJournal(Message, kw_only=True):
    """Base of messages about a job, which its name and its journal identify together."""

    journal: str = ""  # see `GroupDelta`; the agent fills it in


class WorkerEvent(OfJournal):
    """Base of the events of a worker, identified by the `version` and `rank` of its start."""

    job: JobId
    version: Version
    rank: Rank


class WorkerStarted(WorkerEvent, tag="worker.started.1"):
    """The process of the worker exists."""

    pid: Pid
    started_ticks: int  # /proc/PID/stat field 22; identifies a process together with pid


class ScriptReport(WorkerEvent):
    """Base of the reports that the training library writes into the worker's report file."""

    index: int  # 1-based position in the report file; identifies repeated reports


class WorkerReady(ScriptReport, tag="worker.ready.2"):
    """Model, optimizer and data are on the granted device, and the worker waits for its group."""

    epoch_samples: int  # ||D||, samples of one pass over the training set
    resumed_epoch: int  # last finished epoch in the checkpoint; 0 without a checkpoint
    parameters: int  # trainable scalars of the model
    store_port: int = 0  # port of the group's TCPStore; rank 0 only
    # LENGTH-DIGEST of the training set, the digest being that of its order; "": not known
    data_digest: Annotated[str, msgspec.Meta(max_length=64)] = ""
    imports_s: float = 0.0  # from the start of the process to `from_env()`; 0: not measured


class SlotAwaited(ScriptReport, tag="worker.slot_awaited.1"):
    """The worker has prepared everything that needs no device, and waits for its slot's device."""


class StoreOpened(ScriptReport, tag="worker.store_opened.1"):
    """A worker of the previous group serves the TCPStore of group `group`, as its rank 0."""

    group: Version
    port: int


class GroupFormed(ScriptReport, tag="worker.group_formed.2"):
    """The worker is a full member of group `group` and takes its next step in this group."""

    group: Version
    epoch: int  # number of finished epochs
    step: int
    pause_ms: float = 0.0  # pause of training: the switch, and a long wait for peers after it
    step_ms: float = 0.0  # usual time of a step before the switch; 0: not measured
    connect_ms: float = 0.0  # time to build the process group during training; 0: not measured


class JoinFailed(ScriptReport, tag="worker.join_failed.1"):
    """Group `group` could not be built. The worker continues in its current group."""

    group: Version
    error: str


class GroupBroken(ScriptReport, tag="worker.group_broken.1"):
    """A collective operation of group `group` failed. The worker waits for a new group."""

    group: Version
    error: str


class Quiesced(ScriptReport, tag="worker.quiesced.2"):
    """The training thread has stopped for group `group`, and no operation is in progress."""

    group: Version
    step: int  # last finished step
    epoch: int  # number of finished epochs
    has_full_state: bool  # the worker has the full state of the job
    port: int  # port of a TCPStore for the next group


class Suspended(ScriptReport, tag="worker.suspended.1"):
    """The job was paused as version `group` ordered, and its checkpoint is durable."""

    group: Version
    epoch: int  # number of finished epochs
    step: int
    samples_done: int


class EpochReported(ScriptReport, tag="worker.epoch_reported.3"):
    """Report of a finished epoch (ONES section 3.1), sent when its checkpoint is durable."""

    group: Version  # group that wrote the checkpoint
    stated_epochs: int | None  # epochs of the job file's stop rule, or else of the script
    duration_s: float
    facts: EpochFacts

    @property
    def epoch(self) -> int:
        """Number of the finished epoch."""
        return self.facts.epoch


class TrainingFinished(ScriptReport, tag="worker.training_finished.2"):
    """The stop rule is met. The script may still evaluate or save before it exits."""

    reason: str


class SweepWorkerReady(ScriptReport, tag="sweep.worker_ready.1"):
    """The worker accepts units of its sweep, and serves the states that it has in memory."""

    address: str  # HOST:PORT


class UnitStarted(ScriptReport, tag="sweep.unit_started.1"):
    """Data and state of the unit are loaded, and user code starts."""

    attempt: int
    samples: int  # size of the partition; the same on every node
    waited_s: float  # waiting time for the state
    staged_s: float  # time to load the data; 0 if the node has it already


class UnitEnded(ScriptReport, tag="sweep.unit_ended.1"):
    """The state after the unit is on the node's disk, written with fsync."""

    attempt: int
    metrics: dict[str, float]  # training metrics, means over the partition's samples
    samples: int
    seconds: float  # duration of user code
    scores: dict[str, float]  # metrics of the evaluation
    digest: str  # SHA-256 of the state's frames
    size: int  # bytes of the state


class UnitFailed(ScriptReport, tag="sweep.unit_failed.1"):
    """The unit failed. The worker accepts the next unit."""

    attempt: int
    reason: str
    fault: str  # cause: trial, state or data


class ScriptFailed(ScriptReport, tag="worker.script_failed.1"):
    """The script raised an exception, and the process is about to exit."""

    error: str  # class and message of the exception, one line
    where: str  # file:line of the script's innermost frame
    refused: bool = False  # the library refused the script; a restart would fail too


class WorkerExited(WorkerEvent, tag="worker.exited.1"):
    """The process of the worker has exited."""

    code: int | None  # exit status; None: killed by a signal, or unknown
    signal: int | None
    unseen: bool = False  # True: the status is unknown, because the zygote died, too
    memory_limit: int | None = None  # the job's limit on the node, bytes, if it killed the worker
    disk_limit: int | None = None  # the same for the job's files in one folder
    asked: bool = False  # rigid jobs: the node had sent TERM to it before


class WorkerRefused(WorkerEvent, tag="worker.refused.1"):
    """The agent could not start the process of the worker."""

    error: str
    hint: str = ""
    node_fault: bool = False  # the worker may start on another node


class JobCleared(Message, tag="worker.cleared.1"):
    """The node has no process of `job` older than `version`, except members of its group."""

    job: JobId
    version: Version


class NodeHealth(Message, tag="node.health.1"):
    """Problems that prevent the node from starting workers, sent on changes and in `Hello`."""

    problems: tuple[str, ...]  # with their remedies; empty if the node can start workers


MAX_NOTICE_S: Final = 86_400.0


class NodeNoticed(Message, tag="node.noticed.1"):
    """The node will go away, so its jobs must have left it within so many seconds."""

    within_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_NOTICE_S)]
    reason: str


class StepsReported(WorkerEvent, tag="worker.steps.3"):
    """Telemetry from rank 0 of a group, about once a second. It has no number and may be lost."""

    group: Version

    epoch: int  # running epoch, 1-based
    step: int
    samples_done: int
    samples_per_s: float
    train_loss: float | None
    global_batch: int
    lr: float
    noise_scale: float | None = None  # current value, as in `EpochReported`
    cpu_cores: float | None = None  # recent mean of worker and children; None: not known yet
    sent_bytes_per_s: float | None = None  # recent mean for gradients; None: not known yet
    # Number of steps of this group with this batch. `samples_per_s` is a mean over recent steps.
    group_steps: int = 0  # 0: none yet
    step_times: StepTimes | None = None  # recent mean; None: not known yet


STALL_S: Final = 30.0  # time without a step after which a worker reports `WorkerStalled`
STALL_INTERVAL_S: Final = 10.0  # between its further reports
MAX_PLACE: Final = 120  # characters of a line in a script


class WorkerStalled(WorkerEvent, tag="worker.stalled.1"):
    """Telemetry from a worker of any rank without a step for `STALL_S`, about every 10 s.

    It has no number and may be lost. The last report, after the next step, has `idle_s` 0.
    """

    group: Version
    step: int  # last finished step
    idle_s: float  # time since that step
    waits_s: float | None  # time for which the worker waits for its peers; None: it does not wait
    at: str  # line of the script at which the training thread is: FILE:LINE in FUNCTION


class WorkerUsed(WorkerEvent, tag="worker.used.1"):
    """Telemetry of a worker's processes, measured by its node every few seconds.

    It has no number and may be lost.
    """

    cpu_cores: float  # mean since the last report
    memory_bytes: int  # resident memory; shared memory counts once
    gpu_share: float | None = None  # share of time in which its GPU worked, 0 to 1
    gpu_memory_bytes: int | None = None


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
    | NodeNoticed
)


MAX_TEXT: Final = 2000  # characters of an error or a reason in a report
_Report = TypeVar("_Report", bound=Message)


@cache
def _text_fields(kind: type[Message]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.type is str)


def bounded_report(report: _Report) -> _Report:
    """Return a report with long texts shortened, and without excess or infinite metrics.

    The agent calls this for what its workers write, and the controller for what agents send.
    """
    texts = {name: getattr(report, name) for name in _text_fields(type(report))}
    changed: dict[str, Any] = {
        name: shortened(text) for name, text in texts.items() if len(text) > MAX_TEXT
    }
    if isinstance(report, EpochReported) and not are_bounded(report.facts.metrics):
        metrics = bounded_metrics(report.facts.metrics)
        changed["facts"] = replace(report.facts, metrics=metrics)
    return replace(report, **changed) if changed else report


def shortened(text: str) -> str:
    """Return the beginning and the end of a long text, with the number of characters left out."""
    keep = MAX_TEXT // 2 - 50
    left_out = len(text) - 2 * keep
    return f"{text[:keep]} ... ({left_out:,} characters left out) ... {text[-keep:]}"


class Numbered(Message, tag="agent.numbered.1"):
    """An event with its sequence number in the stream of (node, boot)."""

    node: NodeId
    boot: BootId
    seq: int  # 1-based
    event: AgentEvent


class Telemetry(Message, tag="agent.telemetry.3"):
    """Telemetry of a node's workers, about once a second. It has no number and may be lost."""

    node: NodeId
    steps: StepsReported


class StallTelemetry(Message, tag="agent.stall.1"):
    """Telemetry of a worker without steps, like `Telemetry`."""

    node: NodeId
    stall: WorkerStalled


class UsageTelemetry(Message, tag="agent.usage.1"):
    """Telemetry of the processes of a worker, like `Telemetry`."""

    node: NodeId
    used: WorkerUsed


# --- the session


class WorkerSeen(Message, tag="agent.worker_seen.1"):
    """A worker that the agent finds on its node when it greets the controller."""

    job: JobId
    version: Version
    rank: Rank
    slot: int
    pid: Pid | None
    started_ticks: int | None
    ended: bool
    code: int | None = None
    signal: int | None = None
    journal: str = ""  # of the job, see `GroupDelta`


class Hello(Message, tag="agent.hello.1"):
    """Agent to controller: the identity of the node, its workers, and its event numbers."""

    node: NodeId
    boot: BootId
    spec: NodeSpec
    workers: tuple[WorkerSeen, ...]
    events_sent: int  # highest sequence number of this boot
    events_dropped: int = 0  # highest committed sequence number that was deleted
    problems: tuple[str, ...] = ()  # as in `NodeHealth`
    echo: str | None = None  # from the last `HelloRequest`; empty: none; None: older agent
    jobs: tuple[JobId, ...] = ()  # jobs with files on the node that may still run
    run_id: str = ""  # id of the run folder, renewed if its content was lost; empty: unknown
    term: Term = Term(0)  # highest term that the agent has seen
    highest_job: int = 0  # highest number of a job with files on the node, ended or not


class Welcome(Message, tag="agent.welcome.1"):
    """Controller to agent: `session` is open with controller incarnation `term`."""

    session: str
    boot: BootId  # as in the hello
    term: Term
    committed: int  # number of durable events of this boot
    log_port: int
    event_port: int
    report_again: bool = False  # True: resend all stored reports, because the journal lost some
    heartbeat_s: Annotated[float, msgspec.Meta(gt=0.0, le=60.0)] = 1.0  # pause between heartbeats
    events_here: bool = False  # True: send events on this connection. False: on `event_port`


class Refused(Message, tag="agent.refused.1"):
    """Controller to agent: the hello cannot be accepted."""

    code: str
    message: str
    hint: str


class Heartbeat(Message, tag="agent.heartbeat.1"):
    """Agent to controller: the agent is alive and has sent events up to `events_sent`."""

    session: str
    events_sent: int
    number: int = 0  # repeated in the reply; 0: an older agent


class HeartbeatAck(Message, tag="agent.heartbeat_ack.1"):
    """Controller to agent: reply to a heartbeat."""

    session: str
    term: Term
    committed: int
    number: int = 0  # as in the heartbeat; 0: agent or controller is older


class HelloRequest(Message, tag="agent.hello_request.1"):
    """Controller to agent: the session is unknown, so send a hello."""

    term: Term
    echo: str = ""  # the hello must repeat this text, as proof that the request arrived


class EventsCommitted(Message, tag="agent.events_committed.1"):
    """Controller to agent: events up to `through` are durable, so the agent can delete them."""

    boot: BootId
    through: int
    term: Term = Term(0)  # of the controller; an earlier term is ignored


class ResendEvents(Message, tag="agent.resend_events.1"):
    """Controller to agent: send the events from `first` on again, because they are missing."""

    boot: BootId
    first: int


class Resent(Message, tag="agent.resent.1"):
    """Agent to controller: the events that the controller requested again."""

    events: tuple[Numbered, ...]


# --- deltas


class GroupDelta(Message, tag="agent.group_delta.3"):
    """The full desired state of one job on one node, ordered by (term, version, stage).

    `group` lists all members of the job on all nodes. The agent runs the members that have a
    slot of its node. It also keeps the members in `former`, which leave by themselves, or stay if
    the change is abandoned. If `group` is None and `former` is empty, no process of the job may run
    on the node.
    """

    job: JobId
    term: Term
    version: Version
    stage: int
    group: Group | None
    spec: JobSpec | None  # set if `group` is
    snapshot: str = ""  # SHA-256 of the working directory's archive, set if `group` is
    forget: bool = False  # True: the job ended, so delete its folder once its logs are stored
    kind: str = START  # cause of this version: start, join, recover or suspend
    former: tuple[Member, ...] = ()  # members of the previous group, until the change is settled
    store: str = ""  # HOST:PORT of the group's TCPStore, from stage SWITCH on
    source: Rank | None = None  # recover: all members copy this rank's state; None: equal states
    user: str = ""  # owner of the job, set if `group` is; empty: older controller
    journal: str = ""  # id of the journal that accepted the job; identifies it together with `job`
    # Values of `spec.secret_env`, added when the delta is sent
    secrets: dict[str, str] = msgspec.field(default_factory=dict)


class DeltaAcked(Message, tag="agent.delta_acked.1"):
    """Agent to controller: the newest (term, version, stage) that the agent knows for `job`."""

    job: JobId
    term: Term
    version: Version
    stage: int
    applied: bool  # False: refused, because the agent knows a newer delta


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


class NextServerKey(Message, tag="agent.next_server_key.1"):
    """Controller to agent: the public key (Z85) of the controller after its next rotation."""

    public: Annotated[str, msgspec.Meta(min_length=40, max_length=40)]


ToAgent = ToSession | files.ToNode | streams.OpenStream | NextServerKey
Published = Numbered | Telemetry | StallTelemetry | UsageTelemetry
