"""`ones history`: jobs that have ended, and sums of their slot hours."""

from __future__ import annotations

from typing import Annotated, Any, Final

from cyclopts import Parameter

from controlplane.cli.job_list import NO_FILTERS, Filters
from controlplane.cli.output import COMMON, Common, moment, print_table, say, second
from controlplane.cli.usage import HOUR_S, grouped
from controlplane.client import BlockingClient
from schemas.wire.client import JobSummary

COLUMNS: Final = ("job", "state", "exit", "slot hours", "user", "project", "submitted", "ended")
MOST: Final = 50


def history(
    *,
    filters: Filters = NO_FILTERS,
    last: Annotated[int, Parameter(name=["--last", "-n"], help="largest number of jobs")] = MOST,
    common: Common = COMMON,
) -> None:
    """List jobs that have ended, newest first, and the sums of their slot hours."""
    with BlockingClient(common.home) as client:
        jobs = client.history(last, **filters.fields())
    rows = [_row(job) for job in jobs]
    sums = {key: grouped(jobs, (key,)) for key in ("user", "project")}
    if common.output != "table":
        say(common, {"jobs": rows, "sums": sums}, quiet=(job.job for job in jobs), rows=rows)
        return
    times = [[second(job.submitted_at), _end(job)] for job in jobs]
    cells = [[*map(_text, row.values())][:-2] for row in rows]
    print_table(COLUMNS, [[*row, *at] for row, at in zip(cells, times, strict=True)])
    for key, of_key in sums.items() if rows else ():
        print_table([key, "jobs", "slot hours"], [[*map(_text, row.values())] for row in of_key])


def _row(job: JobSummary) -> dict[str, Any]:
    return {
        "job": job.job,
        "state": job.state,
        "exit_code": job.exit_code,
        "slot_hours": job.slot_s / HOUR_S,
        "user": job.user,
        "project": job.project,
        "submitted_at": moment(job.submitted_at),
        "ended_at": None if job.ended_at is None else moment(job.ended_at),
    }


def _end(job: JobSummary) -> str:
    return "" if job.ended_at is None else second(job.ended_at)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)
