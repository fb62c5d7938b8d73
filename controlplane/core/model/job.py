"""Job phases and their transition table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Final

import msgspec

from controlplane.core.errors import IllegalTransitionError
from controlplane.core.model.rescale import Hand, Rescale
from controlplane.core.model.worker import Worker
from schemas.groups import Group, Member, ResumePoint
from schemas.ids import JobId, NodeId, Seconds, Version, WorkerId
from schemas.jobs import JobSpec
from schemas.messages.agent import PREPARE
from schemas.messages.client import Change, Decision, EpochInfo, Size, VersionInfo
from schemas.messages.feed import Detail

KEPT_EPOCHS: Final = 1000
KEPT_CHANGES: Final = 500
NUMBERED: Final = re.compile(r"[-_]*[0-9]+$")  # the end of a name that only counts


class Phase(Enum):
    """Where a job stands; the value is what users see."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    RESCALING = "rescaling"  # its group changes; it still trains
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobTrigger(Enum):
    """What can happen to a job as a whole."""

    GROUP_ORDERED = "group ordered"
    GROUP_FORMED = "group formed"
    RESCALE_ORDERED = "re-scale ordered"
    RESCALE_ABANDONED = "re-scale abandoned"  # the old group goes on
    MEMBER_LOST = "member lost"  # and others have the state
    SUSPENDED = "suspended"  # its state is in a checkpoint, its workers leave
    GROUP_LOST = "group lost"  # a worker or node is gone, through no fault of the script
    SCRIPT_FAILED = "script failed"  # and may be tried again
    GAVE_UP = "gave up"  # no retry is left
    FINISHED = "finished"
    CANCELLED = "cancelled"


ENDED: Final = frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED})
HOLDING: Final = frozenset({Phase.STARTING, Phase.RUNNING, Phase.RESCALING})

NEXT: Final[Mapping[tuple[Phase, JobTrigger], Phase]] = {
    (Phase.QUEUED, JobTrigger.GROUP_ORDERED): Phase.STARTING,
    (Phase.QUEUED, JobTrigger.CANCELLED): Phase.CANCELLED,
    (Phase.STARTING, JobTrigger.GROUP_FORMED): Phase.RUNNING,
    (Phase.STARTING, JobTrigger.GROUP_LOST): Phase.PAUSED,
    (Phase.STARTING, JobTrigger.SCRIPT_FAILED): Phase.PAUSED,
    (Phase.STARTING, JobTrigger.GAVE_UP): Phase.FAILED,
    (Phase.STARTING, JobTrigger.FINISHED): Phase.SUCCEEDED,  # a script that never formed a group
    (Phase.STARTING, JobTrigger.CANCELLED): Phase.CANCELLED,
    (Phase.STARTING, JobTrigger.SUSPENDED): Phase.PAUSED,  # paused before it trained
    (Phase.RUNNING, JobTrigger.RESCALE_ORDERED): Phase.RESCALING,
    (Phase.RUNNING, JobTrigger.MEMBER_LOST): Phase.RESCALING,
    (Phase.RUNNING, JobTrigger.GROUP_LOST): Phase.PAUSED,
    (Phase.RUNNING, JobTrigger.SCRIPT_FAILED): Phase.PAUSED,
    (Phase.RUNNING, JobTrigger.GAVE_UP): Phase.FAILED,
    (Phase.RUNNING, JobTrigger.FINISHED): Phase.SUCCEEDED,
    (Phase.RUNNING, JobTrigger.CANCELLED): Phase.CANCELLED,
    (Phase.RESCALING, JobTrigger.GROUP_FORMED): Phase.RUNNING,
    (Phase.RESCALING, JobTrigger.RESCALE_ABANDONED): Phase.RUNNING,
    (Phase.RESCALING, JobTrigger.MEMBER_LOST): Phase.RESCALING,
    (Phase.RESCALING, JobTrigger.SUSPENDED): Phase.PAUSED,
    (Phase.RESCALING, JobTrigger.GROUP_LOST): Phase.PAUSED,
    (Phase.RESCALING, JobTrigger.SCRIPT_FAILED): Phase.PAUSED,
    (Phase.RESCALING, JobTrigger.GAVE_UP): Phase.FAILED,
    (Phase.RESCALING, JobTrigger.FINISHED): Phase.SUCCEEDED,
    (Phase.RESCALING, JobTrigger.CANCELLED): Phase.CANCELLED,
    (Phase.PAUSED, JobTrigger.GROUP_ORDERED): Phase.STARTING,
    (Phase.PAUSED, JobTrigger.CANCELLED): Phase.CANCELLED,
}


class Job(msgspec.Struct, kw_only=True):
    """Everything the controller knows of one job."""

    job: JobId
    spec: JobSpec
    snapshot: str
    user: str
    submitted_at: Seconds
    phase: Phase = Phase.QUEUED
    since: Seconds = Seconds(0.0)  # when it entered `phase`
    why: str = "submitted"
    version: Version = Version(0)  # the highest ever used
    stage: int = PREPARE  # of `version`
    group: Group | None = None  # the one that trains, or that is started
    change: Rescale | None = None  # to the next one
    hand: Hand | None = None  # an operator's
    retry_at: Seconds = Seconds(0.0)  # no growth and no operator's order is tried again before
    hand_waits: str = ""  # why the hand's order is not followed yet
    tries: int = 0  # changes that were abandoned or recovered since the last finished epoch
    recoveries: int = 0  # in a row, without a group between
    workers: dict[WorkerId, Worker] = {}  # of every version whose process may still exist
    versions: list[VersionInfo] = []  # every group that was ordered
    nodes: dict[NodeId, None] = {}  # those that were ever told of it
    ran: dict[WorkerId, NodeId] = {}  # every process that existed, and where
    checkpoint: ResumePoint | None = None
    epoch: int = 0  # finished
    step: int = 0
    samples_done: int = 0
    epoch_samples: int = 0
    epochs_stated: int | None = None  # of the stop rule in force
    samples_per_s: float = 0.0
    lr: float | None = None
    train_loss: float | None = None
    metrics: dict[str, float] = {}
    epochs: list[EpochInfo] = []
    finished_why: str = ""
    script_error: str = ""
    failures: int = 0  # of the script
    losses: int = 0  # of its groups, in a row without a finished epoch between
    suspended: bool = False  # its last group was paused
    exit_code: int | None = None
    ready_at: Seconds = Seconds(0.0)
    queued_s: Seconds = Seconds(0.0)  # in phases that hold no slot, up to `since`
    running_s: Seconds = Seconds(0.0)  # in phases that hold slots, up to `since`
    slot_s: float = 0.0  # slots held times seconds, up to `since`
    rescales: int = 0
    batch_changes: int = 0
    history: list[Change] = []
    changed_at: int = 0  # version of the state; plans that are older leave the job alone
    started_s: float | None = None  # what its last start took, from the order on
    epoch_at: Seconds = Seconds(0.0)  # when the last epoch was reported
    epoch_step: int = 0  # where it ended
    noise_scale: float | None = None  # of its gradients, the last that was measured, samples
    noise_epochs: int = 0  # that told of the noise scale
    last_batch: int = 0  # global, of the last group that trained
    decisions: list[Decision] = []  # every group that was ordered, and why

    def members(self) -> list[Member]:
        """Of the group that trains, and of the one that it changes to."""
        members = list(self.group.members) if self.group else []
        if self.change is not None:
            known = {member.worker for member in members}
            members += [m for m in self.change.group.members if m.worker not in known]
        return members

    def group_workers(self) -> list[Worker]:
        """The processes of `group`, in rank order."""
        return [self.workers[m.worker] for m in self.group.members] if self.group else []

    @property
    def size(self) -> Size:
        """Of the group that trains, or that is started."""
        members = self.group.members if self.group else ()
        batch = self.group.global_batch if self.group else 0
        return Size(slots=tuple(member.slot for member in members), batch=batch)

    @property
    def family(self) -> str:
        """Jobs of the same script and model: what one teaches of speed and length, others use."""
        spec = self.spec
        if spec.family is not None:
            return f"{self.user}/{spec.family}"
        stem = NUMBERED.sub("", spec.name) or spec.name
        return " ".join([f"{self.user}/{stem}", spec.script, *spec.args])

    @property
    def stop_samples(self) -> int | None:
        """The work that was stated, in samples since the job began; None when it depends."""
        stop = self.spec.stop
        if stop is not None and stop.metric is not None:
            return None
        if stop is not None and stop.samples is not None:
            return stop.samples
        epochs = stop.epochs if stop is not None else self.epochs_stated
        return epochs * self.epoch_samples if epochs and self.epoch_samples else None

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.phase in ENDED

    @property
    def failing_is_final(self) -> bool:
        """Whether no retry is left for a failure of the script."""
        return self.failures > self.spec.retries


def advance(
    job: Job, trigger: JobTrigger, why: str, now: Seconds, detail: Detail | None = None
) -> None:
    """Move `job` along the table and write its history; an arrow not drawn is an error."""
    try:
        phase = NEXT[job.phase, trigger]
    except KeyError:
        story = "; ".join(f"{change.to_state}: {change.why}" for change in job.history[-5:])
        raise IllegalTransitionError(job.job, job.phase.value, trigger.value, story) from None
    settle_time(job, now)
    change = Change(
        time=now, from_state=job.phase.value, to_state=phase.value, why=why, detail=detail or {}
    )
    job.history = [*job.history, change][-KEPT_CHANGES:]
    job.phase, job.since, job.why = phase, now, why


def settle_time(job: Job, now: Seconds) -> None:
    """Add the time since the last change to what the job waited or ran."""
    queued_s, running_s = times(job, now)
    job.slot_s += (running_s - job.running_s) * (len(job.group.members) if job.group else 0)
    job.queued_s, job.running_s, job.since = queued_s, running_s, now


def times(job: Job, now: Seconds) -> tuple[Seconds, Seconds]:
    """Seconds without slots and with slots, up to `now`."""
    elapsed = max(0.0, now - job.since)
    if job.ended:
        return job.queued_s, job.running_s
    if job.phase in HOLDING:
        return job.queued_s, Seconds(job.running_s + elapsed)
    return Seconds(job.queued_s + elapsed), job.running_s
