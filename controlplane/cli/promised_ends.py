"""A promised end beside what came of it, in words."""

from __future__ import annotations

from controlplane.cli.output import second, span
from schemas.messages.client import JobSummary


def promise_in_words(job: JobSummary) -> str:
    """Return the time a job was promised to end and whether that was kept, or nothing."""
    if job.promised_end is None:
        return ""
    said = second(job.promised_end)
    if job.ended_at is None:
        expected = job.promised_end if job.expected_end is None else job.expected_end
        if expected == job.promised_end:
            return said
        return f"{said}, expected {clock(expected, job.promised_end)}: {_off(job, expected)}"
    if job.state != "succeeded":
        return f"{said}, but it {'was ' * (job.state == 'cancelled')}{job.state}"
    done, kept = job.ended_at, "kept" if job.ended_at <= job.promised_end else "broken"
    return f"{said}, done {clock(done, job.promised_end)}: {kept}, {_off(job, done)}"


def clock(time_s: float, beside_s: float | None = None) -> str:
    """A moment as the time of its day, UTC; with its date, where that is another one.

    Args:
        time_s: seconds since the epoch.
        beside_s: a moment of the day that is taken for granted; None: any day.
    """
    whole = second(time_s)
    same = beside_s is None or second(beside_s)[:10] == whole[:10]
    return whole[11:] if same else whole


def _off(job: JobSummary, came: float) -> str:
    """How far from its promise something came."""
    late_s = came - (job.promised_end or came)
    return f"{span(abs(late_s))} {'late' if late_s > 0 else 'early'}"
