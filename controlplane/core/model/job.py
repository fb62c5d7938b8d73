"""Everything the controller knows of one job.

What an operator ordered for a job: the policy leaves it alone meanwhile.

How far a policy may raise a job's batch, where its user leaves that to the cluster.
"""

from __future__ import annotations

import hashlib
import math
import re
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from controlplane.core.commands import IllegalTransitionError
from controlplane.core.model.job_phases import (
    ENDED,
    HOLDING,
    NEXT,
    JobStatus,
    JobTrigger,
    Phase,
    Queued,
    Rescaling,
    Running,
    Starting,
    WithGroup,
)
from controlplane.core.model.rescale import Rescale
from controlplane.core.model.sweep import JobSweep
from controlplane.core.model.worker import Worker
from schemas.ids import JobId, NodeId, Seconds, SlotId, Version, WorkerId
from schemas.jobs import JobSpec
from schemas.nodes import Group, Member, ResumePoint
from schemas.wire.agent import EpochReported
from schemas.wire.client import NodeCrowd, Size


class ManualOverride(msgspec.Struct, frozen=True, kw_only=True):
    """The size that somebody asked for; None where it stays as it is."""

    user: str
    slots: int | None = None  # None: whatever it had
    batch: int | None = None  # global, samples per step; None: as it is
    on: tuple[str, ...] = ()  # exactly these slots
    paused: bool = False


CORRECTION: Final = "correction"  # of a promised speed, among the numbers of its decision
LONGEST_FAMILY: Final = (
    500  # characters: it is told with every report; the rest counts by its digest
)
KEPT_FAMILIES: Final = 16_384
NUMBERED: Final = re.compile(r"[-_]*[0-9]+$")  # the end of a name that only counts


class Progress(msgspec.Struct, kw_only=True):
    """How far its training came, as its last finished epoch reported."""

    checkpoint: ResumePoint | None = None
    epoch: int = 0  # finished
    epoch_at: Seconds = Seconds(0.0)  # when the last epoch was reported
    epoch_step: int = 0  # where it ended
    step: int = 0
    samples_done: int = 0  # Y_processed
    epoch_samples: int = 0  # ||D||
    left_out: int = 0  # samples that finished epochs did not train, all in all
    epoch_left_out: int = 0  # and the last of them
    epochs_stated: int | None = None  # of the stop rule in force
    samples_per_s: float = 0.0  # X_j
    lr: float | None = None
    train_loss: float | None = None
    metrics: dict[str, float] = {}
    noise_scale: float | None = None  # of its gradients, smoothed, samples
    noise_epochs: int = 0  # that reported a noise scale
    last_batch: int = 0  # global, of the last group that trained
    beside: tuple[NodeCrowd, ...] = ()  # who shared its nodes when its last epoch ended
    fits: int | None = None  # samples on one slot, at most, since more ran out of memory
    unheard: list[int] = []  # epochs that it goes on from, whose reports are not here yet
    late: list[EpochReported] = []  # of a lost group, until it is known what the next goes on from

    @property
    def epoch_length(self) -> int:
        """Samples that the next epoch will train, if it ends where the last one did."""
        return self.epoch_samples - self.epoch_left_out


class Accounting(msgspec.Struct, kw_only=True):
    """What it waited and used, up to the last change of its phase or group."""

    since: Seconds = Seconds(0.0)  # of that change
    placed_at: Seconds = Seconds(0.0)  # since when it has the slots that it has, or none
    queued_s: Seconds = Seconds(0.0)  # in phases that hold no slot
    running_s: Seconds = Seconds(0.0)  # in phases that hold slots
    slot_s: float = 0.0  # slots held times seconds
    started_s: float | None = None  # what its last start took, from the order on
    rescales: int = 0  # changes of membership
    batch_changes: int = 0


class Attempts(msgspec.Struct, kw_only=True):
    """What went wrong, and when the next try may be."""

    failures: int = 0  # of the script
    losses: int = 0  # of its groups, in a row without a finished epoch between
    recoveries: int = 0  # in a row, without a group between
    changes: int = 0  # that were abandoned or recovered from since the last finished epoch
    start_at: Seconds = Seconds(0.0)  # not to be started before
    change_at: Seconds = Seconds(0.0)  # no growth and no operator's order is tried again before
    died_on: dict[NodeId, int] = {}  # workers that ended unasked there, ever
    exit_code: int | None = None  # of the last worker that decided something; None since a start


class SpeedPromise(msgspec.Struct, frozen=True, kw_only=True):
    """The speed that a policy expected of a group, against the one before."""

    version: Version
    now: float  # samples per second in the group before
    then: float  # in the group that was ordered
    correction: float | None = None  # factor that its policy put on the expected gain


class PromisedEnd(msgspec.Struct, frozen=True, kw_only=True):
    """By when its policy said that a job will be done."""

    first: Seconds  # the promise: what came is held against it
    latest: Seconds  # what the policy expects by now


class JobOwner(NamedTuple):
    """Whose a job is; both are the same for ever."""

    user: str
    project: str  # the user's own name, if none was named


class Job(msgspec.Struct, kw_only=True):
    """What all phases share; `status` has the rest."""

    job: JobId
    spec: JobSpec
    snapshot: str
    user: str
    submitted_at: Seconds
    status: JobStatus = msgspec.field(default_factory=Queued)
    why: str = "submitted"  # it is in this phase
    version: Version = Version(0)  # the highest ever used
    workers: dict[WorkerId, Worker] = {}  # of every version whose process may still exist
    nodes: dict[NodeId, None] = {}  # those that ever had a worker of it
    override: ManualOverride | None = None  # an operator's order
    override_waits: str = ""  # why that is not followed yet
    progress: Progress = msgspec.field(default_factory=Progress)
    accounting: Accounting = msgspec.field(default_factory=Accounting)
    attempts: Attempts = msgspec.field(default_factory=Attempts)
    promise: SpeedPromise | None = None  # of the group ordered last, until it is measured
    promised_end: PromisedEnd | None = None  # None: nobody said
    changed_at: int = 0  # version of the state; plans that are older leave the job alone
    sweep: JobSweep | None = None  # None: an ordinary job
    key: str = ""  # USER/KEY of its submission
    project: str = ""  # as it was submitted; empty: its user's own

    @property
    def owner(self) -> JobOwner:
        """Whose it is, and who else may see it."""
        return JobOwner(self.user, self.project or self.user)

    @property
    def phase(self) -> Phase:
        """Where it stands."""
        return self.status.phase

    @property
    def group(self) -> Group | None:
        """The group that trains, or that is started."""
        return self.status.group

    @property
    def change(self) -> Rescale | None:
        """The change to the next group, if one is under way."""
        return self.status.change

    def members(self) -> list[Member]:
        """Of the group that trains, and of the one that it changes to."""
        group, change = self.status.group, self.status.change
        members = list(group.members) if group else []
        if change is not None:
            known = {member.worker for member in members}
            members += [m for m in change.group.members if m.worker not in known]
        return members

    def group_workers(self) -> list[Worker]:
        """The processes of `group`, in rank order."""
        group = self.status.group
        return [self.workers[m.worker] for m in group.members] if group else []

    @property
    def size(self) -> Size:
        """Of the group that trains, or that is started."""
        group = self.status.group
        if group is None:
            return Size()
        return Size(slots=tuple(m.slot for m in group.members), batch=group.global_batch)

    @property
    def family(self) -> str:
        """Jobs of the same script and model: what one teaches of speed and length, others use."""
        spec = self.spec
        if spec.family is not None:
            return f"{self.user}/{spec.family}"
        return _family(self.user, spec.name, spec.script, spec.args)

    @property
    def stop_samples(self) -> int | None:
        """The work that was stated, in samples since the job began; None when it depends.

        Epochs that are to come are taken for as long as the last one was: a script may leave its
        loop early in each.
        """
        stop, progress = self.spec.stop, self.progress
        if self.sweep is not None:
            left = self.sweep.units_left * self.sweep.unit_samples
            return progress.samples_done + round(left) if left else None
        if stop is not None and stop.metric is not None:
            return None
        if stop is not None and stop.samples is not None:
            return stop.samples
        epochs = stop.epochs if stop is not None else progress.epochs_stated
        if not epochs or not progress.epoch_samples:
            return None
        to_come = max(0, epochs - progress.epoch) * progress.epoch_left_out
        return epochs * progress.epoch_samples - progress.left_out - to_come

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.status.phase in ENDED

    @property
    def failing_is_final(self) -> bool:
        """Whether no retry is left for a failure of the script."""
        return self.attempts.failures > self.spec.retries


@lru_cache(KEPT_FAMILIES)  # asked for of every neighbour at the end of every epoch
def _family(user: str, name: str, script: str, args: tuple[str, ...]) -> str:
    stem = NUMBERED.sub("", name) or name
    whole = " ".join([f"{user}/{stem}", script, *args])
    if len(whole) <= LONGEST_FAMILY:
        return whole
    digest = hashlib.sha256(whole.encode(errors="surrogatepass")).hexdigest()
    return f"{whole[:LONGEST_FAMILY]} {digest[:16]}"


def number_of(job: JobId) -> int:
    """Its place among all jobs that were accepted, from 1.

    Args:
        job: NAME-NUMBER.
    """
    return int(job.rpartition("-")[2])


def advance(job: Job, trigger: JobTrigger, status: JobStatus, why: str, now: Seconds) -> None:
    """Move `job` along the table.

    Args:
        job: it is changed in place; its accounts are settled up to `now`.
        why: in words, for users.
        now: when.

    Raises:
        IllegalTransitionError: if the arrow is not drawn, or leads to another phase than `status`.
    """
    phase = job.status.phase
    if NEXT.get((phase, trigger)) is not status.phase:
        raise IllegalTransitionError(job.job, phase.value, trigger.value, job.why)
    _settle_accounts(job, now)
    begins = isinstance(job.status, Starting)
    if begins or _slots_of(job.status.group) != _slots_of(status.group):
        job.accounting.placed_at = now
    job.status, job.why = status, why


def with_group(job: Job, group: Group) -> WithGroup:
    """The status of a job that trains, the same but for its group.

    Args:
        job: it is left as it is.
        group: takes the place of the one that trains or is started.

    Raises:
        IllegalTransitionError: if it has no group.
    """
    status = job.status
    if isinstance(status, Starting | Running | Rescaling):
        return msgspec.structs.replace(status, group=group)
    raise IllegalTransitionError(job.job, job.phase.value, "another group", job.why)


def _settle_accounts(job: Job, now: Seconds) -> None:
    """Add the time since the last change of its phase or group to what the job waited or used."""
    account, group = job.accounting, job.status.group
    queued_s, running_s = times(job, now)
    account.slot_s += (running_s - account.running_s) * (len(group.members) if group else 0)
    account.queued_s, account.running_s, account.since = queued_s, running_s, now


def _slots_of(group: Group | None) -> frozenset[SlotId]:
    return frozenset(member.slot for member in group.members) if group else frozenset()


def times(job: Job, now: Seconds) -> tuple[Seconds, Seconds]:
    """Seconds without slots and with slots.

    Args:
        now: up to when they are counted.
    """
    account, phase = job.accounting, job.status.phase
    elapsed = max(0.0, now - account.since)
    if phase in ENDED:
        return account.queued_s, account.running_s
    if phase in HOLDING:
        return account.queued_s, Seconds(account.running_s + elapsed)
    return Seconds(account.queued_s + elapsed), account.running_s


# docs/batch-limit.md says how these were chosen, and what trainings came to with them.
LEAST_STEPS: Final = 10  # of an epoch: fewer, and a step is a large part of what is learnt
LEAST_EFFICIENCY: Final = 0.9  # of a sample, against one in the first batch
TRUSTED_EPOCHS: Final = 2  # that measured the noise scale: the first says little
OUT_OF_MEMORY: Final = ("out of memory", "outofmemory", "can't allocate memory", "memoryerror")
PER_DOUBLING: Final = 2  # steps of the limit, so that it does not move with every epoch


def batch_limit(job: Job) -> int:
    """The largest global batch that a policy may choose for `job` now, samples per step.

    What its user stated. Where nothing is: as much as fits its slots in one pass, but at least
    `LEAST_STEPS` steps of an epoch, and no further than where the gradient noise scale says that a
    sample is still worth `LEAST_EFFICIENCY` of one in the first batch. It is never below that one.

    Args:
        job: in any phase; what its epochs reported counts.
    """
    spec, progress = job.spec, job.progress
    if not spec.batch_limit_is_left_open:
        return spec.batch_limit
    by_memory = local_limit(job) * spec.slots[1]
    by_data = progress.epoch_samples // LEAST_STEPS
    phi = progress.noise_scale if progress.noise_epochs >= TRUSTED_EPOCHS else None
    by_noise = noise_limit(spec.batch_size, phi)
    return max(spec.batch_size, min(spec.batch_limit, by_memory, by_data, by_noise))


def noise_limit(first: int, noise_scale: float | None) -> int:
    """The batch m at which (phi + m0) / (phi + m) has fallen to `LEAST_EFFICIENCY`, coarsely.

    Args:
        first: m0, the job's first batch, samples per step.
        noise_scale: phi, samples; None: it was not measured, and the first batch is kept.

    Returns:
        Samples per step: the first batch times a whole power of the square root of 2, rounded down.
    """
    if noise_scale is None:
        return first
    most = (noise_scale + first) / LEAST_EFFICIENCY - noise_scale
    steps = math.floor(PER_DOUBLING * math.log2(max(most / first, 1.0)))
    return int(first * 2.0 ** (steps / PER_DOUBLING))


def local_limit(job: Job) -> int:
    """The largest batch of one slot that a policy may choose for `job` now, samples per step.

    Args:
        job: in any phase. What ran out of memory lowers what its user stated.
    """
    stated, fits = job.spec.local_limit, job.progress.fits
    return stated if fits is None else min(stated, fits)


def lower_local_limit(job: Job, error: str) -> bool:
    """Lower what fits a slot, if `job` failed because a share above its first batch did not fit.

    Args:
        job: whose script failed; `fits` of its progress is changed in place.
        error: in the script's words.

    Returns:
        Whether it was lowered, so that the job may be tried again with less.
    """
    group = job.group
    if group is None or not any(said in error.lower() for said in OUT_OF_MEMORY):
        return False
    largest = max(member.local_batch for member in group.members)
    in_passes = job.spec.pass_limit < job.spec.batch_size
    if in_passes or largest <= job.spec.batch_size:  # its user says that so much fits
        return False
    job.progress.fits = max(job.spec.batch_size, largest // 2)
    return True
