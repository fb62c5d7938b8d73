"""Job phases, the data of each phase, and the transition table."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import ClassVar, Final

import msgspec

from controlplane.core.model.rescale import Rescale
from schemas.nodes import Group


class Phase(Enum):
    """Phase of a job. The value is shown to users."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    RESCALING = "rescaling"  # the group changes while the job trains
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"  # by the policy, before the job ever started


class JobTrigger(Enum):
    """Events that move a job along its table."""

    GROUP_ORDERED = "group ordered"
    GROUP_FORMED = "group formed"
    RESCALE_ORDERED = "re-scale ordered"
    RESCALE_ABANDONED = "re-scale abandoned"  # the old group continues
    MEMBER_LOST = "member lost"  # other members have the state
    SUSPENDED = "suspended"  # the state is in a checkpoint and the workers leave
    GROUP_LOST = "group lost"  # a worker or node was lost, through no fault of the script
    SCRIPT_FAILED = "script failed"  # retries are left
    GAVE_UP = "gave up"  # no retry is left
    FINISHED = "finished"
    CANCELLED = "cancelled"
    REJECTED = "rejected"  # the result is not worth slots that other jobs need


ENDED: Final = frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED, Phase.REJECTED})
HOLDING: Final = frozenset({Phase.STARTING, Phase.RUNNING, Phase.RESCALING})

NEXT: Final[Mapping[tuple[Phase, JobTrigger], Phase]] = {
    (Phase.QUEUED, JobTrigger.GROUP_ORDERED): Phase.STARTING,
    (Phase.QUEUED, JobTrigger.CANCELLED): Phase.CANCELLED,
    (Phase.QUEUED, JobTrigger.GAVE_UP): Phase.FAILED,  # an element of an array failed
    (Phase.QUEUED, JobTrigger.FINISHED): Phase.SUCCEEDED,  # all elements of an array succeeded
    (Phase.QUEUED, JobTrigger.REJECTED): Phase.REJECTED,  # a job that has started is never rejected
    (Phase.STARTING, JobTrigger.GROUP_FORMED): Phase.RUNNING,
    (Phase.STARTING, JobTrigger.GROUP_LOST): Phase.PAUSED,
    (Phase.STARTING, JobTrigger.SCRIPT_FAILED): Phase.PAUSED,
    (Phase.STARTING, JobTrigger.GAVE_UP): Phase.FAILED,
    (Phase.STARTING, JobTrigger.FINISHED): Phase.SUCCEEDED,  # a script that formed no group
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
    (
        Phase.PAUSED,
        JobTrigger.GAVE_UP,
    ): Phase.FAILED,  # the last unit of a sweep ended during the pause
    (Phase.PAUSED, JobTrigger.FINISHED): Phase.SUCCEEDED,  # the same
    (Phase.PAUSED, JobTrigger.CANCELLED): Phase.CANCELLED,
}


class ScriptReports(msgspec.Struct, kw_only=True):
    """End of a job's script, as reported by its processes before they exit."""

    finished: str = ""  # the stop rule that was met
    error: str = ""  # the exception and where it was raised
    refused: bool = False  # the error is a refusal of the library


class Queued(msgspec.Struct, kw_only=True, tag="queued"):
    """Status of a job that never had a group."""

    phase: ClassVar[Phase] = Phase.QUEUED
    group: ClassVar[None] = None
    change: ClassVar[None] = None


class Starting(msgspec.Struct, kw_only=True, tag="starting"):
    """Status of a job that was ordered to start, from its checkpoint if there is one."""

    phase: ClassVar[Phase] = Phase.STARTING
    change: ClassVar[None] = None
    group: Group
    forming: bool = False  # all workers are ready and were ordered to form the group
    resumes: bool = False  # the last group was suspended
    script: ScriptReports = msgspec.field(default_factory=ScriptReports)


class Running(msgspec.Struct, kw_only=True, tag="running"):
    """Status of a job that trains while no change is in progress."""

    phase: ClassVar[Phase] = Phase.RUNNING
    change: ClassVar[None] = None
    group: Group
    script: ScriptReports = msgspec.field(default_factory=ScriptReports)


class Rescaling(msgspec.Struct, kw_only=True, tag="rescaling"):
    """Status of a job while its next group forms. The old group trains or has lost a member."""

    phase: ClassVar[Phase] = Phase.RESCALING
    group: Group
    change: Rescale
    script: ScriptReports = msgspec.field(default_factory=ScriptReports)


class Paused(msgspec.Struct, kw_only=True, tag="paused"):
    """Status of a job that had a group and has none now."""

    phase: ClassVar[Phase] = Phase.PAUSED
    group: ClassVar[None] = None
    change: ClassVar[None] = None
    suspended: bool = False  # the last group was suspended, not lost


class Ended(msgspec.Struct, kw_only=True, tag="ended"):
    """Status of a job in a final phase."""

    group: ClassVar[None] = None
    change: ClassVar[None] = None
    phase: Phase  # succeeded, failed, cancelled or rejected


JobStatus = Queued | Starting | Running | Rescaling | Paused | Ended
WithGroup = Starting | Running | Rescaling
