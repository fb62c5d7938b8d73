"""Why a job failed, for people: its error, and the last lines of the worker that ended first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from controlplane.client import BlockingClient
from controlplane.client.stream_pages import OutputLine
from schemas.messages.client import JobDetail
from schemas.messages.feed import FeedEvent

LAST_LINES: Final = 15
EXITED: Final = "worker.exited"
BY_OTHERS: Final = frozenset({9, 15})  # signals that follow an end elsewhere, or come from outside


class Failure(NamedTuple):
    """How a job ended that did not succeed, and what its failing worker wrote last."""

    job: str
    state: str
    reason: str
    rank: int | None  # None: nobody can say which worker failed, and `lines` are those of all
    lines: tuple[OutputLine, ...]


def failure_of(client: BlockingClient, detail: JobDetail, from_seq: int) -> Failure:
    """What a person wants to know when a job did not succeed.

    Args:
        from_seq: number of a feed event before its first, 1-based.
    """
    job = detail.summary
    if job.state != "failed":
        return Failure(job.job, job.state, job.reason, None, ())
    rank = failing_rank(e for e in client.events(from_seq) if e.job == job.job)
    pages = client.output_pages(job.job, rank, follow=False, last=LAST_LINES)
    lines = tuple(line for page in pages for line in page)
    return Failure(job.job, job.state, job.reason, rank, lines)


def as_text(failure: Failure) -> Iterator[str]:
    """A failure as lines for people.

    Yields:
        Its state and reason; if it failed, the last lines of who did it.
    """
    yield f"ones: {failure.job} {failure.state}: {failure.reason}"
    if failure.state != "failed":
        return
    who = "its workers" if failure.rank is None else f"rank {failure.rank}"
    yield f"the last lines of {who}:" if failure.lines else f"{who} wrote nothing"
    several = len({line.rank for line in failure.lines}) > 1
    for line in failure.lines:
        yield f"  [{line.rank}] {line.text}" if several else f"  {line.text}"
    if failure.lines:
        yield f"all of it: {_logs(failure)}"


def as_json(failure: Failure) -> dict[str, Any]:
    """A failure for programs, in the form of an error."""
    error = {
        "code": "job_failed",
        "message": f"{failure.job} {failure.state}: {failure.reason}",
        "hint": f"`{_logs(failure)}`",
        "rank": failure.rank,
        "lines": [line.text for line in failure.lines],
    }
    return {"error": error}


def _logs(failure: Failure) -> str:
    return f"ones logs {failure.job}" + ("" if failure.rank is None else f" --rank {failure.rank}")


def failing_rank(events: Iterable[FeedEvent]) -> int | None:
    """The worker whose end was not in order, of the last group that a job had.

    Returns:
        Its rank; None if no worker ended by itself with anything but 0.
    """
    newest, found = -1, None
    for event in events:
        if event.event != EXITED:
            continue
        detail = event.detail
        version, rank = int(detail.get("version") or 0), int(detail.get("rank") or 0)
        if version > newest:
            newest, found = version, None
        own_end = detail.get("code") or (detail.get("signal") or 9) not in BY_OTHERS
        if found is None and version == newest and own_end:
            found = rank
    return found
