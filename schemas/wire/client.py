"""Messages between client and controller: every request has exactly one reply.

Frames of a request: [correlation id (1 to 32 bytes), message]; the reply repeats the id.
Admins also manage the list of keys here; a secret key is never sent.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from schemas.epochs import EpochFacts
from schemas.ids import JobId, NodeId, Rank, Seconds, SlotId, Term, Version, WorkerId
from schemas.jobs import JobSpec
from schemas.sweeps import SweepSpec, Value
from schemas.wire import Message
from schemas.wire.feed import Detail, FeedEvent, LogPage, Position, ReadLog

Role = Literal["admin", "operator", "user", "viewer", "node"]
Public = Annotated[str, msgspec.Meta(min_length=40, max_length=40)]


class AddKey(Message, tag="keys.add.1"):
    """Let the owner of a key connect; idempotent."""

    public: Public  # Z85
    name: str  # of the owner: a person or a node
    role: Role
    projects: tuple[str, ...] = ()
    expires: Seconds | None = None  # since the epoch; None: never


class ListKeys(Message, tag="keys.list.1"):
    """A page of all keys, also of expired and revoked ones."""

    cursor: str = ""  # `next` of the previous page


class RevokeKey(Message, tag="keys.revoke.1"):
    """Revoke keys irrevocably, and end their connections."""

    key: str  # a public key, or an owner's name for all keys of that owner


class KeyInfo(Message, tag="keys.key.1"):
    """A key and its state."""

    public: str
    name: str
    role: str
    projects: tuple[str, ...] = ()
    expires: Seconds | None = None
    state: str = "valid"  # valid, expired or revoked
    kept: str = "online"  # file: in authorised.toml; online: added over this port
    by: str = ""  # who added or revoked the key over this port last
    at: Seconds | None = None  # time of that change


class Keys(Message, tag="keys.keys.1"):
    """Reply to `AddKey`, `RevokeKey` (the keys concerned) and `ListKeys`: a page."""

    keys: tuple[KeyInfo, ...]
    next: str = ""  # cursor of the next page; empty: last page


# --- requests


class GetCluster(Message, tag="client.get_cluster.1"):
    """Identity of the controller, and the addresses of its other sockets."""


class PutSnapshot(Message, tag="client.put_snapshot.1"):
    """A piece of a working directory's archive; pieces are sent in order."""

    digest: str  # SHA-256 of the archive, hexadecimal
    offset: Position
    data: bytes
    total: Position  # bytes


class SubmitJob(Message, tag="client.submit_job.1"):
    """Submit a job. The same `key` a second time is answered with the first job."""

    spec: JobSpec
    snapshot: str  # digest of an archive sent before, or of a job whose files you may read
    key: str = ""  # idempotency key, per user
    project: str = ""  # one of your key's, whose members see the job; empty: the first one


class CheckJob(Message, tag="client.check_job.1"):
    """Check whether the job would be accepted, without submitting it."""

    spec: JobSpec


class CancelJob(Message, tag="client.cancel_job.1"):
    """End a job and stop its workers."""

    job: JobId


class ResizeJob(Message, tag="client.resize_job.1"):
    """Manual override: number of slots and batch, which the policy then leaves alone.

    Fields that are left out keep the value of an earlier override, or stay as they are.
    """

    job: JobId
    slots: int | None = None  # 0: pause
    batch: int | None = None  # global, samples per step
    on: tuple[SlotId, ...] = ()  # these slots exactly


class PauseJob(Message, tag="client.pause_job.1"):
    """Manual override: write a checkpoint, then hold no slots until the job is resumed."""

    job: JobId


class ResumeJob(Message, tag="client.resume_job.1"):
    """End a pause; with `auto`, also return the job to the policy's control."""

    job: JobId
    auto: bool = False


class ListJobs(Message, tag="client.list_jobs.1"):
    """A page of job summaries, oldest first."""

    ended: bool = False  # include ended jobs
    states: tuple[
        str, ...
    ] = ()  # only jobs in these states, ended ones included regardless of `ended`
    user: str = ""  # only jobs of this user
    name: str = ""  # NAME or NAME-N, or a pattern: `lr-*`
    cursor: str = ""  # `next` of the previous page


class GetJob(Message, tag="client.get_job.1"):
    """A page of everything about a job; with `wait_s`, the reply waits so long for its end."""

    job: JobId
    wait_s: float = 0.0
    cursor: str = ""  # `next` of the previous page


class WaitJob(Message, tag="client.wait_job.1"):
    """The state of a job; with `wait_s`, the reply waits at most so long for its end."""

    job: JobId
    wait_s: float = 0.0


class ExplainJob(Message, tag="client.explain_job.1"):
    """A page of the decisions about a job's slots and batch, with their reasons."""

    job: JobId
    cursor: str = ""  # `next` of the previous page


class GetSearch(Message, tag="client.get_search.1"):
    """State of the scheduler."""


class ListNodes(Message, tag="client.list_nodes.1"):
    """A page of all nodes that ever joined."""

    cursor: str = ""  # `next` of the previous page


class DrainNode(Message, tag="client.drain_node.1"):
    """Empty a node: its jobs move or wait, and no new ones start there. Reply: `Nodes`.

    A repeated request replaces reason and deadline.
    """

    node: NodeId
    reason: str = ""
    within_s: float | None = None  # after that, remaining jobs are stopped and wait; None: never


class UndrainNode(Message, tag="client.undrain_node.1"):
    """Return a drained node to service. Reply: `Nodes`."""

    node: NodeId


class GetSweep(Message, tag="client.get_sweep.1"):
    """State of a sweep, trial by trial."""

    job: JobId
    from_trial: int = 0  # first of the page; the reply has the total
    limit: int = 500


class ChangeSweep(Message, tag="client.change_sweep.1"):
    """Change one trial of a sweep, or add one. The same `key` a second time has no effect."""

    job: JobId
    change: Literal["add", "stop", "pause", "resume", "delete"]
    trial: int | None = None  # for all changes but add
    values: dict[str, Value] = msgspec.field(default_factory=dict)  # add: replace the parent's
    parent: int | None = None  # add: continue from this trial's state
    key: str = ""


class GetLedger(Message, tag="client.get_ledger.1"):
    """The valid units of a sweep, in the order in which they ended."""

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
    """Reply to GetCluster."""

    release: str
    term: Term
    policy: str
    user: str  # owner of your key
    role: str
    feed_port: int
    log_port: int
    last_seq: int  # of the feed
    stalled: str = ""  # why submissions are refused: the journal cannot be written
    projects: tuple[str, ...] = ()  # whose jobs you see; empty: all
    topics: tuple[str, ...] = ()  # feed topics that you may subscribe to: prefixes
    agents_port: int = 0  # for agents; 0: not reported by an older controller


class SnapshotStored(Message, tag="client.snapshot_stored.1"):
    """Stored up to `size` bytes; complete when that is the total."""

    digest: str
    size: int


class JobAccepted(Message, tag="client.job_accepted.1"):
    """The job is durable."""

    job: JobId
    state: str
    notes: tuple[str, ...] = ()  # what the policy misses in the job file, and its replacement


class JobChecked(Message, tag="client.job_checked.1"):
    """Reply to CheckJob: the job would be accepted."""

    notes: tuple[str, ...] = ()  # as in JobAccepted


class JobSummary(Message, tag="client.job_summary.1"):
    """A line of `ones ps`."""

    job: JobId
    name: str
    user: str
    state: str
    reason: str  # of the state, for people
    slots: int
    global_batch: int
    lr: float | None
    epoch: int  # finished
    samples_per_s: float
    progress: float | None  # 0 to 1 of the stated work; None with a metric stop rule
    train_loss: float | None
    metrics: dict[str, float]
    submitted_at: Seconds
    queued_s: Seconds
    running_s: Seconds
    rescales: int
    batch_changes: int
    ended_at: Seconds | None = None
    promised_end: Seconds | None = None  # completion time that the policy forecast first
    expected_end: Seconds | None = None  # its latest forecast of the completion time
    predicted_loss: float | None = None  # the policy's forecast for the current slots
    project: str = ""  # whose members see the job; the user's name if none was given


class Jobs(Message, tag="client.jobs.1"):
    """Reply to ListJobs: a page."""

    jobs: tuple[JobSummary, ...]
    left_out: int = 0  # lower bound of the jobs on later pages
    next: str = ""  # cursor of the next page; empty: last page


class JobState(Message, tag="client.job_state.1"):
    """Reply to WaitJob."""

    job: JobId
    state: str
    reason: str  # of the state, for people
    exit_code: int | None = None  # of the worker whose exit decided the job's state


class WorkerInfo(Message, tag="client.worker_info.2"):
    """A worker process of a job."""

    rank: Rank  # in the current group; without a group, the rank with which it started
    node: NodeId
    slot: SlotId
    pid: int | None
    version: Version  # of the group in which the worker trains
    phase: str
    local_batch: int
    worker: WorkerId = WorkerId("")
    step: int = 0  # at which the worker joined that group


class Change(Message, tag="client.change.2"):
    """A line of a job's history."""

    time: Seconds
    from_state: str
    to_state: str
    reason: str
    detail: Detail


class Size(Message, tag="client.size.1"):
    """Slots and batch of a job; no slots: it waits."""

    slots: tuple[SlotId, ...] = ()
    batch: int = 0  # global, samples per step


class Decision(Message, tag="client.decision.2"):
    """A group that was ordered, with its reason and the numbers behind it."""

    time: Seconds
    before: Size = msgspec.field(name="from")
    to: Size
    reason: str
    code: str = ""  # stable, for programs
    by: str = "policy"  # policy, operator or cluster (after a loss)
    numbers: dict[str, float] = msgspec.field(default_factory=dict)
    version: Version = Version(0)
    outcome: str = ""  # formed, abandoned, ...; empty: in progress
    took_s: float = 0.0


NodeCrowd = tuple[int, tuple[str, ...]]  # the job's workers on a node, families of other jobs there


class EpochInfo(EpochFacts, frozen=True, kw_only=True):
    """Results of one epoch, as kept in the job's history."""

    time: Seconds
    slots: int = 0  # of the group that reported the epoch
    nodes: int = 0
    whole: bool = False  # one group trained the entire epoch
    beside: tuple[NodeCrowd, ...] | None = None  # for each node; None: changed during the epoch


class VersionInfo(Message, tag="client.version_info.3"):
    """A group that was ordered.

    A group that started from a checkpoint undoes what earlier workers did after `resumed_step`.
    """

    version: Version
    resumed_epoch: int  # finished epoch of the checkpoint; 0: none
    kind: str = "start"  # start, join, recover or suspend
    resumed_step: int = 0
    time: Seconds = Seconds(0.0)  # of the order
    slots: tuple[SlotId, ...] = ()
    global_batch: int = 0
    outcome: str = ""  # empty: in progress
    took_s: float = 0.0  # from the order to the outcome


class PromiseInfo(Message, tag="client.promise_info.1"):
    """A policy's forecast of a job's completion."""

    time: Seconds  # of the forecast
    end: Seconds  # forecast end


class JobDetail(Message, tag="client.job_detail.3"):
    """Reply to GetJob and CancelJob: a page of its lists.

    `GetJob` returns the further pages of the lists; the other fields are the same on each page.
    """

    summary: JobSummary
    spec: JobSpec
    snapshot: str
    workers: tuple[WorkerInfo, ...]
    history: tuple[Change, ...]
    epochs: tuple[EpochInfo, ...]
    versions: tuple[VersionInfo, ...]
    failures: int  # of the script so far
    exit_code: int | None
    samples_done: int
    version: Version
    batch_limit: int | None = None  # largest global batch that a policy may choose now
    promises: tuple[PromiseInfo, ...] = ()  # oldest first; the first one counts
    notes: tuple[str, ...] = ()  # as in JobAccepted, current
    next: str = ""  # cursor of the next page; empty: last page


class Explanation(Message, tag="client.explanation.1"):
    """Reply to ExplainJob: a page of all decisions about the job, oldest first."""

    job: JobId
    state: str
    decisions: tuple[Decision, ...]
    next: str = ""  # cursor of the next page; empty: last page
    notes: tuple[str, ...] = ()  # decisions that are not shown, and why; on the first page


class SearchInfo(Message, tag="client.search_info.1"):
    """Reply to GetSearch."""

    policy: str
    running: bool  # the search process replies; always True without such a process
    restarts: int = 0
    plans: int = 0  # accepted since this controller started
    generations: int = 0
    best_fitness: float = 0.0
    mean_fitness: float = 0.0
    incumbent_fitness: float = 0.0
    decision_ms: float = 0.0  # latest
    rescales: int = 0  # of all jobs
    batch_changes: int = 0
    predicted_gain: float | None = None  # geometric mean over changes with a measured gain
    realised_gain: float | None = None
    diversity: float = 0.0  # mean share of jobs that differ between two candidates, 0 to 1
    gain_error: float | None = None  # factor between predicted and realised gains, geometric mean
    length_error: float | None = None  # of predicted work, median, as a share of the remaining work
    length_coverage_80: float | None = None  # share of lengths within their 80% interval
    length_coverage_90: float | None = None  # share within their 90% interval


class TrialInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration of a sweep."""

    number: int
    values: dict[str, Value]
    # waiting, training, paused, granted (its rung is over), done, graduated, stopped, failed,
    # deleted
    state: str
    reason: str = ""
    graduated_as: JobId | None = None  # job that continues the trial
    parent: int | None = None
    epochs: int = 0  # finished, including the parent's
    granted: int = 0  # epochs that it may reach now
    start_epochs: int = 0  # epochs of the parent's state that it started from
    partition: int | None = None  # current visit
    slot: SlotId | None = None  # of the current visit
    partitions_left: int = 0  # partitions still to visit in this epoch
    metrics: tuple[dict[str, float], ...] = ()  # of its own epochs, the latest if very many
    first_epoch: int = 1  # of `metrics`
    best_score: float | None = None  # over its own epochs, as reported
    best_epoch: int = 0  # first epoch with that score; 0: none
    ended_at: tuple[Seconds, ...] = ()  # of the epochs in `metrics`
    state_bytes: int = 0  # size of the newest state; 0: not known yet


class SweepDetail(Message, tag="client.sweep_detail.2"):
    """Reply to GetSweep."""

    summary: JobSummary
    spec: SweepSpec
    trials: tuple[TrialInfo, ...]  # a page
    trials_total: int
    best: int | None = None  # trial
    best_score: float | None = None  # as reported: the largest, or the smallest with mode min
    units_done: int = 0
    units_repeated: int = 0  # repeated because a worker or states were lost
    units_left: int = 0  # of what is granted now, or certain to be granted later
    unit_s: float | None = None  # recent mean
    expected_end: Seconds | None = None
    moved_bytes: int = 0  # of states from another process or node
    waited_s: float = 0.0  # for these states, over all units
    trained_s: float = 0.0  # over all units


class SweepChanged(Message, tag="client.sweep_changed.1"):
    """Reply to ChangeSweep: the change is durable."""

    job: JobId
    trial: int
    state: str


class LedgerUnit(msgspec.Struct, frozen=True, kw_only=True):
    """A unit that counts."""

    trial: int  # that the unit is part of
    values_of: int  # trial whose values and randomness were used: this one, or a parent
    version: int  # of the resulting state: units of the trial so far
    epoch: int
    partition: int
    digest: str  # SHA-256 of that state
    node: NodeId
    slot: SlotId
    ended: Seconds
    seconds: float
    metrics: dict[str, float]
    samples: int


class Ledger(Message, tag="client.ledger.2"):
    """Reply to GetLedger."""

    job: JobId
    spec: SweepSpec
    snapshot: str
    units: tuple[LedgerUnit, ...]  # a page
    units_total: int


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
    """Reply to ListNodes: a page."""

    nodes: tuple[NodeInfo, ...]
    next: str = ""  # cursor of the next page; empty: last page


class EventsPage(Message, tag="client.events_page.1"):
    """Reply to ReadEvents."""

    events: tuple[FeedEvent, ...]
    next_seq: int


class Failed(Message, tag="client.failed.1"):
    """The request was not carried out; nothing changed."""

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
