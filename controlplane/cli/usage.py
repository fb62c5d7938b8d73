"""`ones usage` and `ones history`: slot hours by user, project or job, and jobs that have ended."""

from __future__ import annotations

import csv
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from cyclopts import Parameter

from controlplane.cli.job_list import NO_FILTERS, Filters
from controlplane.cli.output import COMMON, Common, Exit, print_data, print_table, say, seconds_of
from controlplane.cli.progress import progress
from controlplane.client import BlockingClient
from controlplane.client.formats import moment, second
from schemas.wire.client import JobSummary, JobUsage

HOUR_S: Final = 3600.0
Key = Literal["user", "project", "job"]
COLUMNS: Final = {
    "user": ("user",),
    "project": ("project",),
    "job": ("job", "user", "project"),
}


def usage(
    *,
    since: Annotated[str, Parameter(help="begin, such as 30d or 12h before now")] = "30d",
    until: Annotated[str, Parameter(help="end, such as 1d before now (default: now)")] = "0s",
    by: Annotated[Key, Parameter(help="what a row is about")] = "user",
    home: Annotated[
        Path | None, Parameter(help="folder of the cluster (default: $ONES_HOME, else ~/.ones)")
    ] = None,
    output: Annotated[
        Literal["table", "csv", "json", "jsonl", "quiet"],
        Parameter(name=["--output", "-o"], help="output format"),
    ] = "table",
) -> int:
    """Print how many slot hours jobs used: each slot counts from its order until it is released."""
    now = time.time()
    begin, end = seconds_of(since, "since"), seconds_of(until, "until")
    with progress(output, "reading slot hours"), BlockingClient(home) as client:
        reply = client.usage(max(0.0, now - begin), now - end if end else None)
    rows = grouped(reply.jobs, COLUMNS[by])
    columns = [*COLUMNS[by], "jobs", "slot_hours"]
    if output == "csv":
        writer = csv.DictWriter(sys.stdout, columns)
        writer.writeheader()
        writer.writerows(rows)
    elif output in {"json", "jsonl"}:
        said = {"since": moment(reply.since), "until": moment(reply.until), "rows": rows}
        print_data(rows if output == "jsonl" else said, output)
    else:
        shown = [[*map(cell, row.values())] for row in rows]
        if output == "quiet":
            sys.stdout.writelines(f"{row[0]} {row[-1]}\n" for row in shown)
        else:
            print_table([name.replace("_", " ") for name in columns], shown)
    return Exit.OK


def grouped(used: Iterable[JobUsage | JobSummary], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return one row for each value of `keys`, the largest first."""
    groups: dict[tuple[str, ...], list[JobUsage | JobSummary]] = defaultdict(list)
    for one in used:
        groups[tuple(str(getattr(one, key)) for key in keys)].append(one)
    rows: list[dict[str, Any]] = [
        {
            **dict(zip(keys, values, strict=True)),
            "jobs": len(jobs),
            "slot_hours": sum(one.slot_s for one in jobs) / HOUR_S,
        }
        for values, jobs in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["slot_hours"])


HISTORY_COLUMNS: Final = [
    "job",
    "state",
    "exit",
    "slot hours",
    "user",
    "project",
    "submitted",
    "ended",
]
MOST: Final = 50


def history(
    *,
    filters: Filters = NO_FILTERS,
    last: Annotated[int, Parameter(name=["--last", "-n"], help="largest number of jobs")] = MOST,
    common: Common = COMMON,
) -> None:
    """List jobs that have ended, newest first, and the sums of their slot hours."""
    with progress(common.output, "reading jobs"), BlockingClient(common.home) as client:
        jobs = client.history(last, **filters.fields())
    rows = [_row(job) for job in jobs]
    sums = {key: grouped(jobs, (key,)) for key in ("user", "project")}
    if common.output != "table":
        say(common, {"jobs": rows, "sums": sums}, quiet=(job.job for job in jobs), rows=rows)
        return
    print_table(HISTORY_COLUMNS, [[*map(cell, _row(job, second).values())] for job in jobs])
    for key, of_key in sums.items() if rows else ():
        print_table([key, "jobs", "slot hours"], [[*map(cell, row.values())] for row in of_key])


def _row(job: JobSummary, at: Callable[[float], str] = moment) -> dict[str, Any]:
    return {
        "job": job.job,
        "state": job.state,
        "exit_code": job.exit_code,
        "slot_hours": job.slot_s / HOUR_S,
        "user": job.user,
        "project": job.project,
        "submitted_at": at(job.submitted_at),
        "ended_at": None if job.ended_at is None else at(job.ended_at),
    }


def cell(value: Any) -> str:
    """Return a value for a cell of a table; None is empty."""
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)
