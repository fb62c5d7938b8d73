"""Worker phases and their transition table."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

import msgspec

from controlplane.core.errors import IllegalTransitionError
from schemas.ids import Rank, SlotId, Version, WorkerId


class WorkerPhase(Enum):
    """Where one process stands, as far as the controller knows."""

    ORDERED = "ordered"
    STARTED = "started"
    READY = "ready"
    MEMBER = "member"
    RETIRING = "retiring"  # left its group as agreed, is about to exit; still owns its slot
    LEAVING = "leaving"  # ordered to stop; still owns its slot
    EXITED = "exited"


class WorkerTrigger(Enum):
    """What can happen to a worker."""

    STARTED = "process started"
    READY = "said ready"
    FORMED = "joined its group"
    RETIRED = "left its group"
    DISMISSED = "ordered to stop"
    EXITED = "process ended"


_LIVING = (WorkerPhase.ORDERED, WorkerPhase.STARTED, WorkerPhase.READY, WorkerPhase.MEMBER)
_GOING = (WorkerPhase.RETIRING, WorkerPhase.LEAVING)

NEXT: Final[Mapping[tuple[WorkerPhase, WorkerTrigger], WorkerPhase]] = {
    (WorkerPhase.ORDERED, WorkerTrigger.STARTED): WorkerPhase.STARTED,
    (WorkerPhase.STARTED, WorkerTrigger.READY): WorkerPhase.READY,
    (WorkerPhase.READY, WorkerTrigger.FORMED): WorkerPhase.MEMBER,
    (WorkerPhase.MEMBER, WorkerTrigger.FORMED): WorkerPhase.MEMBER,  # of the next group
    (WorkerPhase.MEMBER, WorkerTrigger.RETIRED): WorkerPhase.RETIRING,
    (WorkerPhase.RETIRING, WorkerTrigger.DISMISSED): WorkerPhase.LEAVING,
    **{(phase, WorkerTrigger.DISMISSED): WorkerPhase.LEAVING for phase in _LIVING},
    **{(phase, WorkerTrigger.EXITED): WorkerPhase.EXITED for phase in (*_LIVING, *_GOING)},
}


class Worker(msgspec.Struct, kw_only=True):
    """One process on one slot; the slot is its own until it is known to have ended."""

    worker: WorkerId
    version: Version  # that it was born with
    rank: Rank  # that it was born with
    slot: SlotId
    local_batch: int
    phase: WorkerPhase = WorkerPhase.ORDERED
    pid: int | None = None
    reports: int = 0  # taken from its report file
    store_port: int = 0  # that it announced when it was ready
    formed: Version = Version(0)  # the group that it takes its steps in
    formed_step: int = 0  # where that began
    reserved: bool = False  # it is prepared beside the slot's owner, which is about to leave
    waits: bool = False  # all is built that needs no device: it waits for its slot


def advance(worker: Worker, trigger: WorkerTrigger) -> bool:
    """Move `worker` along its table.

    Args:
        worker: it is changed in place.

    Returns:
        False when that is known: the worker is already there, further, or leaving.

    Raises:
        IllegalTransitionError: if the arrow is not drawn.
    """
    phase = NEXT.get((worker.phase, trigger))
    if phase is not None:
        worker.phase = phase
        return True
    if worker.phase in {*_GOING, WorkerPhase.EXITED} or trigger is WorkerTrigger.STARTED:
        return False
    raise IllegalTransitionError(worker.worker, worker.phase.value, trigger.value, "")
