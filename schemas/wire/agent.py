"""Controller and node agent: greet, deltas down, numbered events up."""

from __future__ import annotations

from schemas.ids import BootId, JobId, NodeId, Rank, Term, Version
from schemas.jobs import JobSpec
from schemas.nodes import Group, Member, NodeSpec
from schemas.wire import Message, files
from schemas.wire.sweeps import StateCopied, StateNotCopied, SweepDelta, SweepDeltaAcked

PREPARE, SWITCH, SETTLED, ABANDONED = 1, 2, 3, 3  # stages of one version; they only grow
START, JOIN, RECOVER, SUSPEND = "start", "join", "recover", "suspend"  # what leads to a version


# --- what happens to workers: numbered, spooled by the agent until the controller committed them


class WorkerEvent(Message):
    """Something that happened to one worker; `version` and `rank` are those it was born with."""

    job: JobId
    version: Version
    rank: Rank


class WorkerStarted(WorkerEvent, tag="worker.started.1"):
    """The process exists."""

    pid: int
    started_ticks: int  # /proc/PID/stat field 22; with pid names a process for ever


class ScriptReport(WorkerEvent):
    """Something that the training library wrote into the worker's report file."""

    index: int  # 1-based position in that file: makes a repeated report harmless


class WorkerReady(ScriptReport, tag="worker.ready.2"):
    """Model, optimizer and data are built, the device is its own; it waits for its group."""

    epoch_samples: int  # ||D||, samples of one pass over the training set
    resumed_epoch: int  # last finished epoch it starts from; 0 for none
    parameters: int  # trainable scalars of the model
    store_port: int = 0  # of the group's TCPStore, if this is its rank 0


class SlotAwaited(ScriptReport, tag="worker.slot_awaited.1"):
    """All is built that needs no device; the worker waits until the slot's owner has exited."""


class StoreOpened(ScriptReport, tag="worker.store_opened.1"):
    """An incumbent that is rank 0 of group `group` serves its TCPStore."""

    group: Version
    port: int


class GroupFormed(ScriptReport, tag="worker.group_formed.2"):
    """The worker is a full member of group `group`: its next step is taken in it."""

    group: Version
    epoch: int  # finished epochs at that moment
    step: int
    pause_ms: float = 0.0  # of its training thread: the swap, and a longer wait for peers behind it
    step_ms: float = 0.0  # of a usual step before it; 0: not measured


class JoinFailed(ScriptReport, tag="worker.join_failed.1"):
    """Group `group` could not be built; the worker goes on in the one that it has."""

    group: Version
    error: str


class GroupBroken(ScriptReport, tag="worker.group_broken.1"):
    """A collective operation of group `group` failed; the worker waits for a new group."""

    group: Version
    error: str


class Quiesced(ScriptReport, tag="worker.quiesced.1"):
    """The training thread stands still, as group `group` asked, and nothing is under way."""

    group: Version
    step: int  # steps that its parameters have taken
    epoch: int  # finished
    full: bool  # it has the job's whole state
    port: int  # of a TCPStore that the next group may use


class Suspended(ScriptReport, tag="worker.suspended.1"):
    """The job was paused as version `group` asked; its checkpoint is durable."""

    group: Version
    epoch: int  # finished
    step: int
    samples_done: int


class EpochReported(ScriptReport, tag="worker.epoch_reported.2"):
    """A finished epoch (ONES section 3.1), sent when its checkpoint is durable."""

    group: Version  # that wrote the checkpoint
    epoch: int  # 1-based, counted by the job
    step: int  # optimizer steps since the job began
    samples_done: int  # Y_processed since the job began
    epoch_samples: int  # ||D||
    epochs: int | None  # of the stop rule in force, the script's own if the job file has none
    samples_per_s: float  # X_j, mean over the epoch, pauses included
    duration_s: float
    train_loss: float | None  # mean over the epoch's samples; None when not seen
    metrics: dict[str, float]
    global_batch: int
    lr: float
    noise_scale: float | None = None  # of its gradients, samples; needs two batch sizes
    trained_samples: int | None = None  # of this epoch; None: an older library does not say
    left_early: bool = False  # the script left its loop before the epoch's end
    pass_s: float | None = None  # mean over its steps, as in `StepsReported`; None: not told
    sync_s: float | None = None
    local_batch: int = 0
    passes: int = 0


class TrainingFinished(ScriptReport, tag="worker.training_finished.1"):
    """The stop rule is met; the script may still evaluate or save before it exits."""

    why: str


class HopperOpened(ScriptReport, tag="hopper.opened.1"):
    """The worker takes units of its sweep, and hands on states that it has in memory."""

    address: str  # HOST:PORT


class UnitBegun(ScriptReport, tag="hopper.unit_begun.1"):
    """Data and state are there, user code runs."""

    attempt: int
    samples: int  # of the partition; the same on every node
    waited_s: float  # for the state
    staged_s: float  # for the data; 0: the node had it


class UnitEnded(ScriptReport, tag="hopper.unit_ended.1"):
    """The unit's state is on the node's disk, fsynced."""

    attempt: int
    metrics: dict[str, float]  # means over the partition's samples
    samples: int
    seconds: float  # of user code
    scores: dict[str, float]  # of the evaluation
    digest: str  # SHA-256 of the state's frames
    size: int  # of it, bytes


class UnitFailed(ScriptReport, tag="hopper.unit_failed.1"):
    """The unit came to nothing; the worker takes the next."""

    attempt: int
    why: str
    fault: str  # trial, state or data


class ScriptFailed(ScriptReport, tag="worker.script_failed.1"):
    """The script raised; the process is about to exit."""

    error: str  # class and message of the exception, one line
    where: str  # file:line of the script's innermost frame
    refused: bool = False  # by the library, for what the script does: it would be again


class WorkerExited(WorkerEvent, tag="worker.exited.1"):
    """The process has exited."""

    code: int | None  # exit status; None when a signal ended it or nobody could see it
    signal: int | None
    unseen: bool = False  # nobody reaped it: the zygote died too
    memory_limit: int | None = None  # bytes, of its job on the node, if it was killed for more


class WorkerRefused(WorkerEvent, tag="worker.refused.1"):
    """The agent could not start the process at all."""

    error: str
    hint: str = ""
    node_fault: bool = False  # the node's: another one may well start it


class JobCleared(Message, tag="worker.cleared.1"):
    """No process of `job` born before `version` is left on the node, but members of its group."""

    job: JobId
    version: Version


class NodeHealth(Message, tag="node.health.1"):
    """Whether the node can start workers; said when it changes, and in each `Hello`."""

    problems: tuple[str, ...]  # why it cannot, and what helps; none: it can


class StepsReported(WorkerEvent, tag="worker.steps.2"):
    """Telemetry of a group's rank 0, about once a second, unnumbered: a lost one is a lost one."""

    group: Version

    epoch: int  # the running one, 1-based
    step: int
    samples_done: int
    samples_per_s: float
    train_loss: float | None
    global_batch: int
    lr: float
    noise_scale: float | None = None  # as in `EpochReported`, at present
    cpu_cores: float | None = None  # mean of late, of the worker and its children; None: not yet
    sent_bytes_per_s: float | None = None  # gradients, mean of late; None: not yet
    # Steps that just this group did with this batch: the speed, too, is a mean over the latest.
    group_steps: int = 0  # 0: none yet, or an older library does not say
    pass_s: float | None = None  # of a step's last pass, with its reduction; None: not yet
    sync_s: float | None = None  # of these seconds, in the reduction
    local_batch: int = 0  # samples of one pass of this worker; 0: not told
    passes: int = 0  # of this worker in a step; 0: not told


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
    | HopperOpened
    | UnitBegun
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
    """One event with its place in the stream of (node, boot)."""

    node: NodeId
    boot: BootId
    seq: int  # 1-based
    event: AgentEvent


class Telemetry(Message, tag="agent.telemetry.2"):
    """What a node's workers report about once a second; unnumbered, and may be lost."""

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


class Hello(Message, tag="agent.hello.1"):
    """Agent to controller: who I am, what runs here, how far my events go."""

    node: NodeId
    boot: BootId
    spec: NodeSpec
    workers: tuple[WorkerSeen, ...]
    events_sent: int  # highest seq of this boot
    events_dropped: int = 0  # highest seq that was committed, and is not kept here any more
    problems: tuple[str, ...] = ()  # as in `NodeHealth`, now
    echo: str | None = None  # of the last `HelloRequest`; empty: none; None: an older agent
    jobs: tuple[JobId, ...] = ()  # that left something here, and are not known to have ended
    run_id: str = ""  # of its run folder: another one when what lay there is gone; empty: not known


class Welcome(Message, tag="agent.welcome.1"):
    """Controller to agent: you are in `session` of controller incarnation `term`."""

    session: str
    boot: BootId  # that this answers
    term: Term
    committed: int  # events of this boot that are durable here
    log_port: int
    event_port: int


class Refused(Message, tag="agent.refused.1"):
    """Controller to agent: this hello cannot be accepted."""

    code: str
    message: str
    hint: str


class Heartbeat(Message, tag="agent.heartbeat.1"):
    """Agent to controller."""

    session: str
    events_sent: int
    number: int = 0  # for the answer; 0: of an older agent


class HeartbeatAck(Message, tag="agent.heartbeat_ack.1"):
    """Controller to agent: the answer to a heartbeat."""

    session: str
    term: Term
    committed: int
    number: int = 0  # of the heartbeat; 0: of an older controller, or to an older agent


class HelloRequest(Message, tag="agent.hello_request.1"):
    """Controller to agent: I do not know this session, say hello."""

    term: Term
    echo: str = ""  # for the hello to repeat, so that we see that we are heard


class EventsCommitted(Message, tag="agent.events_committed.1"):
    """Controller to agent: forget your spool through here."""

    boot: BootId
    through: int


class ResendEvents(Message, tag="agent.resend_events.1"):
    """Controller to agent: I miss events from `first` on."""

    boot: BootId
    first: int


class Resent(Message, tag="agent.resent.1"):
    """Agent to controller: what was missed."""

    events: tuple[Numbered, ...]


# --- deltas


class GroupDelta(Message, tag="agent.group_delta.3"):
    """The full desired state of one job on one node, ordered by (term, version, stage).

    `group` lists all members of the job, on whatever node; the agent runs those whose slot is
    its own, and those of `former`, which leave by themselves or stay if the change is abandoned.
    Neither means that nothing of the job may run on this node.
    """

    job: JobId
    term: Term
    version: Version
    stage: int
    group: Group | None
    spec: JobSpec | None  # with `group`
    snapshot: str = ""  # sha256 of the working directory's archive, with `group`
    forget: bool = False  # the job ended: its folder on the node may go once its logs are stored
    kind: str = START  # start, join, recover or suspend: what leads to this version
    former: tuple[Member, ...] = ()  # members of the group before, while the change is under way
    store: str = ""  # HOST:PORT of the group's TCPStore, from stage SWITCH on
    source: Rank | None = None  # recover: whose state all take; None: all have the same
    user: str = ""  # who submitted the job, with `group`; empty: an older controller


class DeltaAcked(Message, tag="agent.delta_acked.1"):
    """Agent to controller: the newest (term, version, stage) I hold for `job`."""

    job: JobId
    term: Term
    version: Version
    stage: int
    applied: bool  # False: the delta was older than what is held, and refused


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
