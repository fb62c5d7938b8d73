"""Layouts of foreign traces: the columns with a job's name, submission, GPUs, run time and user.

`docs/simulator/traces.md` lists the layouts. Run times of Gavel's jobs are computed from the speeds
of single, consolidated jobs on V100 in `simulation_throughputs.json` of
https://github.com/stanford-futuredata/gavel (MIT), with four significant digits; Narayanan et al.,
*Heterogeneity-Aware Cluster Scheduling Policies for Deep Learning Workloads*, OSDI '20.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from controlplane.sim.csv_parsing import (
    BLANKS,
    DELIMITERS,
    NUMBER,
    CsvRow,
    with_header,
    without_header,
)
from controlplane.sim.traces.trace_csv import MAX_SLOTS, USER

Layout = Literal[
    "pollux", "sia", "gavel", "shockwave", "tiresias", "philly", "helios", "pai2020", "openb2023",
    "swf",
]  # fmt: skip
Number = Callable[[CsvRow], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Layout of a table with one job on each line."""

    header: tuple[str, ...] = ()  # columns that the first line must name; empty: no header
    unused: tuple[str, ...] = ()  # other columns that it may name
    columns: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # without a header
    delimiter: str = ","  # without a header
    name: str = ""  # column of the names; empty: jobs are numbered from 0
    in_parts: bool = False  # True: several lines can have the name of the same job
    at: Callable[[CsvRow], float]  # seconds
    gpus: Number  # can be a fraction
    run_s: Number  # seconds; None: unknown
    user: Callable[[CsvRow], str] = lambda _: USER
    is_job: Callable[[CsvRow], bool] = lambda _: True  # False: the line is ignored

    def rows(self, path: Path) -> Iterator[CsvRow]:
        """Yield the rows of a file."""
        if self.header:
            yield from with_header(path, self.header, self.unused)
            return
        for row in without_header(path, self.delimiter, self.columns):
            if tuple(row.values) != tuple(row.values.values()):  # some copies have a header
                yield row

    def fits(self, first: str) -> bool:
        """True if the first line of a file can be one of this layout."""
        if self.header:
            return names_header(first, self.header)
        cells = [cell.strip() for cell in first.split(self.delimiter or None)]
        names = self.columns.get(len(cells), ())
        times = [cell for name, cell in zip(names, cells, strict=False) if name in TIMES]
        numbers = all(NUMBER.fullmatch(cell or "0") for cell in times)
        return bool(times) and (numbers or tuple(cells) == names)


def names_header(first: str, columns: Iterable[str]) -> bool:
    """True if a line names all of the columns, with any of the usual delimiters."""
    named = {cell.strip().strip('"').lower() for cell in re.split(f"[{DELIMITERS}]", first)}
    return named.issuperset(columns)


def _number(column: str) -> Callable[[CsvRow], float]:
    return lambda row: row.number(column)


def _gpus(column: str) -> Number:
    return lambda row: row.whole(column, 0, MAX_SLOTS)


def _between(start: str, end: str) -> Number:
    """Return a function for the time between two columns; one of them can be empty."""

    def run_s(row: CsvRow) -> float | None:
        if not row.given(start) or not row.given(end):
            return None
        return max(0.0, row.number(end) - row.number(start))

    return run_s


def _known(row: CsvRow, column: str) -> float | None:
    """Return a number of the Standard Workload Format, in which -1 means unknown."""
    return None if row.number(column, -1.0) == -1.0 else row.number(column)


def _share(row: CsvRow) -> float:
    """Return the GPUs of a pod; only a pod with one GPU can share it."""
    gpus = row.whole("num_gpu", 0, MAX_SLOTS)
    return row.number("gpu_milli", 0.0, 1000.0) / 1000.0 if gpus == 1 else gpus


def _instances(row: CsvRow) -> float:
    """Return the GPUs of a task: the percentage of each instance, times the instances."""
    if not row.given("plan_gpu") or not row.given("inst_num"):
        return 0.0
    return row.number("inst_num", 0.0, MAX_SLOTS) * row.number("plan_gpu") / 100.0


def _gavel_run_s(row: CsvRow) -> float:
    """Return the run time on V100; an unmeasured size scales linearly from the next smaller one."""
    kind, slots = row.text("job_type"), row.whole("scale_factor", 1, MAX_SLOTS)
    if kind not in STEPS_PER_S:
        some = ", ".join(list(STEPS_PER_S)[:3])
        hint = f"use workloads that Gavel measured, like {some}"
        raise row.error("job_type", f"{kind!r} is unknown", hint)
    measured = STEPS_PER_S[kind]
    nearest = max(size for size in measured if size <= slots)
    return row.whole("total_steps", 1) / (measured[nearest] * slots / nearest)


OWN: Final = frozenset({"pollux", "sia"})  # layouts with the columns of `trace_csv`
SIMULATED: Final = frozenset({"gavel", "shockwave", "tiresias"})  # time 0 is their begin
TIMES: Final = frozenset({"arrival_time", "submit_time", "start_time"})
GAVEL: Final = ("job_type", "command", "working_directory", "num_steps_arg", "needs_data_dir")
TASKS: Final = (
    *("job_name", "task_name", "inst_num", "status", "start_time", "end_time"),
    *("plan_cpu", "plan_mem", "plan_gpu", "gpu_type"),
)
SWF: Final = (
    *("job_number", "submit_time", "wait_time", "run_time", "allocated_processors"),
    *("average_cpu_time", "used_memory", "requested_processors", "requested_time"),
    *("requested_memory", "status", "user_id", "group_id", "executable", "queue", "partition"),
    *("preceding_job", "think_time"),
)
SWF_PARTS: Final = ("2", "3", "4")  # status of a line with a part of a job

TABLES: Final[Mapping[Layout, Table]] = {
    # https://github.com/SymbioticLab/Tiresias
    "tiresias": Table(
        header=("job_id", "num_gpu", "submit_time", "duration"),
        unused=("iterations", "model_name", "interval"),
        name="job_id",
        at=_number("submit_time"),
        gpus=_gpus("num_gpu"),
        run_s=_number("duration"),
    ),
    # Microsoft's log, as in https://github.com/petuum/adaptdl
    "philly": Table(
        header=("timestamp", "duration", "num_gpus"),
        unused=("gpu_time", "cluster"),
        at=lambda row: row.time("timestamp"),
        gpus=_gpus("num_gpus"),
        run_s=_number("duration"),
    ),
    # https://github.com/S-Lab-System-Group/HeliosData
    "helios": Table(
        header=("job_id", "gpu_num", "submit_time", "duration"),
        unused=(
            *("user", "vc", "cpu_num", "node_num", "state", "start_time", "end_time", "queue"),
        ),
        name="job_id",
        at=lambda row: row.time("submit_time"),
        gpus=_gpus("gpu_num"),
        run_s=_number("duration"),
        user=lambda row: row.text("user") if row.given("user") else USER,
    ),
    # https://github.com/alibaba/clusterdata, cluster-trace-gpu-v2023
    "openb2023": Table(
        header=(
            *("name", "num_gpu", "gpu_milli", "creation_time", "deletion_time", "scheduled_time"),
        ),
        unused=("cpu_milli", "memory_mib", "gpu_spec", "qos", "pod_phase"),
        name="name",
        at=_number("creation_time"),
        gpus=_share,
        run_s=_between("scheduled_time", "deletion_time"),
    ),
    # https://github.com/alibaba/clusterdata, cluster-trace-gpu-v2020; a line is a task
    "pai2020": Table(
        columns={len(TASKS): TASKS},
        name="job_name",
        in_parts=True,
        at=lambda row: row.number("start_time") if row.given("start_time") else 0.0,
        gpus=_instances,
        run_s=_between("start_time", "end_time"),
    ),
    # https://github.com/uw-mad-dash/shockwave
    "shockwave": Table(
        columns={
            12: (
                *GAVEL, "total_steps", "scale_factor", "mode", "priority_weight", "SLO",
                "duration", "arrival_time",
            )
        },
        delimiter="\t",
        at=_number("arrival_time"),
        gpus=_gpus("scale_factor"),
        run_s=_number("duration"),
    ),
    # https://github.com/stanford-futuredata/gavel, newest layout first. In the layout of nine
    # columns, the command contains the directory. The layout of seven columns has no priorities.
    "gavel": Table(
        columns={
            10: (*GAVEL, "total_steps", "scale_factor", "priority_weight", "SLO", "arrival_time"),
            9: (
                *GAVEL[:2], *GAVEL[3:], "total_steps", "scale_factor", "priority_weight", "SLO",
                "arrival_time",
            ),
            7: (*GAVEL[:2], *GAVEL[3:], "total_steps", "arrival_time", "scale_factor"),
        },
        delimiter="\t",
        at=_number("arrival_time"),
        gpus=_gpus("scale_factor"),
        run_s=_gavel_run_s,
    ),
    # https://www.cs.huji.ac.il/labs/parallel/workload/swf.html
    "swf": Table(
        columns={len(SWF): SWF},
        delimiter=BLANKS,
        name="job_number",
        at=_number("submit_time"),
        gpus=lambda row: (
            _known(row, "allocated_processors") or _known(row, "requested_processors")
        ),
        run_s=lambda row: _known(row, "run_time"),
        user=lambda row: USER if _known(row, "user_id") is None else f"user-{row.text('user_id')}",
        is_job=lambda row: row.values["status"] not in SWF_PARTS,
    ),
}  # fmt: skip


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
