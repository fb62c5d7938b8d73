"""Client and controller: every request has exactly one reply.

Frames of a request: [correlation id (1 to 32 bytes), message]; the reply repeats the id.

Admins keep the list of keys over the client port; a secret key never travels.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from schemas.ids import JobId, NodeId, Rank, Seconds, SlotId, Term, Version, WorkerId
from schemas.jobs import JobSpec
from schemas.sweeps import SweepSpec, Value
from schemas.wire import Message
from schemas.wire.feed import Detail, FeedEvent, LogPage, Position, ReadLog

Role = Literal["admin", "operator", "user", "viewer", "node"]
Public = Annotated[str, msgspec.Meta(min_length=40, max_length=40)]


class AddKey(Message, tag="keys.add.1"):
    """Let the owner of a key connect; the same a second time changes nothing."""

    public: Public  # Z85
    name: str  # whose it is: a person's, or a node's
    role: Role
    projects: tuple[str, ...] = ()
    expires: Seconds | None = None  # since the epoch; None: never


class ListKeys(Message, tag="keys.list.1"):
    """All keys, also those that are not valid any more, a page at a time."""

    cursor: str = ""  # `next` of the page before


class RevokeKey(Message, tag="keys.revoke.1"):
    """Take keys away for ever, and end what is open with them."""

    key: str  # a public key, or a name: all keys of that name


class KeyInfo(Message, tag="keys.key.1"):
    """A key, and who keeps it."""

    public: str
    name: str
    role: str
    projects: tuple[str, ...] = ()
    expires: Seconds | None = None
    state: str = "valid"  # valid, expired or revoked
    kept: str = "online"  # file: in authorised.toml; online: added over this port
    by: str = ""  # who added or revoked it last, if it was over this port
    at: Seconds | None = None  # when


class Keys(Message, tag="keys.keys.1"):
    """Answer to `AddKey`, `RevokeKey` (those that changed, or had) and `ListKeys`: a page."""

    keys: tuple[KeyInfo, ...]
    next: str = ""  # cursor of the next page; empty: this is the last


# --- requests


class GetCluster(Message, tag="client.get_cluster.1"):
    """Who answers here, and where its other sockets are."""


class PutSnapshot(Message, tag="client.put_snapshot.1"):
    """A piece of a working directory's archive; pieces come in order."""

    digest: str  # sha256 of the whole, hex
    offset: Position
    data: bytes
    total: Position  # bytes


class SubmitJob(Message, tag="client.submit_job.1"):
    """Accept this job. The same key a second time answers with the first job."""

    spec: JobSpec
    snapshot: str  # digest of an archive that you sent, or of a job whose files you may have
    key: str = ""  # yours alone: others may use the same
    project: str = ""  # of your key's: whose members see the job; empty: the first of them


class CheckJob(Message, tag="client.check_job.1"):
    """Would this job be accepted, and what would it get? Nothing is submitted."""

    spec: JobSpec


class CancelJob(Message, tag="client.cancel_job.1"):
    """End this job and stop its workers."""

    job: JobId


class ResizeJob(Message, tag="client.resize_job.1"):
    """A manual override: this many slots, and this batch; the policy leaves the job alone.

    What is left out stays as an earlier override said, or as it is if there is none.
    """

    job: JobId
    slots: int | None = None  # 0: pause
    batch: int | None = None  # global, samples per step
    on: tuple[SlotId, ...] = ()  # exactly these slots


class PauseJob(Message, tag="client.pause_job.1"):
    """A manual override: a checkpoint, and no slots until it is resumed."""

    job: JobId


class ResumeJob(Message, tag="client.resume_job.1"):
    """End a pause; with `auto`, also give the job back to the policy."""

    job: JobId
    auto: bool = False


class ListJobs(Message, tag="client.list_jobs.1"):
    """Summaries, oldest first, a page at a time."""

    ended: bool = False  # also those that ended
    states: tuple[
        str, ...
    ] = ()  # only those in one of these; ended ones too, whatever `ended` says
    user: str = ""  # only this user's
    name: str = ""  # NAME or NAME-N, or a pattern: `lr-*`
    cursor: str = ""  # `next` of the page before


class GetJob(Message, tag="client.get_job.1"):
    """Everything about one job, a page at a time.

    With `wait_s`, when it has ended or the wait is over.
    """

    job: JobId
    wait_s: float = 0.0
    cursor: str = ""  # `next` of the page before


class WaitJob(Message, tag="client.wait_job.1"):
    """Only the state of one job; with `wait_s`, when it has ended or the wait is over."""

    job: JobId
    wait_s: float = 0.0


class ExplainJob(Message, tag="client.explain_job.1"):
    """Why this job has the slots and the batch that it has, a page at a time."""

    job: JobId
    cursor: str = ""  # `next` of the page before


class GetSearch(Message, tag="client.get_search.1"):
    """How the scheduler stands."""


class ListNodes(Message, tag="client.list_nodes.1"):
    """All nodes that ever joined, a page at a time."""

    cursor: str = ""  # `next` of the page before


class DrainNode(Message, tag="client.drain_node.1"):
    """Empty a node: its jobs train on elsewhere or wait, and nothing new comes; answer: `Nodes`.

    A second one replaces reason and deadline.
    """

    node: NodeId
    reason: str = ""
    within_s: float | None = None  # what remains then is stopped and waits; None: it is not


class UndrainNode(Message, tag="client.undrain_node.1"):
    """Give a node that is drained back; answer: `Nodes`."""

    node: NodeId


class GetSweep(Message, tag="client.get_sweep.1"):
    """How a sweep stands, trial by trial."""

    job: JobId
    from_trial: int = 0  # a page; the reply says how many there are
    limit: int = 500


class ChangeSweep(Message, tag="client.change_sweep.1"):
    """Change one trial of a sweep, or add one. The same key a second time does nothing."""

    job: JobId
    change: Literal["add", "stop", "pause", "resume", "delete"]
    trial: int | None = None  # all but add
    values: dict[str, Value] = msgspec.field(default_factory=dict)  # add: beside a parent's own
    parent: int | None = None  # add: goes on from this trial's state
    key: str = ""


class GetLedger(Message, tag="client.get_ledger.1"):
    """The units of a sweep that count, in the order in which they ended."""

    job: JobId
    from_unit: int = 0
    limit: int = 2000


class ReadEvents(Message, tag="client.read_events.1"):
    """Feed events from `from_seq` on; with `wait_s`, wait for the first one."""

    from_seq: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 1
    limit: int = 1000
    wait_s: float = 0.0


# --- replies


class Cluster(Message, tag="client.cluster.1"):
    """Answer to GetCluster."""

    release: str
    term: Term
    policy: str
    user: str  # whose key you hold
    role: str
    feed_port: int
    log_port: int
    last_seq: int  # of the feed
    stalled: str = ""  # why nothing can be made durable: submissions are refused
    projects: tuple[str, ...] = ()  # whose jobs you see; empty: those of all
    topics: tuple[str, ...] = ()  # of the feed, that you may subscribe to: prefixes
    agents_port: int = 0  # where agents connect; 0: an older controller does not say


class SnapshotStored(Message, tag="client.snapshot_stored.1"):
    """Stored through `size`; complete when it is the total."""

    digest: str
    size: int


class JobAccepted(Message, tag="client.job_accepted.1"):
    """The job is durable."""

    job: JobId
    state: str
    notes: tuple[str, ...] = ()  # what it lacks for the policy, and what it gets instead


class JobChecked(Message, tag="client.job_checked.1"):
    """Answer to CheckJob: it would be accepted."""

    notes: tuple[str, ...] = ()  # as in JobAccepted


class JobSummary(Message, tag="client.job_summary.1"):
    """A line of `ones ps`."""

    job: JobId
    name: str
    user: str
    state: str
    reason: str  # why it is in this state, for people
    slots: int
    global_batch: int
    lr: float | None
    epoch: int  # finished
    samples_per_s: float
    progress: float | None  # 0 to 1 of the stated work; None for a metric stop
    train_loss: float | None
    metrics: dict[str, float]
    submitted_at: Seconds
    queued_s: Seconds
    running_s: Seconds
    rescales: int
    batch_changes: int
    ended_at: Seconds | None = None
    promised_end: Seconds | None = None  # by when its policy first said that it will be done
    expected_end: Seconds | None = None  # what its policy said last
    predicted_loss: float | None = None  # that the policy expects soon, with the slots it has now
    project: str = ""  # whose members see it; a user's own name if none was named


class Jobs(Message, tag="client.jobs.1"):
    """Answer to ListJobs: a page."""

    jobs: tuple[JobSummary, ...]
    left_out: int = 0  # at least so many are on later pages
    next: str = ""  # cursor of the next page; empty: this is the last


class JobState(Message, tag="client.job_state.1"):
    """Answer to WaitJob."""

    job: JobId
    state: str
    reason: str  # why it is in this state, for people
    exit_code: int | None = None  # of the last worker that decided something


class WorkerInfo(Message, tag="client.worker_info.2"):
    """One worker process of a job."""

    rank: Rank  # in the present group; of one that is in none, the rank it was born with
    node: NodeId
    slot: SlotId
    pid: int | None
    version: Version  # of the group that it takes its steps in
    phase: str
    local_batch: int
    worker: WorkerId = WorkerId("")
    step: int = 0  # at which it joined that group


class Change(Message, tag="client.change.1"):
    """One line of a job's history."""

    time: Seconds
    from_state: str
    to_state: str
    why: str
    detail: Detail


class Size(Message, tag="client.size.1"):
    """How large a job is; no slots: it waits."""

    slots: tuple[SlotId, ...] = ()
    batch: int = 0  # global, samples per step


class Decision(Message, tag="client.decision.1"):
    """One group that was ordered, why, and the numbers behind it."""

    time: Seconds
    was: Size = msgspec.field(name="from")
    to: Size
    why: str
    code: str = ""  # stable, for programs
    by: str = "policy"  # policy, operator or cluster (something was lost)
    numbers: dict[str, float] = msgspec.field(default_factory=dict)
    version: Version = Version(0)
    outcome: str = ""  # formed, abandoned, ...; empty while it is under way
    took_s: float = 0.0


NodeCrowd = tuple[int, tuple[str, ...]]  # own workers on a node, families of other jobs there


class EpochInfo(Message, tag="client.epoch_info.1"):
    """What an epoch achieved."""

    epoch: int
    time: Seconds
    step: int
    global_batch: int
    lr: float
    samples_per_s: float
    train_loss: float | None
    metrics: dict[str, float]
    slots: int = 0  # of the group that reported it
    nodes: int = 0
    whole: bool = False  # the group was the same through all of it
    noise_scale: float | None = None  # of its gradients, samples
    samples_done: int = 0  # Y_processed since the job began; 0: not known
    epoch_samples: int = 0  # ||D||; 0: not known
    trained_samples: int | None = None  # of this epoch; None: not known
    left_early: bool = False  # the script left its loop before the epoch's end
    beside: tuple[NodeCrowd, ...] | None = None  # of each of its nodes; None: it was not the same
    pass_s: float | None = None  # of a step's last pass, with its reduction; None: not told
    sync_s: float | None = None  # of these seconds, in the reduction
    local_batch: int = 0  # samples of one pass of one worker; 0: not told
    passes: int = 0  # of one worker in a step; 0: not told


class VersionInfo(Message, tag="client.version_info.3"):
    """One group that was ordered.

    One that started from a checkpoint takes back what earlier workers did after `resumed_step`.
    """

    version: Version
    resumed_epoch: int  # the finished epoch that it started from; 0 for none
    kind: str = "start"  # start, join, recover or suspend
    resumed_step: int = 0
    time: Seconds = Seconds(0.0)  # of the order
    slots: tuple[SlotId, ...] = ()
    global_batch: int = 0
    outcome: str = ""  # empty while it is under way
    took_s: float = 0.0  # from the order to the outcome


class PromiseInfo(Message, tag="client.promise_info.1"):
    """By when a policy said that a job will be done."""

    time: Seconds  # when it said so
    end: Seconds


class JobDetail(Message, tag="client.job_detail.3"):
    """Answer to GetJob and CancelJob: a page of its lists.

    What a list has no room for is on the next pages, which `GetJob` gives; the rest is the same.
    """

    summary: JobSummary
    spec: JobSpec
    snapshot: str
    workers: tuple[WorkerInfo, ...]
    history: tuple[Change, ...]
    epochs: tuple[EpochInfo, ...]
    versions: tuple[VersionInfo, ...]
    failures: int  # failures of the script so far
    exit_code: int | None
    samples_done: int
    version: Version
    batch_limit: int | None = None  # largest global batch that a policy may choose now
    promises: tuple[PromiseInfo, ...] = ()  # of its end, oldest first; the first one counts
    notes: tuple[str, ...] = ()  # what it lacks for the policy now, and what it gets instead
    next: str = ""  # cursor of the next page; empty: this is the last


class Explanation(Message, tag="client.explanation.1"):
    """Answer to ExplainJob: every decision about it, oldest first, a page."""

    job: JobId
    state: str
    decisions: tuple[Decision, ...]
    next: str = ""  # cursor of the next page; empty: this is the last
    notes: tuple[str, ...] = ()  # what of its past is not told, and why; on the first page


class SearchInfo(Message, tag="client.search_info.1"):
    """Answer to GetSearch."""

    policy: str
    running: bool  # whether its process answers; always for one that needs none
    restarts: int = 0
    plans: int = 0  # that were taken since this controller began
    generations: int = 0
    best_fitness: float = 0.0
    mean_fitness: float = 0.0
    incumbent_fitness: float = 0.0
    decision_ms: float = 0.0  # the last one
    rescales: int = 0  # of all jobs
    batch_changes: int = 0
    predicted_gain: float | None = None  # geometric mean over changes whose gain was measured
    realised_gain: float | None = None
    diversity: float = 0.0  # mean share of jobs in which two candidates differ, 0 to 1
    gain_error: float | None = None  # factor that realised gains were off by, geometric mean
    length_error: float | None = None  # of predicted work, median, as a share of what was left
    length_coverage_80: float | None = None  # share of them that came within their 80% interval
    length_coverage_90: float | None = None  # and within that of 90%


class TrialInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration of a sweep."""

    number: int
    values: dict[str, Value]
    # waiting, training, paused, granted (its rung is over), done, graduated, stopped, failed,
    # deleted
    state: str
    why: str = ""
    parent: int | None = None
    epochs: int = 0  # finished, its parent's too
    granted: int = 0  # that it may train to now
    began_at: int = 0  # epochs of its parent that it began with
    partition: int | None = None  # that it visits now
    slot: SlotId | None = None  # where
    left: int = 0  # partitions of this epoch that it has still to visit
    metrics: tuple[dict[str, float], ...] = ()  # of its own epochs; of very many the latest ones
    first_epoch: int = 1  # that `metrics` begin with
    best_score: float | None = None  # of all of its own epochs, as it was reported
    best_epoch: int = 0  # that reached it first; 0: none
    ended_at: tuple[Seconds, ...] = ()  # of these epochs
    state_bytes: int = 0  # of its newest state; 0: not known yet


class SweepDetail(Message, tag="client.sweep_detail.1"):
    """Answer to GetSweep."""

    summary: JobSummary
    spec: SweepSpec
    trials: tuple[TrialInfo, ...]  # a page
    trials_in_all: int
    best: int | None = None  # trial
    best_score: float | None = None  # as it was reported: the largest, or the smallest for min
    units_done: int = 0
    units_again: int = 0  # done a second time, because a worker or its states were lost
    units_left: int = 0  # to what is granted now, and what the searcher will surely grant
    unit_s: float | None = None  # mean of late
    expected_end: Seconds | None = None
    hopped_bytes: int = 0  # states that came from another process or node
    waited_s: float = 0.0  # for them, over all units
    trained_s: float = 0.0  # over all units


class SweepChanged(Message, tag="client.sweep_changed.1"):
    """Answer to ChangeSweep: it is durable."""

    job: JobId
    trial: int
    state: str


class LedgerUnit(msgspec.Struct, frozen=True, kw_only=True):
    """A unit that counts."""

    trial: int  # whose training it is of
    by: int  # whose values and randomness it had: the trial's own, or a parent's
    version: int  # of the state that it left: units of the trial so far
    epoch: int
    partition: int
    digest: str  # SHA-256 of that state
    node: NodeId
    slot: SlotId
    ended: Seconds
    seconds: float
    metrics: dict[str, float]
    samples: int


class Ledger(Message, tag="client.ledger.1"):
    """Answer to GetLedger."""

    job: JobId
    spec: SweepSpec
    snapshot: str
    units: tuple[LedgerUnit, ...]  # a page
    units_in_all: int


class NodeInfo(Message, tag="client.node_info.1"):
    """A line of `ones node list`."""

    node: NodeId
    state: str
    reason: str
    host: str
    address: str
    slots: int
    free: int
    kind: str
    model: str
    jobs: tuple[JobId, ...]
    release: str


class Nodes(Message, tag="client.nodes.1"):
    """Answer to ListNodes: a page."""

    nodes: tuple[NodeInfo, ...]
    next: str = ""  # cursor of the next page; empty: this is the last


class EventsPage(Message, tag="client.events_page.1"):
    """Answer to ReadEvents."""

    events: tuple[FeedEvent, ...]
    next_seq: int


class Failed(Message, tag="client.failed.1"):
    """The request was not done; nothing changed."""

    code: str
    message: str
    hint: str
    field: str = ""


Request = (
    GetCluster
    | PutSnapshot
    | SubmitJob
    | CheckJob
    | CancelJob
    | ResizeJob
    | PauseJob
    | ResumeJob
    | ListJobs
    | GetJob
    | WaitJob
    | ExplainJob
    | GetSearch
    | ListNodes
    | DrainNode
    | UndrainNode
    | GetSweep
    | ChangeSweep
    | GetLedger
    | ReadEvents
    | AddKey
    | ListKeys
    | RevokeKey
    | ReadLog
)
Reply = (
    Cluster
    | SnapshotStored
    | JobAccepted
    | JobChecked
    | Jobs
    | JobDetail
    | JobState
    | Explanation
    | SearchInfo
    | SweepDetail
    | SweepChanged
    | Ledger
    | Nodes
    | EventsPage
    | Keys
    | LogPage
    | Failed
)
