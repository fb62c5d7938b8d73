"""Files of traces in our own CSV layout.

The columns are `name,time,application,num_replicas,batch_size`. Workloads of the artifact of
*Pollux* (OSDI '21) have the same columns. Optional columns are
`user,project,kind,max_run_s,cancelled_after_s,crashes_at,samples,value,deadline_s,decay`. An empty
optional cell means the default value; a job without a project belongs to its user's own one.

A file that cannot be read or written, and a line that is not a job, raise `TraceError`, which names
file, line and column.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from itertools import islice
from math import inf
from pathlib import Path
from typing import Final, Literal

from controlplane.sim.cluster import TraceError
from controlplane.sim.csv_parsing import CsvRow, parse_line, unique, with_header
from controlplane.sim.models.recording import write_whole
from controlplane.sim.results import Trace, TraceJob
from schemas.ids import Seconds
from schemas.jobs import MAX_UTILITY, Utility

REQUIRED: Final = ("name", "time", "application", "num_replicas", "batch_size")
OPTIONAL: Final = (
    "user", "project", "kind", "max_run_s", "cancelled_after_s", "crashes_at", "samples", "value",
    "deadline_s", "decay",
)  # fmt: skip
USER: Final = "trace"  # user of jobs without a user
MAX_JOBS: Final = 1_000_000
MAX_SLOTS: Final = 1_000_000
MIN_DEADLINE_S: Final = 1e-3
MIN_LIMIT_S: Final = 1.0  # smallest time limit
MIN_SHARE: Final = 1e-9  # smallest share of a job's work before and after a crash


def read_trace(path: Path) -> Trace:
    """Read a trace, sorted by time; its name is the file name without the suffix."""
    rows = unique(with_header(path, REQUIRED, OPTIONAL), "name")
    return build_trace(path.stem, path, map(_job, rows))


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace atomically; `read_trace` returns an equal trace."""
    used = {column for job in trace.jobs for column, cell in _cells(job).items() if cell}
    if all(job.user == USER for job in trace.jobs):
        used -= {"user"}
    columns = [*REQUIRED, *(column for column in OPTIONAL if column in used)]
    lines = [_line(_cells(job)[column] for column in columns) for job in trace.jobs]
    rows = (parse_line(str(path), at, line, columns) for at, line in enumerate(lines, start=2))
    for job, row in zip(trace.jobs, unique(rows, "name"), strict=True):
        if _job(row) != job:
            problem = f"{row.place}: job {job.name!r} would not be read back equal"
            hint = "leave out blanks around names, and fractions of whole numbers"
            raise TraceError(problem, hint)
    build_trace(trace.name, path, trace.jobs)
    write_whole(path, "\n".join([_line(columns), *lines, ""]), TraceError)


def _line(cells: Iterable[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


def build_trace(name: str, path: Path, jobs: Iterable[TraceJob]) -> Trace:
    """Return a trace of the jobs, sorted by time; simultaneous jobs stay in the given order."""
    found = list(islice(jobs, MAX_JOBS + 1))
    if not found:
        raise TraceError(f"{path}: no jobs", "write one job on each line below the header")
    if len(found) > MAX_JOBS:
        raise TraceError(f"{path}: more than {MAX_JOBS} jobs", "split the file")
    return Trace(name=name, jobs=tuple(sorted(found, key=lambda job: job.at)))


def _job(row: CsvRow) -> TraceJob:
    shares = (MIN_SHARE, 1.0 - MIN_SHARE)
    return TraceJob(
        name=row.text("name"),
        at=Seconds(row.number("time")),
        workload=row.text("application"),
        slots=row.whole("num_replicas", 1, MAX_SLOTS),
        batch=row.whole("batch_size"),
        user=row.text("user") if row.given("user") else USER,
        project=row.text("project") if row.given("project") else "",
        kind=_kind(row),
        max_run_s=row.number("max_run_s", MIN_LIMIT_S) if row.given("max_run_s") else None,
        cancelled_after_s=(
            row.number("cancelled_after_s") if row.given("cancelled_after_s") else None
        ),
        crashes_at=row.number("crashes_at", *shares) if row.given("crashes_at") else None,
        samples=row.whole("samples", 1) if row.given("samples") else None,
        utility=_utility(row) if row.given("value") else None,
    )


def _kind(row: CsvRow) -> Literal["elastic", "torchrun"]:
    match row.text("kind") if row.given("kind") else "elastic":
        case "elastic":
            return "elastic"
        case "torchrun":
            return "torchrun"
        case kind:
            problem = f"{row.place}: column kind: {kind!r}"
            raise TraceError(problem, "write elastic or torchrun")


def _utility(row: CsvRow) -> Utility:
    return Utility(
        value=row.number("value", 0.0, MAX_UTILITY),
        deadline_s=row.number("deadline_s", MIN_DEADLINE_S) if row.given("deadline_s") else inf,
        decay=row.number("decay") if row.given("decay") else 0.0,
    )


def _cells(job: TraceJob) -> dict[str, str]:
    worth = job.utility
    numbers = {
        "time": job.at, "num_replicas": job.slots, "batch_size": job.batch,
        "max_run_s": job.max_run_s, "cancelled_after_s": job.cancelled_after_s,
        "crashes_at": job.crashes_at, "samples": job.samples,
        "value": worth.value if worth else None,
        "deadline_s": worth.deadline_s if worth and worth.deadline_s < inf else None,
        "decay": worth.decay if worth else None,
    }  # fmt: skip
    texts = {
        "kind": "" if job.kind == "elastic" else job.kind,
        "name": job.name,
        "application": job.workload,
        "user": job.user,
    }
    texts["project"] = job.project
    return texts | {column: _plain(number) for column, number in numbers.items()}


def _plain(number: float | None) -> str:
    """Format a number without loss and without a trailing `.0`."""
    return "" if number is None else repr(number).removesuffix(".0")
