"""Files of traces: our own CSV layout, and importers of other projects' traces.

Our columns are `name,time,application,num_replicas,batch_size`. Workloads of the artifact of
*Pollux* (OSDI '21) have the same columns. Optional columns are
`user,cancelled_after_s,crashes_at,samples,value,deadline_s,decay`. An empty optional cell means the
default value.

No foreign trace has enough data to train the same jobs. The workload of an imported job is
therefore `gpu-time:SECONDS`, its slots times its duration. The model replaces it by the workload
with the closest GPU time, as the ONES paper does with Microsoft's trace. Names of models are not
used: a `vgg19` or `LM` in these traces trains other data for another number of steps.

The durations of Gavel's jobs are computed from the speeds of single, consolidated jobs on V100 in
`simulation_throughputs.json` of https://github.com/stanford-futuredata/gavel (MIT), with four
significant digits; Narayanan et al., *Heterogeneity-Aware Cluster Scheduling Policies for Deep
Learning Workloads*, OSDI '20.

A file that cannot be read or written, and a line that is not a job, raise `TraceError`, which names
file, line and column.
"""

from __future__ import annotations

import csv
import datetime as dt
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Final, Literal

from controlplane.sim.cluster import TraceError
from controlplane.sim.csv_parsing import CsvRow, parse_line, with_header, without_header
from controlplane.sim.models.recording import write_whole
from controlplane.sim.models.table2 import GPU_TIME
from controlplane.sim.results import Trace, TraceJob
from schemas.ids import Seconds
from schemas.jobs import MAX_UTILITY, Utility

REQUIRED: Final = ("name", "time", "application", "num_replicas", "batch_size")
OPTIONAL: Final = (
    "user", "cancelled_after_s", "crashes_at", "samples", "value", "deadline_s", "decay"
)  # fmt: skip
MAX_SLOTS: Final = 1_000_000
MIN_DEADLINE_S: Final = 1e-3
MIN_SHARE: Final = 1e-9  # smallest share of a job's work before and after a crash


def read_trace(path: Path) -> Trace:
    """Read a trace, sorted by time; its name is the file name without the suffix."""
    return build_trace(path.stem, path, map(_job, with_header(path, REQUIRED, OPTIONAL)))


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace atomically; `read_trace` returns an equal trace."""
    columns = [*REQUIRED, *(column for column in OPTIONAL if _is_used(column, trace.jobs))]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for line, job in enumerate(trace.jobs, start=2):
        row = io.StringIO()
        csv.writer(row, lineterminator="").writerow(_cells(job)[column] for column in columns)
        if _job(parse_line(str(path), line, row.getvalue(), columns)) != job:
            problem = f"{path}:{line}: job {job.name!r} would not be read back equal"
            hint = "leave out blanks around names, and fractions of whole numbers"
            raise TraceError(problem, hint)
        text.write(row.getvalue() + "\n")
    build_trace(trace.name, path, trace.jobs)
    write_whole(path, text.getvalue(), TraceError)


def build_trace(name: str, path: Path, jobs: Iterable[TraceJob]) -> Trace:
    """Return a trace of the jobs, sorted by time; simultaneous jobs stay in the given order."""
    found: dict[str, TraceJob] = {}
    for job in jobs:
        if job.name in found:
            problem = f"{path}: column name: two jobs are called {job.name!r}"
            raise TraceError(problem, "give every job a name of its own", "name")
        found[job.name] = job
    if not found:
        raise TraceError(f"{path}: no jobs", "write one job on each line below the header")
    return Trace(name=name, jobs=tuple(sorted(found.values(), key=lambda job: job.at)))


def _job(row: CsvRow) -> TraceJob:
    shares = (MIN_SHARE, 1.0 - MIN_SHARE)
    return TraceJob(
        name=row.text("name"),
        at=Seconds(row.number("time")),
        workload=row.text("application"),
        slots=row.whole("num_replicas", 1, MAX_SLOTS),
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
    return Utility(
        value=row.number("value", 0.0, MAX_UTILITY),
        deadline_s=row.number("deadline_s", MIN_DEADLINE_S) if row.given("deadline_s") else inf,
        decay=row.number("decay") if row.given("decay") else 0.0,
    )


def _cells(job: TraceJob) -> dict[str, str]:
    worth = job.utility
    numbers = {
        "time": job.at, "num_replicas": job.slots, "batch_size": job.batch,
        "cancelled_after_s": job.cancelled_after_s, "crashes_at": job.crashes_at,
        "samples": job.samples, "value": worth.value if worth else None,
        "deadline_s": worth.deadline_s if worth and worth.deadline_s < inf else None,
        "decay": worth.decay if worth else None,
    }  # fmt: skip
    texts = {"name": job.name, "application": job.workload, "user": job.user}
    return texts | {column: _plain(number) for column, number in numbers.items()}


def _plain(number: float | None) -> str:
    """Format a number without loss and without a trailing `.0`."""
    return "" if number is None else repr(number).removesuffix(".0")


def _is_used(column: str, jobs: Iterable[TraceJob]) -> bool:
    return any(_cells(job)[column] != ("", "trace")[column == "user"] for job in jobs)


# Workload -> GPUs -> steps per second. Column `total_steps` of the traces has the same steps.
# fmt: off
STEPS_PER_S: Final[Mapping[str, Mapping[int, float]]] = {
    "A3C": {1: 7.176},
    "CycleGAN": {1: 4.426},
    "LM (batch size 5)": {1: 109.2, 2: 185.7, 4: 126.7, 8: 698.8},
    "LM (batch size 10)": {1: 81.65, 2: 163.1, 4: 121.5, 8: 615.1},
    "LM (batch size 20)": {1: 64.74, 2: 132.2, 4: 111, 8: 497.3},
    "LM (batch size 40)": {1: 45.24, 2: 91.59, 4: 96.03, 8: 359.3},
    "LM (batch size 80)": {1: 28.24, 2: 58.09, 4: 74.81, 8: 231.2},
    "Recommendation (batch size 512)": {1: 23.32},
    "Recommendation (batch size 1024)": {1: 13.28},
    "Recommendation (batch size 2048)": {1: 7.47},
    "Recommendation (batch size 4096)": {1: 3.906},
    "Recommendation (batch size 8192)": {1: 2.842},
    "ResNet-18 (batch size 16)": {1: 32.35, 2: 100.1, 4: 123.9, 8: 382.6},
    "ResNet-18 (batch size 32)": {1: 29.95, 2: 94.25, 4: 114.7, 8: 340},
    "ResNet-18 (batch size 64)": {1: 24.09, 2: 74.14, 4: 95.59, 8: 255.8},
    "ResNet-18 (batch size 128)": {1: 17.99, 2: 23.99, 4: 69.95, 8: 162.1},
    "ResNet-18 (batch size 256)": {1: 10.3, 2: 15.88, 4: 27.78, 8: 81.51},
    "ResNet-50 (batch size 16)": {1: 11.4, 2: 13.86, 4: 23.2, 8: 27.8},
    "ResNet-50 (batch size 32)": {1: 7.787, 2: 10.83, 4: 13.76, 8: 24.07},
    "ResNet-50 (batch size 64)": {1: 4.395, 2: 7.922, 4: 9.452, 8: 17.3},
    "ResNet-50 (batch size 128)": {1: 2.497, 2: 4.223, 4: 7.029, 8: 10.29},
    "Transformer (batch size 16)": {1: 11.06, 2: 14.15, 4: 20.08, 8: 71.65},
    "Transformer (batch size 32)": {1: 10.62, 2: 13.33, 4: 22.82, 8: 63.98},
    "Transformer (batch size 64)": {1: 8.618, 2: 15.88, 4: 19.66, 8: 49.65},
    "Transformer (batch size 128)": {1: 5.446, 2: 10.07, 4: 14.17, 8: 30.88},
    "Transformer (batch size 256)": {1: 1.595, 2: 2.885, 4: 4.763, 8: 9.717},
}
# fmt: on


Layout = Literal["pollux", "gavel", "tiresias", "philly"]

TIRESIAS: Final = ("job_id", "num_gpu", "submit_time", "duration")
TIRESIAS_OPTIONAL: Final = ("iterations", "model_name", "interval")
PHILLY: Final = ("timestamp", "duration", "num_gpus")
PHILLY_OPTIONAL: Final = ("gpu_time", "cluster")
# Layouts of Gavel's simulator, newest first. In the layout of nine columns, the command contains
# the directory. The layout of seven columns has no priorities.
GAVEL: Final[Mapping[int, tuple[str, ...]]] = {
    10: (
        *("job_type", "command", "working_directory", "num_steps_arg", "needs_data_dir"),
        *("total_steps", "scale_factor", "priority_weight", "SLO", "arrival_time"),
    ),
    9: (
        *("job_type", "command", "num_steps_arg", "needs_data_dir", "total_steps"),
        *("scale_factor", "priority_weight", "SLO", "arrival_time"),
    ),
    7: (
        *("job_type", "command", "num_steps_arg", "needs_data_dir", "total_steps"),
        *("arrival_time", "scale_factor"),
    ),
}
TIME_FORMAT: Final = "%Y-%m-%d %H:%M:%S"


def import_trace(path: Path, layout: Layout, *, most_slots: int | None = None) -> Trace:
    """Read the jobs of a foreign trace, except jobs that need more than `most_slots` slots."""
    jobs = _JOBS[layout](path)
    fitting = (job for job in jobs if most_slots is None or job.slots <= most_slots)
    return build_trace(path.stem, path, fitting)


def _tiresias(path: Path) -> Iterator[TraceJob]:
    """Read traces such as `60_job.csv` of https://github.com/SymbioticLab/Tiresias."""
    for row in with_header(path, TIRESIAS, TIRESIAS_OPTIONAL):
        slots = row.whole("num_gpu", 1, MAX_SLOTS)
        yield TraceJob(
            name=f"job-{row.text('job_id')}",
            at=Seconds(row.number("submit_time")),
            workload=_workload(row, "duration", slots * row.number("duration")),
            slots=slots,
        )


def _philly(path: Path) -> Iterator[TraceJob]:
    """Read Microsoft's trace in the layout of Pollux' artifact; the first job is submitted at 0."""
    timed = []
    for row in with_header(path, PHILLY, PHILLY_OPTIONAL):
        slots = row.whole("num_gpus", 1, MAX_SLOTS)
        workload = _workload(row, "duration", slots * row.number("duration"))
        timed.append((_parse_time(row), slots, workload))
    begin = min((at for at, _, _ in timed), default=None)
    for number, (at, slots, workload) in enumerate(timed):
        since = Seconds((at - (begin or at)).total_seconds())
        yield TraceJob(name=f"job-{number}", at=since, workload=workload, slots=slots)


def _gavel(path: Path) -> Iterator[TraceJob]:
    """Read traces of https://github.com/stanford-futuredata/gavel, at the speed of V100 GPUs."""
    for number, row in enumerate(without_header(path, "\t", GAVEL)):
        slots = row.whole("scale_factor", 1, MAX_SLOTS)
        duration = row.whole("total_steps", 1) / _steps_per_s(row, slots)
        yield TraceJob(
            name=f"job-{number}",
            at=Seconds(row.number("arrival_time")),
            workload=_workload(row, "total_steps", slots * duration),
            slots=slots,
        )


def _steps_per_s(row: CsvRow, slots: int) -> float:
    """Return steps per second; an unmeasured size scales linearly from the next smaller one."""
    kind = row.text("job_type")
    if kind not in STEPS_PER_S:
        some = ", ".join(list(STEPS_PER_S)[:3])
        hint = f"use workloads that Gavel measured, like {some}"
        raise row.error("job_type", f"{kind!r} is unknown", hint)
    measured = STEPS_PER_S[kind]
    nearest = max(size for size in measured if size <= slots)
    return measured[nearest] * slots / nearest


def _workload(row: CsvRow, column: str, gpu_time_s: float) -> str:
    if not gpu_time_s > 0.0:
        raise row.error(column, "a job without duration", "delete the line")
    return f"{GPU_TIME}{gpu_time_s:.6g}"


def _parse_time(row: CsvRow) -> dt.datetime:
    said = row.text("timestamp")
    try:
        return dt.datetime.strptime(said, TIME_FORMAT)  # noqa: DTZ007 - only differences matter
    except ValueError:
        hint = "write it like 2017-10-09 07:01:55"
        raise row.error("timestamp", f"{said!r} is not a time", hint) from None


_JOBS: Final[Mapping[Layout, Callable[[Path], Iterable[TraceJob]]]] = {
    "pollux": lambda path: read_trace(path).jobs,
    "gavel": _gavel,
    "tiresias": _tiresias,
    "philly": _philly,
}
