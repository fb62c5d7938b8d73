"""What the end of a worker process means for its job."""

from __future__ import annotations

import signal
from enum import Enum
from typing import Final

from controlplane.core.model.job_phases import ScriptReports
from schemas.messages.agent import WorkerExited


class ExitCause(Enum):
    """How a worker ended."""

    DONE = "done"
    FAILED = "failed"  # the script's fault: counted against `retries`
    LOST = "lost"  # somebody else's: never counted


FAULTS: Final = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS}
)


def exit_cause(event: WorkerExited, script: ScriptReports, epoch: int) -> tuple[ExitCause, str]:
    """How a worker ended, and the reason in words.

    A signal that a program raises by its own fault is a failure of the script; any other (KILL by
    an operator or the kernel, TERM of a host going down) is a loss. A job that took more memory
    than its limit on a node would take it on the next one, too: that is its script's fault.

    Args:
        script: what the job's script said of it before.
        epoch: the last one that the job finished; 0 for none.
    """
    if event.code == 0:
        return ExitCause.DONE, script.finished or _early_end(epoch)
    if event.code is not None:
        what = script.error or "its script ended"
        why = f"{what}: exit code {event.code}"
        if event.memory_limit is not None:
            why += f"; {_too_much(event.memory_limit)}"
        return ExitCause.FAILED, why
    if event.memory_limit is not None:
        return ExitCause.FAILED, f"rank {event.rank} was killed: {_too_much(event.memory_limit)}"
    if event.signal in FAULTS:
        return ExitCause.FAILED, f"a worker died of {signal.Signals(event.signal).name}"
    if event.signal is not None:
        name = signal.Signals(event.signal).name if event.signal in _KNOWN else str(event.signal)
        return ExitCause.LOST, f"a worker was ended by {name}"
    if script.finished:
        return ExitCause.DONE, script.finished
    if script.error:
        return ExitCause.FAILED, script.error
    return ExitCause.LOST, "a worker is gone and nobody saw how"


_KNOWN: Final = frozenset(int(known) for known in signal.Signals)


def _too_much(limit: int) -> str:
    what = f"the job's processes on its node took more than {limit / (1 << 30):.3g} GiB of memory"
    return f"{what}; use less of it, or ask who runs the cluster for more (memory_bytes of [jobs])"


def _early_end(epoch: int) -> str:
    if epoch:
        return f"its script ended after epoch {epoch}, before its stop rule was met"
    return "its script ended (exit code 0)"
