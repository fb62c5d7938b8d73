"""Job model, with progress, accounting, manual override and batch limits."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from controlplane.core.commands import IllegalTransitionError
from controlplane.core.model.array import JobArray
from controlplane.core.model.job_phases import (
    ENDED,
    HOLDING,
    NEXT,
    JobStatus,
    JobTrigger,
    Phase,
    Queued,
    Starting,
)
from controlplane.core.model.rescale import Rescale
from controlplane.core.model.sweep import JobSweep
from controlplane.core.model.worker import Worker
from controlplane.policy.api import Reason
from schemas.ids import JobId, NodeId, Seconds, SlotId, Version, WorkerId, is_place
from schemas.jobs import JobSpec
from schemas.nodes import Group, Member, ResumePoint
from schemas.relations import WAITS_TO
from schemas.wire.agent import EpochReported
from schemas.wire.client import NodeCrowd, Size


class ManualOverride(msgspec.Struct, frozen=True, kw_only=True):
    """Size that an operator ordered for a job. During the override, the policy ignores the job."""

    user: str
    slots: int | None = None  # None: unchanged
    batch: int | None = None  # global, samples per step; None: unchanged
    on: tuple[str, ...] = ()  # exactly these slots
    paused: bool = False
    reserves_until: Seconds = Seconds(0.0)  # no policy gets the slots until then; 0: it may


MAX_FAMILY_CHARACTERS: Final = 500  # longer families are cut and end with a digest
MAX_SHOWN_PARENTS: Final = 3  # parents that a reason names
FAMILY_CACHE_SIZE: Final = 16_384
NUMBERED: Final = re.compile(r"[-_]*[0-9]+$")  # number at the end of a name


class Progress(msgspec.Struct, kw_only=True):
    """Training progress as of the last finished epoch."""

    checkpoint: ResumePoint | None = None
    epoch: int = 0  # last finished epoch
    epoch_at: Seconds = Seconds(0.0)  # when the last epoch was reported
    epoch_step: int = 0  # last step of the last epoch
    step: int = 0
    samples_done: int = 0  # Y_processed
    epoch_samples: int = 0  # ||D||
    untrained_samples: int = 0  # samples that finished epochs skipped, in total
    epoch_untrained: int = 0  # samples that the last epoch skipped
    stated_epochs: int | None = None  # limit of the stop rule, from the script or the job file
    samples_per_s: float = 0.0  # X_j
    lr: float | None = None
    train_loss: float | None = None
    loss_is_not_finite: bool = False  # in the last finished epoch
    metrics: dict[str, float] = {}
    noise_scale: float | None = None  # gradient noise scale, smoothed, samples
    noise_epochs: int = 0  # epochs that reported a noise scale
    last_batch: int = 0  # global batch of the last group that trained
    beside: tuple[NodeCrowd, ...] = ()  # jobs on the same nodes at the end of the last epoch
    fitting_batch: int | None = None  # largest batch per slot, after a larger one ran out of memory
    missing_epochs: list[int] = []  # finished epochs of the job that are not reported yet
    held_reports: list[EpochReported] = []  # late reports, kept until the next start epoch is known

    @property
    def epoch_length(self) -> int:
        """Samples that the next epoch will train if it skips as many samples as the last epoch."""
        return self.epoch_samples - self.epoch_untrained


class Accounting(msgspec.Struct, kw_only=True):
    """Time and slots used, up to the last change of the job's phase or group."""

    since: Seconds = Seconds(0.0)  # time of that change
    placed_at: Seconds = Seconds(0.0)  # when the job's slots last changed
    queued_s: Seconds = Seconds(0.0)  # time in phases without slots
    running_s: Seconds = Seconds(0.0)  # time in phases with slots
    slot_s: float = 0.0  # number of slots times seconds
    last_start_s: float | None = None  # seconds that the last start took, from the order
    rescales: int = 0  # changes of membership
    batch_changes: int = 0


class Attempts(msgspec.Struct, kw_only=True):
    """Numbers of failures, and the earliest times of the next attempts."""

    failures: int = 0  # failures of the script
    last_failure: str = ""  # which try failed last, and why
    losses: int = 0  # groups lost in a row without a finished epoch
    recoveries: int = 0  # recoveries in a row without a formed group
    changes: int = 0  # abandoned changes and recoveries after the last finished epoch
    next_start_at: Seconds = Seconds(0.0)  # earliest next start
    next_change_at: Seconds = Seconds(0.0)  # earliest retry of a growth or an operator's order
    crashes_by_node: dict[NodeId, int] = {}  # unexpected worker exits by node, in total
    blamed: dict[NodeId, int] = {}  # failures before training that may be a node's fault
    warned: Version = Version(0)  # group whose processes were warned of the end of their time
    exit_code: int | None = None  # exit code of the last decisive worker exit; None after a start


class SpeedPromise(msgspec.Struct, frozen=True, kw_only=True):
    """Speed that a policy expects of an ordered group, and the speed of the previous group."""

    version: Version
    speed_before: float  # samples per second, in the previous group
    speed_expected: float  # samples per second, in the ordered group


class PromisedEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Time by which a policy promised that the job will be done."""

    first: Seconds  # first promise; the actual end is compared with this time
    latest: Seconds  # latest expectation of the policy


class JobOwner(NamedTuple):
    """Owner of a job. Both fields are immutable."""

    user: str
    project: str  # the user's name if no project was given


class Job(msgspec.Struct, kw_only=True):
    """Job with the data that all phases share. `status` has the data of the current phase."""

    job: JobId
    spec: JobSpec
    snapshot: str
    user: str
    submitted_at: Seconds
    status: JobStatus = msgspec.field(default_factory=Queued)
    reason: str = "submitted"  # reason of the phase
    version: Version = Version(0)  # highest group version so far
    version_floor: Version = Version(0)  # all versions up to this number may have been used
    journal: str = ""  # id of the journal in which the job was accepted
    workers: dict[WorkerId, Worker] = {}  # workers with a process that may exist, of any version
    nodes: dict[NodeId, None] = {}  # all nodes that ever had a worker of the job
    override: ManualOverride | None = None  # an operator's order
    override_wait_reason: str = ""  # why the override is not carried out yet
    progress: Progress = msgspec.field(default_factory=Progress)
    accounting: Accounting = msgspec.field(default_factory=Accounting)
    attempts: Attempts = msgspec.field(default_factory=Attempts)
    promise: SpeedPromise | None = None  # for the last ordered group, until its speed is measured
    promised_end: PromisedEnd | None = None  # None: no promise
    changed_version: int = 0  # state version at the last change; older plans are refused
    sweep: JobSweep | None = None  # None: an ordinary job
    key: str = ""  # USER/KEY of the submission
    project: str = ""  # project as submitted; empty: the user's own project
    held_by: str = ""  # user who holds the job; empty: it is not held
    waits_for: dict[JobId, str] = {}  # parents that have not ended, with conditions on their ends
    starts_at: Seconds = Seconds(0.0)  # earliest start; 0: it has come, or there is none
    array: JobArray | None = None  # None: not an array

    @property
    def gated(self) -> bool:
        """True if the job must not be started. It keeps slots that it has.

        An array is never started, only its elements are.
        """
        stated = bool(self.held_by or self.waits_for or self.starts_at)
        return stated or self.array is not None

    @property
    def withheld(self) -> bool:
        """True if the job has no slots and must not get any. Policies do not see such a job."""
        return self.gated and self.status.group is None

    @property
    def gate_reason(self) -> Reason | None:
        """Why the job must not be started, or None if it may."""
        if self.held_by:
            return Reason("held", f"held by {self.held_by}")
        if self.waits_for:
            return Reason("after", f"waits for {_parents_text(self.waits_for)}")
        if self.starts_at:
            when = datetime.fromtimestamp(self.starts_at, UTC)
            text = f"starts at {when:%Y-%m-%dT%H:%M:%SZ} or later (not_before)"
            return Reason("not_before", text)
        if self.array is not None:
            return Reason("array", self.array.text)
        return None

    @property
    def next_version(self) -> Version:
        """Version of the next group, which no worker has ever had."""
        return Version(max(self.version, self.version_floor) + 1)

    @property
    def owner(self) -> JobOwner:
        """User and project that the job belongs to."""
        return JobOwner(self.user, self.project or self.user)

    @property
    def account(self) -> str:
        """Account that is charged for the job's slots, PROJECT/USER."""
        return f"{self.project or self.user}/{self.user}"

    @property
    def phase(self) -> Phase:
        """Phase of the job."""
        return self.status.phase

    @property
    def group(self) -> Group | None:
        """Group that trains or is being started."""
        return self.status.group

    @property
    def change(self) -> Rescale | None:
        """Change to the next group, if one is in progress."""
        return self.status.change

    def members(self) -> list[Member]:
        """Return the members of the current group and of the group that it changes to."""
        group, change = self.status.group, self.status.change
        members = list(group.members) if group else []
        if change is not None:
            known = {member.worker for member in members}
            members += [m for m in change.group.members if m.worker not in known]
        return members

    def group_workers(self) -> list[Worker]:
        """Return the workers of `group`, in rank order."""
        group = self.status.group
        return [self.workers[m.worker] for m in group.members] if group else []

    def held_slots(self) -> dict[SlotId, None]:
        """Return the slots of the group, with those that the job keeps empty."""
        group = self.status.group
        if group is None:
            return {}
        if not self.spec.rigid:
            return dict.fromkeys(member.slot for member in group.members)
        workers = self.group_workers()
        held = [slot for one in workers for slot in (one.slot, *one.beside)]
        return dict.fromkeys(slot for slot in held if not is_place(slot))

    @property
    def size(self) -> Size:
        """Size of the group that trains or is being started."""
        group = self.status.group
        if group is None:
            return Size()
        return Size(slots=tuple(m.slot for m in group.members), batch=group.global_batch)

    @property
    def family(self) -> str:
        """Name of jobs with the same script and model, which have similar speeds and lengths."""
        spec = self.spec
        if spec.family is not None:
            return f"{self.user}/{spec.family}"
        return _family(self.user, spec.name, spec.argv)

    @property
    def stop_samples(self) -> int | None:
        """Total samples of the job by its stop rule, or None if they depend on the training.

        Future epochs are expected to skip as many samples as the last epoch, because a script may
        leave its loop early in every epoch.
        """
        stop, progress = self.spec.stop, self.progress
        if self.sweep is not None:
            left = self.sweep.units_left * self.sweep.unit_samples
            return progress.samples_done + round(left) if left else None
        if stop is not None and stop.metric is not None:
            return None
        if stop is not None and stop.samples is not None:
            return stop.samples
        epochs = stop.epochs if stop is not None else progress.stated_epochs
        if not epochs or not progress.epoch_samples:
            return None
        to_come = max(0, epochs - progress.epoch) * progress.epoch_untrained
        return epochs * progress.epoch_samples - progress.untrained_samples - to_come

    @property
    def ended(self) -> bool:
        """True if the job is in a final phase."""
        return self.status.phase in ENDED

    @property
    def failing_is_final(self) -> bool:
        """True if the script has failed more often than its retries allow."""
        return self.attempts.failures > self.spec.retries


def _parents_text(parents: Mapping[JobId, str]) -> str:
    shown = [f"{job} {WAITS_TO[how]}" for job, how in islice(parents.items(), MAX_SHOWN_PARENTS)]
    more = len(parents) - len(shown)
    return ", ".join([*shown, *([f"and {more} more"] if more else [])])


@lru_cache(FAMILY_CACHE_SIZE)  # called at each end of an epoch for all jobs on the same nodes
def _family(user: str, name: str, argv: tuple[str, ...]) -> str:
    base_name = NUMBERED.sub("", name) or name
    full_name = " ".join([f"{user}/{base_name}", *argv])
    if len(full_name) <= MAX_FAMILY_CHARACTERS:
        return full_name
    digest = hashlib.sha256(full_name.encode(errors="surrogatepass")).hexdigest()
    return f"{full_name[:MAX_FAMILY_CHARACTERS]} {digest[:16]}"


def number_of(job: JobId) -> int:
    """Return the number at the end of a job's name (NAME-NUMBER). The first accepted job has 1."""
    return int(job.rpartition("-")[2])


def advance(job: Job, trigger: JobTrigger, status: JobStatus, reason: str, now: Seconds) -> None:
    """Move `job` to `status` along the transition table, and update its accounts up to `now`.

    Args:
        reason: why the job moves, which is shown to users.

    Raises:
        IllegalTransitionError: if the table has no transition to the phase of `status`.
    """
    phase = job.status.phase
    if NEXT.get((phase, trigger)) is not status.phase:
        raise IllegalTransitionError(job.job, phase.value, trigger.value, job.reason)
    _settle_accounts(job, now)
    begins = isinstance(job.status, Starting)
    if begins or _slots_of(job.status.group) != _slots_of(status.group):
        job.accounting.placed_at = now
    job.status, job.reason = status, reason


def _settle_accounts(job: Job, now: Seconds) -> None:
    """Add the time since the last change of phase or group to the job's accounting."""
    account = job.accounting
    queued_s, running_s = times(job, now)
    account.slot_s += (running_s - account.running_s) * len(job.held_slots())
    account.queued_s, account.running_s, account.since = queued_s, running_s, now


def _slots_of(group: Group | None) -> frozenset[SlotId]:
    return frozenset(member.slot for member in group.members) if group else frozenset()


def times(job: Job, now: Seconds) -> tuple[Seconds, Seconds]:
    """Return for how many seconds up to `now` the job had no slots, and for how many it had."""
    account, phase = job.accounting, job.status.phase
    elapsed = max(0.0, now - account.since)
    if phase in ENDED:
        return account.queued_s, account.running_s
    if phase in HOLDING:
        return account.queued_s, Seconds(account.running_s + elapsed)
    return Seconds(account.queued_s + elapsed), account.running_s


# docs/batch-limit.md has the reasons for these values and the results of trainings.
MIN_STEPS: Final = 10  # steps per epoch; with fewer steps, each is a large part of the training
MIN_EFFICIENCY: Final = 0.9  # least value of a sample, relative to a sample in the first batch
TRUSTED_EPOCHS: Final = 2  # epochs with a noise scale before it is used, as first values are rough
OUT_OF_MEMORY: Final = ("out of memory", "outofmemory", "can't allocate memory", "memoryerror")
PER_DOUBLING: Final = 2  # number of limits per doubling, small so that the limit changes rarely


def batch_limit(job: Job) -> int:
    """Return the largest global batch that a policy may choose now, in samples per step.

    If the user set a limit, return that limit. Otherwise return the largest batch that fits the
    job's slots in one pass and leaves at least `MIN_STEPS` steps in an epoch. By the gradient noise
    scale, a sample in this batch is worth at least `MIN_EFFICIENCY` of a sample in the first batch.
    The result is never below the first batch.
    """
    spec, progress = job.spec, job.progress
    if not spec.batch_limit_is_auto:
        return spec.batch_limit
    by_memory = local_limit(job) * spec.slots[1]
    by_data = progress.epoch_samples // MIN_STEPS
    phi = progress.noise_scale if progress.noise_epochs >= TRUSTED_EPOCHS else None
    by_noise = noise_limit(spec.batch_size, phi)
    return max(spec.batch_size, min(spec.batch_limit, by_memory, by_data, by_noise))


def noise_limit(first: int, noise_scale: float | None) -> int:
    """Return, rounded down, the batch m where (phi + m0) / (phi + m) falls to `MIN_EFFICIENCY`.

    Args:
        first: m0, the job's first batch, samples per step.
        noise_scale: phi, samples. If it is None (not measured), the first batch is returned.

    Returns:
        The first batch times a whole power of the square root of 2, rounded down, samples per step.
    """
    if noise_scale is None:
        return first
    most = (noise_scale + first) / MIN_EFFICIENCY - noise_scale
    steps = math.floor(PER_DOUBLING * math.log2(max(most / first, 1.0)))
    return int(first * 2.0 ** (steps / PER_DOUBLING))


def local_limit(job: Job) -> int:
    """Return the largest batch of one slot that a policy may choose now, in samples per step.

    A batch that ran out of memory lowers the limit that the user stated.
    """
    stated, fits = job.spec.local_limit, job.progress.fitting_batch
    return stated if fits is None else min(stated, fits)


def lower_local_limit(job: Job, error: str) -> bool:
    """Lower the job's batch limit per slot if a batch above the first batch ran out of memory.

    Return True if the limit was lowered, so that a retry uses a smaller batch. `error` is the
    script's error message.
    """
    group = job.group
    if group is None or not any(said in error.lower() for said in OUT_OF_MEMORY):
        return False
    largest = max(member.local_batch for member in group.members)
    in_passes = job.spec.pass_limit < job.spec.batch_size
    if in_passes or largest <= job.spec.batch_size:  # the user states that this batch fits
        return False
    job.progress.fitting_batch = max(job.spec.batch_size, largest // 2)
    return True
