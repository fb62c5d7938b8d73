"""Our own layout of a trace: a CSV file with one submission on each line.

The columns are `name,time,application,num_replicas,batch_size`, as in the workloads of the
artifact of *Pollux* (OSDI '21), which can be read as they are; and, where they are needed,
`user,cancelled_after_s,crashes_at,samples,value,deadline_s,decay`. An empty cell of these has its
default.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from math import inf
from pathlib import Path
from typing import Final

from controlplane.sim.csv_parsing import CsvRow, parse_line, with_header
from controlplane.sim.simulator_errors import TraceError
from controlplane.sim.submissions import Trace, TraceJob
from controlplane.sim.traces.atomic_file import write_whole
from schemas.ids import Seconds
from schemas.jobs import MAX_UTILITY, Utility

REQUIRED: Final = ("name", "time", "application", "num_replicas", "batch_size")
OPTIONAL: Final = (
    "user", "cancelled_after_s", "crashes_at", "samples", "value", "deadline_s", "decay"
)  # fmt: skip
MOST_SLOTS: Final = 1_000_000
LEAST_DEADLINE_S: Final = 1e-3
LEAST_SHARE: Final = 1e-9  # of a job's work, in front of a crash and behind it


def read_trace(path: Path) -> Trace:
    """The trace in a file, in order of time; jobs of the same moment stay in the file's order.

    Args:
        path: of a CSV file; its stem is the trace's name.

    Raises:
        TraceError: if it cannot be read, or a line is no job; it names file, line and column.
    """
    return build_trace(
        path.stem, path, (_job(row) for row in with_header(path, REQUIRED, OPTIONAL))
    )


def write_trace(trace: Trace, path: Path) -> None:
    """Put a trace into a file that `read_trace` reads; the file is there whole or not at all.

    Raises:
        TraceError: if it has no jobs, a job could not be read again, or the disk does not take it.
    """
    columns = [*REQUIRED, *(column for column in OPTIONAL if _is_used(column, trace.jobs))]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for line, job in enumerate(trace.jobs, start=2):
        row = io.StringIO()
        csv.writer(row, lineterminator="").writerow(_cells(job)[column] for column in columns)
        if _job(parse_line(str(path), line, row.getvalue(), columns)) != job:
            what = f"{path}:{line}: job {job.name!r} would be read as another one"
            raise TraceError(what, "leave out blanks around names, and fractions of whole numbers")
        text.write(row.getvalue() + "\n")
    build_trace(trace.name, path, trace.jobs)
    write_whole(path, text.getvalue(), TraceError)


def build_trace(name: str, path: Path, jobs: Iterable[TraceJob]) -> Trace:
    """Jobs as a trace, sorted by time.

    Args:
        jobs: in any order; those of the same moment stay in theirs.

    Raises:
        TraceError: if there are none, or two have the same name.
    """
    found: dict[str, TraceJob] = {}
    for job in jobs:
        if job.name in found:
            what = f"{path}: column name: two jobs are called {job.name!r}"
            raise TraceError(what, "give every job a name of its own", "name")
        found[job.name] = job
    if not found:
        raise TraceError(f"{path}: no jobs", "write one job on each line below the header")
    return Trace(name=name, jobs=tuple(sorted(found.values(), key=lambda job: job.at)))


def _job(row: CsvRow) -> TraceJob:
    shares = (LEAST_SHARE, 1.0 - LEAST_SHARE)
    return TraceJob(
        name=row.text("name"),
        at=Seconds(row.number("time")),
        workload=row.text("application"),
        slots=row.whole("num_replicas", 1, MOST_SLOTS),
        batch=row.whole("batch_size"),
        user=row.text("user") if row.given("user") else "trace",
        cancelled_after_s=(
            row.number("cancelled_after_s") if row.given("cancelled_after_s") else None
        ),
        crashes_at=row.number("crashes_at", *shares) if row.given("crashes_at") else None,
        samples=row.whole("samples", 1) if row.given("samples") else None,
        utility=_utility(row) if row.given("value") else None,
    )


def _utility(row: CsvRow) -> Utility:
    """What the job is worth: its value, and if they are given its deadline and decay."""
    return Utility(
        value=row.number("value", 0.0, MAX_UTILITY),
        deadline_s=row.number("deadline_s", LEAST_DEADLINE_S) if row.given("deadline_s") else inf,
        decay=row.number("decay") if row.given("decay") else 0.0,
    )


def _cells(job: TraceJob) -> dict[str, str]:
    worth = job.utility
    return {
        "name": job.name,
        "time": _plain(job.at),
        "application": job.workload,
        "num_replicas": _plain(job.slots),
        "batch_size": _plain(job.batch),
        "user": job.user,
        "cancelled_after_s": _plain(job.cancelled_after_s),
        "crashes_at": _plain(job.crashes_at),
        "samples": _plain(job.samples),
        "value": _plain(worth.value if worth else None),
        "deadline_s": _plain(worth.deadline_s if worth and worth.deadline_s < inf else None),
        "decay": _plain(worth.decay if worth else None),
    }


def _plain(number: float | None) -> str:
    """Exactly the number, without `.0`."""
    return "" if number is None else repr(number).removesuffix(".0")


def _is_used(column: str, jobs: Iterable[TraceJob]) -> bool:
    return any(_cells(job)[column] != ("", "trace")[column == "user"] for job in jobs)
