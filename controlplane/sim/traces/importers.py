"""Traces of other projects as ours.

None of them says enough to train the very same jobs, so a job's workload is `gpu-time:SECONDS`,
its slots times its duration, for which the model takes the workload with the closest GPU time
(as the ONES paper does with the trace of Microsoft). Names of models are not mapped: what is
called `vgg19` or `LM` there runs on other data for another number of steps, and its GPU time says
more about it than its name. Batch sizes are those of the workload that is taken.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, Literal, get_args

from controlplane.sim.csv_parsing import CsvRow, with_header, without_header
from controlplane.sim.simulator_errors import TraceError
from controlplane.sim.submissions import Trace, TraceJob
from controlplane.sim.traces.gavel_speeds import STEPS_PER_S
from controlplane.sim.traces.trace_csv import MOST_SLOTS, build_trace, read_trace
from schemas.ids import Seconds

Layout = Literal["pollux", "gavel", "tiresias", "philly"]
GPU_TIME: Final = "gpu-time:"  # begins the workload of a job that only a duration is known of

TIRESIAS: Final = ("job_id", "num_gpu", "submit_time", "duration")
TIRESIAS_TOO: Final = ("iterations", "model_name", "interval")
PHILLY: Final = ("timestamp", "duration", "num_gpus")
PHILLY_TOO: Final = ("gpu_time", "cluster")
# As the simulator of Gavel reads them, newest first, and as its oldest traces are. Those of nine
# columns say where to work inside the command, those of seven know no priorities.
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
CLOCK: Final = "%Y-%m-%d %H:%M:%S"


def import_trace(path: Path, layout: Layout, *, most_slots: int | None = None) -> Trace:
    """The jobs of a foreign trace.

    Args:
        most_slots: of the cluster: larger jobs are left out. None: all are taken.

    Raises:
        TraceError: if the layout is unknown, the file cannot be read, a line is no job (it names
            file, line and column), or no job is left.
    """
    if layout not in get_args(Layout):
        hint = f"choose one of {', '.join(get_args(Layout))}"
        raise TraceError(f"unknown layout {layout!r}", hint, "layout")
    jobs = _JOBS[layout](path)
    fitting = (job for job in jobs if most_slots is None or job.slots <= most_slots)
    return build_trace(path.stem, path, fitting)


def _pollux(path: Path) -> Iterator[TraceJob]:
    yield from read_trace(path).jobs


def _tiresias(path: Path) -> Iterator[TraceJob]:
    """`60_job.csv` and its like in https://github.com/SymbioticLab/Tiresias."""
    for row in with_header(path, TIRESIAS, TIRESIAS_TOO):
        slots = row.whole("num_gpu", 1, MOST_SLOTS)
        yield TraceJob(
            name=f"job-{row.text('job_id')}",
            at=Seconds(row.number("submit_time")),
            workload=_workload(row, "duration", slots * row.number("duration")),
            slots=slots,
        )


def _philly(path: Path) -> Iterator[TraceJob]:
    """The trace of Microsoft as the artifact of Pollux has it; the first job comes at 0."""
    timed = []
    for row in with_header(path, PHILLY, PHILLY_TOO):
        slots = row.whole("num_gpus", 1, MOST_SLOTS)
        workload = _workload(row, "duration", slots * row.number("duration"))
        timed.append((_clock(row), slots, workload))
    begin = min((at for at, _, _ in timed), default=None)
    for number, (at, slots, workload) in enumerate(timed):
        since = Seconds((at - (begin or at)).total_seconds())
        yield TraceJob(name=f"job-{number}", at=since, workload=workload, slots=slots)


def _gavel(path: Path) -> Iterator[TraceJob]:
    """Traces of https://github.com/stanford-futuredata/gavel: steps at the speed of V100s."""
    for number, row in enumerate(without_header(path, "\t", GAVEL)):
        slots = row.whole("scale_factor", 1, MOST_SLOTS)
        duration = row.whole("total_steps", 1) / _steps_per_s(row, slots)
        yield TraceJob(
            name=f"job-{number}",
            at=Seconds(row.number("arrival_time")),
            workload=_workload(row, "total_steps", slots * duration),
            slots=slots,
        )


def _steps_per_s(row: CsvRow, slots: int) -> float:
    """Of a size that was not measured: as if it scaled from the next smaller one."""
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
        raise row.error(column, "a job of no duration", "delete the line")
    return f"{GPU_TIME}{gpu_time_s:.6g}"


def _clock(row: CsvRow) -> dt.datetime:
    said = row.text("timestamp")
    try:
        return dt.datetime.strptime(said, CLOCK)  # noqa: DTZ007 - only differences matter
    except ValueError:
        hint = "write it like 2017-10-09 07:01:55"
        raise row.error("timestamp", f"{said!r} is no time", hint) from None


_JOBS: Final[Mapping[Layout, Callable[[Path], Iterator[TraceJob]]]] = {
    "pollux": _pollux,
    "gavel": _gavel,
    "tiresias": _tiresias,
    "philly": _philly,
}
