"""Worker phases and their transition table."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

import msgspec

from controlplane.core.errors import IllegalTransitionError
from schemas.ids import Rank, SlotId, Version, WorkerId


class WorkerPhase(Enum):
    """Where one process stands, as far as the controller was told."""

    ORDERED = "ordered"
    STARTED = "started"
    READY = "ready"
    MEMBER = "member"
    LEAVING = "leaving"  # told to stop; still owns its slot
    GONE = "gone"


class WorkerTurn(Enum):
    """What can happen to a worker."""

    STARTED = "process started"
    READY = "said ready"
    FORMED = "joined its group"
    DISMISSED = "told to stop"
    GONE = "seen gone"


_LIVING = (WorkerPhase.ORDERED, WorkerPhase.STARTED, WorkerPhase.READY, WorkerPhase.MEMBER)

NEXT: Final[Mapping[tuple[WorkerPhase, WorkerTurn], WorkerPhase]] = {
    (WorkerPhase.ORDERED, WorkerTurn.STARTED): WorkerPhase.STARTED,
    (WorkerPhase.STARTED, WorkerTurn.READY): WorkerPhase.READY,
    (WorkerPhase.READY, WorkerTurn.FORMED): WorkerPhase.MEMBER,
    **{(phase, WorkerTurn.DISMISSED): WorkerPhase.LEAVING for phase in _LIVING},
    **{(phase, WorkerTurn.GONE): WorkerPhase.GONE for phase in (*_LIVING, WorkerPhase.LEAVING)},
}


class Worker(msgspec.Struct, kw_only=True):
    """One process on one slot; the slot is its own until it is seen gone."""

    worker: WorkerId
    version: Version
    rank: Rank
    slot: SlotId
    local_batch: int
    phase: WorkerPhase = WorkerPhase.ORDERED
    pid: int | None = None
    reports: int = 0  # taken from its report file


def advance(worker: Worker, turn: WorkerTurn) -> bool:
    """Move `worker` along its table.

    Returns:
        False when the news is old: the worker is already there, further, or leaving.
    """
    phase = NEXT.get((worker.phase, turn))
    if phase is not None:
        worker.phase = phase
        return True
    if worker.phase in {WorkerPhase.LEAVING, WorkerPhase.GONE} or turn is WorkerTurn.STARTED:
        return False
    raise IllegalTransitionError(worker.worker, worker.phase.value, turn.value, "")
