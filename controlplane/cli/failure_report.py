"""Why a job failed, for people: its error, and the last lines of the worker that ended first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from controlplane.client import BlockingClient
from schemas.messages.client import JobDetail
from schemas.messages.feed import FeedEvent

LAST_LINES: Final = 15
EXITED: Final = "worker.exited"
BY_OTHERS: Final = frozenset({9, 15})  # signals that follow an end elsewhere, or come from outside


def failure_lines(client: BlockingClient, detail: JobDetail, from_seq: int) -> Iterator[str]:
    """What a person wants to read when a job did not succeed.

    Args:
        client: open.
        detail: of a job that has ended.
        from_seq: number of a feed event before its first, 1-based.

    Yields:
        Its state and error; of a failure also the last lines of the failing worker, or of all
        workers where nobody can say which one failed.
    """
    job = detail.summary
    yield f"ones: {job.job} {job.state}: {job.reason}"
    if job.state != "failed":
        return
    rank = failing_rank(e for e in client.events(from_seq) if e.job == job.job)
    lines = [
        line for page in client.output_pages(job.job, rank, follow=False, last=LAST_LINES)
        for line in page
    ]  # fmt: skip
    who = "its workers" if rank is None else f"rank {rank}"
    yield f"the last lines of {who}:" if lines else f"{who} wrote nothing"
    several = len({line.rank for line in lines}) > 1
    for line in lines:
        yield f"  [{line.rank}] {line.text}" if several else f"  {line.text}"
    if lines:
        only = "" if rank is None else f" --rank {rank}"
        yield f"all of it: ones logs {job.job}{only}"


def failing_rank(events: Iterable[FeedEvent]) -> int | None:
    """The worker whose end was not in order, of the last group that a job had.

    Args:
        events: of one job, in order.

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
