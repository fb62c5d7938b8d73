"""What the end of a worker process means for its job."""

from __future__ import annotations

import signal
from enum import Enum
from typing import Final

from controlplane.core.model.job import Job
from schemas.messages.agent import WorkerExited


class ExitCause(Enum):
    """How a worker ended."""

    DONE = "done"
    FAILED = "failed"  # the script's fault: counted against `retries`
    LOST = "lost"  # somebody else's: never counted


FAULTS: Final = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS}
)


def exit_cause(job: Job, news: WorkerExited) -> tuple[ExitCause, str]:
    """The outcome, and the reason in words.

    A signal that a program raises by its own fault is a failure of the script; any other (KILL by
    an operator or the kernel, TERM of a host going down) is a loss.
    """
    if news.code == 0:
        return ExitCause.DONE, job.finished_why or _early_end(job)
    if news.code is not None:
        what = job.script_error or "its script ended"
        return ExitCause.FAILED, f"{what}: exit code {news.code}"
    if news.signal in FAULTS:
        return ExitCause.FAILED, f"a worker died of {signal.Signals(news.signal).name}"
    if news.signal is not None:
        name = signal.Signals(news.signal).name if news.signal in _KNOWN else str(news.signal)
        return ExitCause.LOST, f"a worker was ended by {name}"
    if job.finished_why:
        return ExitCause.DONE, job.finished_why
    if job.script_error:
        return ExitCause.FAILED, job.script_error
    return ExitCause.LOST, "a worker is gone and nobody saw how"


_KNOWN: Final = frozenset(int(known) for known in signal.Signals)


def _early_end(job: Job) -> str:
    if job.epoch:
        return f"its script ended after epoch {job.epoch}, before its stop rule was met"
    return "its script ended (exit code 0)"
