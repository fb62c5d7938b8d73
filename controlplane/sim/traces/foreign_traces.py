"""Importers of other simulators' traces and of public logs of clusters.

No foreign trace has enough data to train the same jobs. The workload of an imported job is
therefore `gpu-time:SECONDS`, its slots times its run time, and the model chooses a workload with
this GPU time. Names of models are not used: a `vgg19` or `LM` in these traces trains other data for
another number of steps. A job that requests a part of a GPU gets a whole slot for its run time.

A file that cannot be read, and a line that is not a job, raise `TraceError`, which names file, line
and column. Jobs that cannot be simulated are left out and counted.
"""

from __future__ import annotations

import codecs
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

import msgspec

from controlplane.sim.cluster import TraceError
from controlplane.sim.csv_parsing import (
    NUMBER,
    CsvRow,
    first_line,
    unique,
    without_header,
)
from controlplane.sim.models.table2 import GPU_TIME, MAX_GPU_S
from controlplane.sim.results import Trace, TraceJob
from controlplane.sim.traces.trace_csv import (
    MAX_JOBS,
    MAX_SLOTS,
    REQUIRED,
    USER,
    build_trace,
    read_trace,
)
from controlplane.sim.traces.trace_layouts import (
    OWN,
    SIMULATED,
    TABLES,
    Layout,
    Table,
    names_header,
)
from schemas.ids import Seconds

JOBS: Final = ("job_name", "inst_id", "user", "status", "start_time", "end_time")  # of pai2020
NO_GPU: Final = "requested no GPU"
NO_RUN: Final = "have no run time: no end, or one before the start"
TOO_LARGE: Final = "requested more GPUs than the limit"
MAX_READ_JOBS: Final = 2 * MAX_JOBS  # including jobs that are left out; of jobs in several lines
MAX_JSON_BYTES: Final = 1 << 28


@dataclass(frozen=True, slots=True)
class Imported:
    """Imported trace, and what the import changed."""

    trace: Trace
    gpu_s: Sequence[float] = ()  # GPU times in the source; empty if it states none
    left_out: Mapping[str, int] = field(default_factory=dict)  # reason -> number of jobs
    rounded: int = 0  # number of jobs with a fraction of a GPU, which is rounded up


class Request(NamedTuple):
    """Job of a foreign trace."""

    name: str
    at: float  # time of the submission, seconds
    gpus: float  # can be a fraction
    run_s: float | None  # None: unknown
    user: str = USER


def import_trace(path: Path, layout: Layout, *, most_slots: int | None = None) -> Imported:
    """Read the jobs of a foreign trace; leave out jobs that need more than `most_slots` slots."""
    most = MAX_SLOTS if most_slots is None else most_slots
    if layout in OWN:
        jobs = read_trace(path).jobs
        fitting = [job for job in jobs if job.slots <= most]
        left_out = Counter({TOO_LARGE: len(jobs) - len(fitting)})
        return Imported(_trace(path, fitting, left_out), left_out=+left_out)
    gpu_s, kept, left_out = [], [], Counter[str]()
    for request in _requests(path, layout):
        if not request.gpus or not request.run_s:
            left_out[NO_RUN if request.gpus else NO_GPU] += 1
            continue
        gpu_s.append(request.gpus * request.run_s)
        if math.ceil(request.gpus) > most:
            left_out[TOO_LARGE] += 1
            continue
        kept.append(request)
        if len(kept) > MAX_JOBS:
            break
    logged = layout not in SIMULATED
    begin = min((request.at for request in kept), default=0.0) if logged else 0.0
    trace = _trace(path, (_job(path, request, begin) for request in kept), left_out)
    rounded = sum(not float(request.gpus).is_integer() for request in kept)
    return Imported(trace, gpu_s, left_out, rounded)


def _trace(path: Path, jobs: Iterable[TraceJob], left_out: Counter[str]) -> Trace:
    try:
        return build_trace(path.stem, path, jobs)
    except TraceError as error:
        if not left_out.total():
            raise
        why = "; ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise TraceError(f"{error.message} that can be imported ({why})", error.hint) from None


def _job(path: Path, request: Request, begin: float) -> TraceJob:
    slots = math.ceil(request.gpus)
    gpu_s = slots * (request.run_s or 0.0)
    if gpu_s > MAX_GPU_S:
        problem = f"{path}: job {request.name!r} used {gpu_s:g} GPU seconds"
        raise TraceError(problem, f"delete it; at most {MAX_GPU_S:g} can be simulated")
    return TraceJob(
        name=f"job-{request.name}" if request.name.isdecimal() else request.name,
        at=Seconds(request.at - begin),
        workload=f"{GPU_TIME}{gpu_s:.6g}",
        slots=slots,
        user=request.user,
    )


def layout_of(path: Path) -> Layout | Literal["journal"]:
    """Return the layout of a file, recognised by its first line."""
    if _begin(path).startswith(b"SQLite format 3\0"):
        return "journal"
    if _is_json(path):
        return "philly"
    first = first_line(path)
    if names_header(first, REQUIRED):
        return "pollux"
    fitting = [layout for layout, table in TABLES.items() if table.fits(first)]
    if fitting or _is_job_table(first):
        return fitting[0] if fitting else "pai2020"
    known = ", ".join(get_args(Layout))
    problem = f"{path}: its layout is not recognised from its first line"
    raise TraceError(problem, f"give --layout, one of journal, {known}", "layout")


def _begin(path: Path) -> bytes:
    """Return the first bytes of a file after a byte order mark and blanks."""
    try:
        with path.open("rb") as file:
            return file.read(1000).removeprefix(codecs.BOM_UTF8).lstrip()
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise TraceError(f"{str(path)!r}: {said}", "name a readable file") from None


def _is_json(path: Path) -> bool:
    return _begin(path).startswith((b"[", b"{"))


def _is_job_table(first: str) -> bool:
    cells = first.split(",")
    at = JOBS.index("start_time")
    return len(cells) == len(JOBS) and (
        cells[at] in {"", JOBS[at]} or bool(NUMBER.fullmatch(cells[at]))
    )


def _requests(path: Path, layout: Layout) -> Iterator[Request]:
    if layout == "philly" and _is_json(path):
        return _philly_json(path)
    if layout == "pai2020":
        return _pai_jobs(path)
    return _rows_of(path, TABLES[layout])


def _rows_of(path: Path, table: Table) -> Iterator[Request]:
    rows: Iterable[CsvRow] = filter(table.is_job, table.rows(path))
    if table.name and not table.in_parts:
        rows = unique(rows, table.name)
    for number, row in enumerate(rows):
        yield Request(
            name=row.text(table.name) if table.name else str(number),
            at=table.at(row),
            gpus=table.gpus(row) or 0.0,
            run_s=table.run_s(row),
            user=table.user(row),
        )


# --- layouts with jobs of several parts


def _pai_jobs(path: Path) -> Iterator[Request]:
    """Read a table of tasks, or a table of jobs with the table of tasks beside it.

    The GPUs of a job are the sum over its tasks. It runs from the start of its first task with GPUs
    to the end of the last one. Only the table of jobs has users and times of submission.
    """
    tasks, submitted = path, {}
    if _is_job_table(first_line(path)):
        tasks = path.with_name("pai_task_table.csv")
        for row in without_header(path, ",", {len(JOBS): JOBS}):
            if row.values["start_time"] not in {"", "start_time"}:
                submitted[row.text("job_name")] = row.number("start_time"), row.text("user")
    found: dict[str, Request] = {}
    for task in _rows_of(tasks, TABLES["pai2020"]):
        before = found.get(task.name)
        found[task.name] = task if before is None else _joined(before, task)
        if len(found) > MAX_READ_JOBS:
            raise TraceError(f"{tasks}: more than {MAX_READ_JOBS} jobs", "split the file")
    for name, job in found.items():
        at, user = submitted.get(name, (job.at, job.user))
        yield job._replace(at=at, user=user)


def _joined(one: Request, other: Request) -> Request:
    """Return the job with two parts; a part without GPUs is ignored if the other has some."""
    if not one.gpus or not other.gpus:
        return one if one.gpus else other
    begin, run_s = min(one.at, other.at), None
    if one.run_s is not None and other.run_s is not None:
        run_s = max(one.at + one.run_s, other.at + other.run_s) - begin
    return one._replace(at=begin, gpus=one.gpus + other.gpus, run_s=run_s)


class _Machine(msgspec.Struct):
    gpus: list[str]


class _Attempt(msgspec.Struct):
    detail: list[_Machine]
    start_time: str | None = None
    end_time: str | None = None


class _PhillyJob(msgspec.Struct):
    jobid: str
    submitted_time: str
    attempts: list[_Attempt]
    user: str = USER


def _philly_json(path: Path) -> Iterator[Request]:
    """Read `cluster_job_log` of https://github.com/msr-fiddle/philly-traces.

    The GPUs of a job are those of its largest attempt, and its GPU time is the sum over all
    attempts with a start and an end.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}", "name a readable file") from None
    if len(data) > MAX_JSON_BYTES:
        raise TraceError(f"{path}: more than {MAX_JSON_BYTES} bytes", "split the list of jobs")
    try:
        jobs = msgspec.json.decode(data.removeprefix(codecs.BOM_UTF8), type=list[_PhillyJob])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        problem = f"{path}: {str(error) or 'nested too deeply'}"
        raise TraceError(problem, "name a file like cluster_job_log, a list of jobs") from None
    del data
    rows = (
        CsvRow(f"{path}: job {number}", {"jobid": job.jobid, "user": job.user,
               "submitted_time": job.submitted_time})
        for number, job in enumerate(jobs)
    )  # fmt: skip
    for row, job in zip(unique(rows, "jobid"), jobs, strict=True):
        gpus = [sum(len(machine.gpus) for machine in one.detail) for one in job.attempts]
        gpu_s = sum(
            many * _attempt_s(row, one) for many, one in zip(gpus, job.attempts, strict=True)
        )
        most = max(gpus, default=0)
        yield Request(
            row.text("jobid"), row.time("submitted_time"), most, gpu_s / max(1, most),
            row.text("user"),
        )  # fmt: skip


def _attempt_s(row: CsvRow, attempt: _Attempt) -> float:
    """Return the seconds of an attempt; 0 if its start or its end is missing."""
    times = {"start_time": attempt.start_time, "end_time": attempt.end_time}
    known = {name: value for name, value in times.items() if value not in {None, "", "None"}}
    if known.keys() < times.keys():
        return 0.0
    each = CsvRow(row.place, {name: value or "" for name, value in known.items()})
    return max(0.0, each.time("end_time") - each.time("start_time"))
