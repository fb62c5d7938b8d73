"""Messages between client and controller. Every request has exactly one reply.

A request has the frames [correlation id (1 to 32 bytes), message]; the reply repeats the id.
Admins also manage the list of keys with these messages. A secret key is never sent.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from schemas.epochs import EpochFacts
from schemas.ids import JobId, NodeId, Pid, Rank, Seconds, SlotId, Term, Version, WorkerId
from schemas.jobs import JobSpec
from schemas.nodes import Reservation
from schemas.sharing import Sharing
from schemas.sweeps import SweepSpec, Value
from schemas.wire import Message
from schemas.wire.feed import Detail, FeedEvent, Position

Role = Literal["admin", "operator", "user", "viewer", "node", "join"]
Public = Annotated[str, msgspec.Meta(min_length=40, max_length=40)]


class Request(Message):
    """Message to the request server of the controller."""


class Reply(Message):
    """Message that the request server replies with."""


class AddKey(Request, tag="keys.add.1"):
    """Authorise the owner of a key to connect. The request is idempotent."""

    public: Public  # Z85
    name: str  # name of the owner: a person or a node
    role: Role
    projects: tuple[str, ...] = ()
    expires: Seconds | None = None  # seconds since the epoch; None: never


class ListKeys(Request, tag="keys.list.1"):
    """Request a page of all keys, including expired and revoked ones."""

    cursor: str = ""  # `next` of the previous page


class RevokeKey(Request, tag="keys.revoke.1"):
    """Revoke keys permanently, and close their connections."""

    key: str  # a public key, or the name of an owner: all keys of the owner are revoked


class KeyInfo(Message, tag="keys.key.1"):
    """A key and its state."""

    public: str
    name: str
    role: str
    projects: tuple[str, ...] = ()
    expires: Seconds | None = None
    state: str = "valid"  # valid, expired or revoked
    kept: str = "online"  # file: listed in authorised.toml; online: added over this port
    by: str = ""  # user who last added or revoked the key over this port
    at: Seconds | None = None  # time of that change


class Keys(Reply, tag="keys.keys.1"):
    """Reply with the changed keys (`AddKey`, `RevokeKey`) or a page of keys (`ListKeys`)."""

    keys: tuple[KeyInfo, ...]
    next: str = ""  # cursor of the next page; empty: last page


# --- requests


class GetCluster(Request, tag="client.get_cluster.1"):
    """Request the identity of the controller, and the ports of its other sockets."""


class PutSnapshot(Request, tag="client.put_snapshot.1"):
    """Upload a piece of the archive of a working directory. Pieces must arrive in order."""

    digest: str  # SHA-256 of the archive, hexadecimal
    offset: Position
    data: bytes
    total: Position  # bytes of the whole archive


class SubmitJob(Request, tag="client.submit_job.1"):
    """Submit a job. If the same `key` is sent again, the reply names the first job."""

    spec: JobSpec
    snapshot: str  # digest of an uploaded archive, or of a job with files that you may read
    key: str = ""  # idempotency key, per user
    project: str = ""  # a project of your key; its members see the job; empty: first project
    # Values of the variables in `spec.secret_env`
    secrets: dict[str, str] = msgspec.field(default_factory=dict)


class CheckJob(Request, tag="client.check_job.1"):
    """Ask whether the job would be accepted, without submitting the job."""

    spec: JobSpec
    when: bool = False  # also predict its start
    project: str = ""  # as in SubmitJob


class CancelJob(Request, tag="client.cancel_job.1"):
    """End a job and stop its workers."""

    job: JobId


class ResizeJob(Request, tag="client.resize_job.1"):
    """Set the number of slots and the batch by hand.

    From then on the policy changes neither the number of slots nor the batch of this job.

    A field that is left out keeps the value of an earlier override, or its current value.
    """

    job: JobId
    slots: int | None = None  # 0 pauses the job
    batch: int | None = None  # global, samples per step
    on: tuple[SlotId, ...] = ()  # exactly these slots


class PauseJob(Request, tag="client.pause_job.1"):
    """Pause a job by hand. The job writes a checkpoint and has no slots until `ResumeJob`."""

    job: JobId


class ResumeJob(Request, tag="client.resume_job.1"):
    """End a pause. With `auto`, also return the job to the policy's control."""

    job: JobId
    auto: bool = False


class HoldJob(Request, tag="client.hold_job.1"):
    """Hold a job: it gets no slots until `ReleaseJob`. A running job goes on."""

    job: JobId


class ReleaseJob(Request, tag="client.release_job.1"):
    """End a hold."""

    job: JobId


class RerunJob(Request, tag="client.rerun_job.1"):
    """Submit the spec and the working directory of your job again. Reply: `JobAccepted`.

    The new job does not wait for other jobs or for a time. It may be the job of an ended one.
    """

    job: JobId
    key: str = ""  # idempotency key, per user
    # Required if the job has a `secret_env`, because none are kept
    secrets: dict[str, str] = msgspec.field(default_factory=dict)


class ListJobs(Request, tag="client.list_jobs.1"):
    """Request a page of job summaries, oldest first by default."""

    ended: bool = False  # include ended jobs
    states: tuple[
        str, ...
    ] = ()  # only jobs in these states; ended states are included regardless of `ended`
    user: str = ""  # only jobs of this user
    name: str = ""  # NAME, NAME-N, or a pattern such as `lr-*`
    cursor: str = ""  # `next` of the previous page
    labels: dict[str, str] = msgspec.field(default_factory=dict)  # only jobs with all of these
    older_s: float = 0.0  # only jobs that were submitted at least so many seconds ago
    newest_first: bool = False
    limit: int = 0  # rows of the reply, which is then the last page; 0: no limit


class GetUsage(Request, tag="client.get_usage.1"):
    """Request a page of the slot time that jobs used, in order of acceptance."""

    since: Seconds = Seconds(0.0)  # seconds since the epoch
    until: Seconds | None = None  # None: now
    cursor: str = ""  # `next` of the previous page


class GetJob(Request, tag="client.get_job.1"):
    """Request a page of all data about a job. Wait up to `wait_s` for the end of the job."""

    job: JobId
    wait_s: float = 0.0
    cursor: str = ""  # `next` of the previous page


class WaitJob(Request, tag="client.wait_job.1"):
    """Request the state of a job. Wait up to `wait_s` for the end of the job."""

    job: JobId
    wait_s: float = 0.0
    failures: int | None = None  # reply also once more tries than this have failed; None: do not


class ExplainJob(Request, tag="client.explain_job.1"):
    """Request a page of the decisions about a job's slots and batch, with their reasons."""

    job: JobId
    cursor: str = ""  # `next` of the previous page


class GetSearch(Request, tag="client.get_search.1"):
    """Request the state of the scheduler."""


class ListNodes(Request, tag="client.list_nodes.1"):
    """Request a page of all nodes that have ever joined."""

    cursor: str = ""  # `next` of the previous page


class DrainNode(Request, tag="client.drain_node.1"):
    """Empty a node. Its jobs move or wait, and no new jobs start there. Reply: `Nodes`.

    A repeated request replaces the reason and the deadline.
    """

    node: NodeId
    reason: str = ""
    within_s: float | None = None  # time after which remaining jobs stop and wait; None: never
    cordon: bool = False  # jobs stay where they are; only new ones do not come


class ReserveNodes(Request, tag="client.reserve_nodes.1"):
    """Keep nodes for jobs of some projects and users, or for maintenance. Reply: `Nodes`.

    Other jobs leave the nodes before the begin, and may return at the end.
    """

    nodes: tuple[NodeId, ...]
    reservation: Reservation


class CancelReservation(Request, tag="client.cancel_reservation.1"):
    """Cancel a reservation, or end it, on all its nodes. Reply: `Nodes`."""

    id: str


class GetSharing(Request, tag="client.get_sharing.1"):
    """Request the rules of sharing, and what accounts have. Reply: `SharingInfo`."""


class ChangeSharing(Request, tag="client.change_sharing.1"):
    """Replace the rules of sharing. Reply: `SharingInfo`."""

    sharing: Sharing
    based_on: int  # revision that was read; if it is not the latest one, nothing changes


class PauseScheduling(Request, tag="client.pause_scheduling.1"):
    """Start and grow no job until scheduling is resumed. Reply: `SharingInfo`."""

    paused: bool
    reason: str = ""


class GetPolicy(Request, tag="client.get_policy.1"):
    """Request which policy plans. Reply: `PolicyInfo`."""


class ChoosePolicy(Request, tag="client.choose_policy.1"):
    """Let another policy plan, or the same one with other options. Reply: `PolicyInfo`."""

    name: Annotated[str, msgspec.Meta(max_length=200)]
    options: str = "{}"  # JSON object of the options that differ from the defaults


class UndrainNode(Request, tag="client.undrain_node.1"):
    """Return a drained node to service. Reply: `Nodes`."""

    node: NodeId


class ForgetNode(Request, tag="client.forget_node.1"):
    """Remove a node that is lost and will not come back. Reply: `Nodes`, as it was before."""

    node: NodeId


class GetSweep(Request, tag="client.get_sweep.1"):
    """Request the state of a sweep, with a page of its trials."""

    job: JobId
    from_trial: int = 0  # first trial of the page; the reply has the total
    limit: int = 500


class ChangeSweep(Request, tag="client.change_sweep.1"):
    """Change a trial of a sweep, or add one. A second request with the same `key` does nothing."""

    job: JobId
    change: Literal["add", "stop", "pause", "resume", "delete"]
    trial: int | None = None  # required for all changes except add
    values: dict[str, Value] = msgspec.field(default_factory=dict)  # for add: changed values
    parent: int | None = None  # for add; the new trial continues from this trial's state
    key: str = ""


class GetLedger(Request, tag="client.get_ledger.1"):
    """Request a page of the valid units of a sweep, in the order in which they ended."""

    job: JobId
    from_unit: int = 0
    limit: int = 2000


class ReadEvents(Request, tag="client.read_events.1"):
    """Request feed events from `from_seq` on. If there is none, wait for one up to `wait_s`."""

    from_seq: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 1
    limit: int = 1000
    wait_s: float = 0.0


# --- replies


class Cluster(Reply, tag="client.cluster.1"):
    """Reply to GetCluster."""

    release: str
    term: Term
    policy: str
    user: str  # owner of your key
    role: str
    feed_port: int
    log_port: int
    last_seq: int  # number of the last feed event
    stalled: str = ""  # reason why submissions are refused, such as an unwritable journal
    projects: tuple[str, ...] = ()  # you see the jobs of these projects; empty: all
    topics: tuple[str, ...] = ()  # prefixes of the feed topics that you may subscribe to
    agents_port: int = 0  # port for agents; 0: unknown, because the controller is older
    next_key: str = ""  # public key that the controller will have after its rotation; empty: none
    now: Seconds = Seconds(0.0)  # by the controller's clock; 0: unknown, because it is older


class SnapshotStored(Reply, tag="client.snapshot_stored.1"):
    """The controller has stored the first `size` bytes of the archive."""

    digest: str
    size: int


class JobAccepted(Reply, tag="client.job_accepted.1"):
    """The job is accepted and durable."""

    job: JobId
    state: str
    notes: tuple[str, ...] = ()  # what the policy needs but the job file lacks, and the fallback


class ExpectedStart(Message, tag="client.expected_start.1"):
    """Predicted start of a job that would be submitted now."""

    starts: Literal["now", "later", "unknown"] = "unknown"
    at: Seconds | None = None  # median; None: unknown
    earliest: Seconds | None = None  # 80% of the starts should be between this time
    latest: Seconds | None = None  # and this one; None: unknown
    ahead: int = 0  # waiting jobs that are served before it
    after: str | None = None  # running job whose end most likely gives it slots
    after_ends_at: Seconds | None = None
    reason: str = ""  # why the start is unknown


class JobChecked(Reply, tag="client.job_checked.1"):
    """Reply to CheckJob: the job would be accepted."""

    notes: tuple[str, ...] = ()  # as in JobAccepted
    start: ExpectedStart | None = None  # None: not requested


class JobSummary(Message, tag="client.job_summary.1"):
    """A line of `ones ps`."""

    job: JobId
    name: str
    user: str
    state: str
    reason: str  # reason for the state, for people
    slots: int
    global_batch: int
    lr: float | None
    epoch: int  # number of finished epochs
    samples_per_s: float
    progress: float | None  # finished part of the work, 0 to 1; None with a metric stop rule
    train_loss: float | None
    metrics: dict[str, float]
    submitted_at: Seconds
    queued_s: Seconds
    running_s: Seconds
    rescales: int
    batch_changes: int
    ended_at: Seconds | None = None
    promised_end: Seconds | None = None  # the policy's first forecast of the end
    expected_end: Seconds | None = None  # the policy's latest forecast of the end
    predicted_loss: float | None = None  # the policy's forecast for the current slots
    project: str = ""  # members of the project see the job; default: the user's name
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    exit_code: int | None = None  # exit code of the worker that decided the job's state
    slot_s: float = 0.0  # slots times seconds so far
    cpu_cores: float | None = None  # that its processes use now; None: no recent measurement
    memory_bytes: int | None = None  # resident memory of its processes
    gpu_share: float | None = None  # time in which its GPUs work, 0 to 1, mean; None: no GPU
    gpu_memory_bytes: int | None = None  # sum of its GPUs
    kind: str = "elastic"  # elastic, torchrun, command, interactive or sweep
    start_at: Seconds | None = None  # expected start of a waiting job; None: unknown
    start_earliest: Seconds | None = None  # 80% of the starts should be between this time
    start_latest: Seconds | None = None  # and this one
    code: str = ""  # why the job waits; stable, for programs; empty: it does not wait
    min_slots: int = 0  # with which it can start


class AccountShare(Message, tag="client.account_share.1"):
    """Slots of a user in a project."""

    project: str
    user: str
    slots: int  # that its jobs have now
    running: int  # jobs with slots
    waiting: int  # jobs without slots
    budget: int | None = None  # most slots of its elastic and rigid jobs now; None: not bounded
    usage_s: float = 0.0  # decayed slot seconds


class SharingInfo(Reply, tag="client.sharing_info.1"):
    """Rules of sharing, and the accounts that the reader may see."""

    sharing: Sharing
    slots: int  # of the cluster
    accounts: tuple[AccountShare, ...]
    paused: str = ""  # who paused scheduling, and why; empty: it runs


class PolicyInfo(Reply, tag="client.policy_info.1"):
    """The policy that plans."""

    name: str
    options: str  # JSON object of the options that differ from the policy's defaults
    by: str = ""  # who chose it; empty: the settings file
    since: Seconds = Seconds(0.0)
    in_file: str = ""  # policy in the settings file


class Jobs(Reply, tag="client.jobs.1"):
    """Reply to ListJobs: a page."""

    jobs: tuple[JobSummary, ...]
    left_out: int = 0  # lower bound of the jobs on later pages
    next: str = ""  # cursor of the next page; empty: last page


class JobUsage(Message, tag="client.job_usage.1"):
    """Slot time of one job."""

    job: JobId
    user: str
    project: str
    slot_s: float  # slots times seconds


class Usage(Reply, tag="client.usage.1"):
    """Reply to GetUsage: a page."""

    since: Seconds
    until: Seconds
    jobs: tuple[JobUsage, ...]
    next: str = ""  # cursor of the next page; empty: last page


class JobState(Reply, tag="client.job_state.1"):
    """Reply to WaitJob."""

    job: JobId
    state: str
    reason: str  # reason for the state, for people
    exit_code: int | None = None  # exit code of the worker that decided the job's state
    failures: int = 0  # number of script failures so far
    failure: str = ""  # which try failed last, and why; empty: none


class WorkerInfo(Message, tag="client.worker_info.2"):
    """A worker process of a job."""

    rank: Rank  # in the current group; without a group, the rank at the worker's start
    node: NodeId
    slot: SlotId
    pid: Pid | None
    version: Version  # group in which the worker trains
    phase: str
    local_batch: int
    worker: WorkerId = WorkerId("")
    step: int = 0  # step at which the worker joined this group


class Change(Message, tag="client.change.2"):
    """A line of a job's history."""

    time: Seconds
    from_state: str
    to_state: str
    reason: str
    detail: Detail


class Size(Message, tag="client.size.1"):
    """Slots and batch of a job. A job without slots waits."""

    slots: tuple[SlotId, ...] = ()
    batch: int = 0  # global, samples per step


class Decision(Message, tag="client.decision.2"):
    """An ordered group, with the reason for it and the numbers that led to it."""

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


NodeCrowd = tuple[int, tuple[str, ...]]  # number of own workers, families of other jobs


class EpochInfo(EpochFacts, frozen=True, kw_only=True):
    """Results of one epoch, as stored in the job's history."""

    time: Seconds
    slots: int = 0  # number of slots of the group that reported the epoch
    nodes: int = 0
    whole: bool = False  # True: one group trained the entire epoch
    beside: tuple[NodeCrowd, ...] | None = None  # per node; None: neighbours changed in the epoch


class VersionInfo(Message, tag="client.version_info.3"):
    """A group that the controller ordered.

    If the group started from a checkpoint, all steps after `resumed_step` were lost.
    """

    version: Version
    resumed_epoch: int  # finished epoch of the checkpoint; 0 without a checkpoint
    kind: str = "start"  # start, join, recover or suspend
    resumed_step: int = 0
    time: Seconds = Seconds(0.0)  # time of the order
    slots: tuple[SlotId, ...] = ()
    global_batch: int = 0
    outcome: str = ""  # empty: in progress
    took_s: float = 0.0  # from the order to the outcome


class PromiseInfo(Message, tag="client.promise_info.1"):
    """A policy's forecast of the end of a job."""

    time: Seconds  # time of the forecast
    end: Seconds  # forecast end of the job


class JobDetail(Reply, tag="client.job_detail.3"):
    """Reply to GetJob and CancelJob: a page of the job's lists.

    To get further pages of the lists, send `GetJob` again. Other fields are the same on each page.
    """

    summary: JobSummary
    spec: JobSpec
    snapshot: str
    workers: tuple[WorkerInfo, ...]
    history: tuple[Change, ...]
    epochs: tuple[EpochInfo, ...]
    versions: tuple[VersionInfo, ...]
    failures: int  # number of script failures so far
    exit_code: int | None
    samples_done: int
    version: Version
    batch_limit: int | None = None  # largest global batch that a policy may choose now
    promises: tuple[PromiseInfo, ...] = ()  # oldest first; the first one is the promise
    notes: tuple[str, ...] = ()  # as in JobAccepted, for the current state
    next: str = ""  # cursor of the next page; empty: last page
    epochs_total: int | None = None  # most epochs of the job; None: not known, or not limited


class Explanation(Reply, tag="client.explanation.1"):
    """Reply to ExplainJob: a page of all decisions about the job, oldest first."""

    job: JobId
    state: str
    decisions: tuple[Decision, ...]
    next: str = ""  # cursor of the next page; empty: last page
    notes: tuple[str, ...] = ()  # omitted decisions, and why; on the first page only


class PlannedJob(msgspec.Struct, frozen=True, kw_only=True):
    """Slots that the latest plan gives to a job that it changes or lets wait."""

    job: JobId
    slots: int  # 0: it waits
    batch: int  # global, samples per step
    reason: str = ""
    expected_gain: float | None = None  # speed then over speed now; None: not predicted


class SearchInfo(Reply, tag="client.search_info.1"):
    """Reply to GetSearch."""

    policy: str
    running: bool  # True if the search process replies, or if the policy has no such process
    restarts: int = 0
    plans: int = 0  # plans accepted since this controller started
    generations: int = 0
    best_fitness: float = 0.0
    mean_fitness: float = 0.0
    incumbent_fitness: float = 0.0
    decision_ms: float = 0.0  # time of the latest decision
    rescales: int = 0  # total of all jobs
    batch_changes: int = 0
    predicted_gain: float | None = None  # geometric mean of speed-ups that were also measured
    realised_gain: float | None = None
    diversity: float = 0.0  # mean share of jobs that differ between two candidates, 0 to 1
    gain_error: float | None = None  # factor between predicted and realised gains, geometric mean
    length_error: float | None = None  # median error of predicted work, share of the remaining work
    length_coverage_80: float | None = None  # share of job lengths within their 80% interval
    length_coverage_90: float | None = None  # share of job lengths within their 90% interval
    planned: tuple[PlannedJob, ...] = ()  # of the latest plan, at most 200 that the reader may see
    planned_at: Seconds | None = None  # time of the latest plan
    spread: tuple[float, ...] = ()  # fitness at 0, 25, 50, 75 and 100% of the population


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
    epochs: int = 0  # number of finished epochs, including the parent's
    granted: int = 0  # epochs that the trial may reach now
    start_epochs: int = 0  # epochs of the parent's state from which the trial started
    partition: int | None = None  # partition of the current visit
    slot: SlotId | None = None  # slot of the current visit
    partitions_left: int = 0  # partitions still to visit in this epoch
    metrics: tuple[dict[str, float], ...] = ()  # of own epochs; only the latest if there are many
    first_epoch: int = 1  # epoch of the first entry in `metrics`
    best_score: float | None = None  # over the trial's own epochs, as reported
    best_epoch: int = 0  # first epoch with this score; 0: none
    ended_at: tuple[Seconds, ...] = ()  # end times of the epochs in `metrics`
    state_bytes: int = 0  # size of the newest state; 0: not known yet


class SweepDetail(Reply, tag="client.sweep_detail.2"):
    """Reply to GetSweep."""

    summary: JobSummary
    spec: SweepSpec
    trials: tuple[TrialInfo, ...]  # a page
    trials_total: int
    best: int | None = None  # number of the best trial
    best_score: float | None = None  # as reported: the largest, or the smallest with mode min
    units_done: int = 0
    units_repeated: int = 0  # units repeated because a worker or states were lost
    units_left: int = 0  # units that are granted now or will certainly be granted
    unit_s: float | None = None  # recent mean duration of a unit
    expected_end: Seconds | None = None
    moved_bytes: int = 0  # bytes of states from other processes or nodes
    waited_s: float = 0.0  # time of waiting for moved states, sum over all units
    trained_s: float = 0.0  # training time, sum over all units


class SweepChanged(Reply, tag="client.sweep_changed.1"):
    """Reply to ChangeSweep: the change is durable."""

    job: JobId
    trial: int
    state: str


class LedgerUnit(msgspec.Struct, frozen=True, kw_only=True):
    """A valid unit, which is the training of one trial over one partition."""

    trial: int  # trial to which the unit belongs
    values_of: int  # trial that provided values and random seeds: `trial`, or a parent
    version: int  # version of the resulting state: number of the trial's units so far
    epoch: int
    partition: int
    digest: str  # SHA-256 of the resulting state
    node: NodeId
    slot: SlotId
    ended: Seconds
    seconds: float
    metrics: dict[str, float]
    samples: int


class Ledger(Reply, tag="client.ledger.2"):
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
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    cores: int = 0
    memory_bytes: int = 0
    reservations: tuple[Reservation, ...] = ()  # in order


class Nodes(Reply, tag="client.nodes.1"):
    """Reply to ListNodes: a page."""

    nodes: tuple[NodeInfo, ...]
    next: str = ""  # cursor of the next page; empty: last page


class EventsPage(Reply, tag="client.events_page.1"):
    """Reply to ReadEvents."""

    events: tuple[FeedEvent, ...]
    next_seq: int


class Failed(Reply, tag="client.failed.1"):
    """The request was not executed, and nothing changed."""

    code: str
    message: str
    hint: str
    field: str = ""
