"""Worker model, with phases, their transition table, and the cause of an exit."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from enum import Enum
from typing import Final

import msgspec

from controlplane.core.commands import IllegalTransitionError
from controlplane.core.model.job_phases import ScriptReports
from schemas.ids import Rank, SlotId, Version, WorkerId
from schemas.wire.agent import WorkerExited


class WorkerPhase(Enum):
    """Phase of one process, as far as the controller knows."""

    ORDERED = "ordered"
    STARTED = "started"
    READY = "ready"
    MEMBER = "member"
    RETIRING = "retiring"  # left its group as agreed and is about to exit; still owns its slot
    LEAVING = "leaving"  # ordered to stop; still owns its slot
    EXITED = "exited"


class WorkerTrigger(Enum):
    """Events that move a worker along its table."""

    STARTED = "process started"
    READY = "ready"
    FORMED = "joined its group"
    RETIRED = "left its group"
    DISMISSED = "ordered to stop"
    EXITED = "process exited"


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
    """Process on a slot. The process owns the slot until the process is known to have exited."""

    worker: WorkerId
    version: Version  # version of the group for which the process was started
    rank: Rank  # rank in the group for which the process was started
    slot: SlotId
    local_batch: int
    beside: tuple[SlotId, ...] = ()  # slots of its node that the job keeps empty
    phase: WorkerPhase = WorkerPhase.ORDERED
    pid: int | None = None
    reports: int = 0  # index of the last handled report of its script
    store_port: int = 0  # port of the worker's store, from its ready report
    data_digest: str = ""  # length and order of its training set, from its ready report
    group_version: Version = Version(0)  # the group in which the worker trains
    group_first_step: int = 0  # first step in that group
    reserved: bool = False  # is prepared while the slot's owner is about to leave
    awaits_slot: bool = False  # is prepared, except for its device, and waits for its slot


def advance(worker: Worker, trigger: WorkerTrigger) -> bool:
    """Move `worker` along the transition table. Return True if it moved.

    Return False if the worker is already in the new phase or in a later phase, or is stopping.
    """
    phase = NEXT.get((worker.phase, trigger))
    if phase is not None:
        worker.phase = phase
        return True
    if worker.phase in {*_GOING, WorkerPhase.EXITED} or trigger is WorkerTrigger.STARTED:
        return False
    raise IllegalTransitionError(worker.worker, worker.phase.value, trigger.value)


def data_problem(worker: Worker, other: Worker) -> str:
    """Return why two workers cannot train one job on their training sets, or "".

    An empty digest is not known, and matches all others.
    """
    digests = worker.data_digest, other.data_digest
    if not all(digests) or digests[0] == digests[1]:
        return ""
    name = f"the training set of rank {worker.rank} on {worker.slot}"
    sizes = [digest.partition("-")[0] for digest in digests]
    if sizes[0] != sizes[1]:
        differ = f"{sizes[0]} samples, that of rank {other.rank} has {sizes[1]}"
        return f"{name} has {differ}: all workers need the same data"
    problem = f"{name} has another order than that of rank {other.rank}"
    return f"{problem}: sort what the file system lists, and seed what is shuffled"


class ExitCause(Enum):
    """Cause of a worker's exit."""

    DONE = "done"
    FAILED = "failed"  # the script's fault: counted against `retries`
    LOST = "lost"  # not the script's fault: never counted against `retries`


FAULTS: Final = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS}
)


def exit_cause(event: WorkerExited, script: ScriptReports, epoch: int) -> tuple[ExitCause, str]:
    """Return the cause of a worker's exit and the reason as text.

    A signal that a program raises by its own fault is a failure of the script. Any other signal
    (KILL by an operator or the kernel, TERM when a host shuts down) is a loss. Exceeding the memory
    or disk limit of a node is a failure of the script, because the job would exceed the limit of
    the next node, too.

    Args:
        script: earlier reports of the job's script.
        epoch: last epoch that the job finished, or 0 for none.
    """
    if event.code == 0:
        return ExitCause.DONE, script.finished or _early_exit(epoch)
    if event.code is not None:
        code = event.code
        error = f"{script.error} (exit code {code})" if script.error else ""
        reason = error or f"the script exited with code {code}"
        return ExitCause.FAILED, "; ".join(filter(None, (reason, _limit_problem(event))))
    if exceeds_limit(event):
        return ExitCause.FAILED, f"rank {event.rank} was killed: {_limit_problem(event)}"
    if event.signal in FAULTS:
        return ExitCause.FAILED, f"a worker crashed with {signal.Signals(event.signal).name}"
    if event.signal is not None:
        name = signal.Signals(event.signal).name if event.signal in _KNOWN else str(event.signal)
        return ExitCause.LOST, f"a worker was killed by {name}"
    if script.finished:
        return ExitCause.DONE, script.finished
    if script.error:
        return ExitCause.FAILED, script.error
    return ExitCause.LOST, "a worker vanished without an exit status"


def shell_exit_code(event: WorkerExited) -> int | None:
    """Return the exit code that a shell would report, which is 128 plus the number of a signal."""
    return 128 + event.signal if event.signal is not None else event.code


_KNOWN: Final = frozenset(int(known) for known in signal.Signals)


def exceeds_limit(event: WorkerExited) -> bool:
    """True if the node killed the worker because its job exceeded a limit."""
    return event.memory_limit is not None or event.disk_limit is not None


def _limit_problem(event: WorkerExited) -> str:
    if event.memory_limit is not None:
        used = f"processes on the node exceeded {event.memory_limit / (1 << 30):.3g} GiB of memory"
        setting = "memory_bytes"
    elif event.disk_limit is not None:
        used = f"files on the node exceeded {event.disk_limit / (1 << 30):.3g} GiB"
        setting = "disk_bytes"
    else:
        return ""
    return f"the job's {used}; reduce it, or ask the operator to raise {setting} in [jobs]"


def _early_exit(epoch: int) -> str:
    if epoch:
        return f"the script exited after epoch {epoch}, before its stop rule was met"
    return "the script exited (exit code 0)"
