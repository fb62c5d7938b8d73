"""Job phases and their transition table."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

import msgspec

from controlplane.core.errors import IllegalTransitionError
from controlplane.core.worker import Worker
from schemas.groups import Group, ResumePoint
from schemas.ids import JobId, NodeId, Seconds, Version, WorkerId
from schemas.jobs import JobSpec
from schemas.messages.agent import PREPARE
from schemas.messages.client import Change, EpochInfo, VersionInfo
from schemas.messages.feed import Detail

KEPT_EPOCHS: Final = 1000
KEPT_CHANGES: Final = 500


class Phase(Enum):
    """Where a job stands; the value is what users see."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Turn(Enum):
    """What can happen to a job as a whole."""

    GROUP_ORDERED = "group ordered"
    GROUP_FORMED = "group formed"
    GROUP_LOST = "group lost"  # a worker or node is gone, through no fault of the script
    SCRIPT_FAILED = "script failed"  # and may be tried again
    GAVE_UP = "gave up"  # no retry is left
    FINISHED = "finished"
    CANCELLED = "cancelled"


ENDED: Final = frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED})
HOLDING: Final = frozenset({Phase.STARTING, Phase.RUNNING})

NEXT: Final[Mapping[tuple[Phase, Turn], Phase]] = {
    (Phase.QUEUED, Turn.GROUP_ORDERED): Phase.STARTING,
    (Phase.QUEUED, Turn.CANCELLED): Phase.CANCELLED,
    (Phase.STARTING, Turn.GROUP_FORMED): Phase.RUNNING,
    (Phase.STARTING, Turn.GROUP_LOST): Phase.PAUSED,
    (Phase.STARTING, Turn.SCRIPT_FAILED): Phase.PAUSED,
    (Phase.STARTING, Turn.GAVE_UP): Phase.FAILED,
    (Phase.STARTING, Turn.FINISHED): Phase.SUCCEEDED,  # a script that never formed a group
    (Phase.STARTING, Turn.CANCELLED): Phase.CANCELLED,
    (Phase.RUNNING, Turn.GROUP_LOST): Phase.PAUSED,
    (Phase.RUNNING, Turn.SCRIPT_FAILED): Phase.PAUSED,
    (Phase.RUNNING, Turn.GAVE_UP): Phase.FAILED,
    (Phase.RUNNING, Turn.FINISHED): Phase.SUCCEEDED,
    (Phase.RUNNING, Turn.CANCELLED): Phase.CANCELLED,
    (Phase.PAUSED, Turn.GROUP_ORDERED): Phase.STARTING,
    (Phase.PAUSED, Turn.CANCELLED): Phase.CANCELLED,
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
    group: Group | None = None
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
    losses: int = 0  # of its workers, in a row without a finished epoch between
    exit_code: int | None = None
    ready_at: Seconds = Seconds(0.0)
    queued_s: Seconds = Seconds(0.0)  # in phases that hold no slot, up to `since`
    running_s: Seconds = Seconds(0.0)  # in phases that hold slots, up to `since`
    rescales: int = 0
    batch_changes: int = 0
    history: list[Change] = []

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.phase in ENDED

    @property
    def failing_is_final(self) -> bool:
        """Whether no retry is left for a failure of the script."""
        return self.failures > self.spec.retries


def advance(job: Job, turn: Turn, why: str, now: Seconds, detail: Detail | None = None) -> None:
    """Move `job` along the table and write its history; an arrow not drawn is an error."""
    try:
        phase = NEXT[job.phase, turn]
    except KeyError:
        story = "; ".join(f"{change.to_state}: {change.why}" for change in job.history[-5:])
        raise IllegalTransitionError(job.job, job.phase.value, turn.value, story) from None
    settle_time(job, now)
    change = Change(
        time=now, from_state=job.phase.value, to_state=phase.value, why=why, detail=detail or {}
    )
    job.history = [*job.history, change][-KEPT_CHANGES:]
    job.phase, job.since, job.why = phase, now, why


def settle_time(job: Job, now: Seconds) -> None:
    """Add the time since the last change to what the job waited or ran."""
    queued_s, running_s = times(job, now)
    job.queued_s, job.running_s, job.since = queued_s, running_s, now


def times(job: Job, now: Seconds) -> tuple[Seconds, Seconds]:
    """Seconds without slots and with slots, up to `now`."""
    elapsed = max(0.0, now - job.since)
    if job.ended:
        return job.queued_s, job.running_s
    if job.phase in HOLDING:
        return job.queued_s, Seconds(job.running_s + elapsed)
    return Seconds(job.queued_s + elapsed), job.running_s
