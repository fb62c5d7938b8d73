"""The 50 workloads by name, and how long they take a user who keeps to a tuned batch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from controlplane.sim.models.job_model import packed
from controlplane.sim.models.table2.constants import (
    ABOVE_TARGET,
    GPUS_PER_NODE,
    ROWS,
    SIZES,
    Row,
)
from controlplane.sim.models.table2.convergence import efficiency, noise_scale
from controlplane.sim.models.table2.step_time import step_s
from controlplane.sim.simulator_errors import TraceError


@dataclass(frozen=True, slots=True)
class Workload:
    """A model on a data set of one size."""

    name: str
    application: str  # key of `ROWS`
    row: Row
    samples: int  # ||D||


def _named(application: str, row: Row, samples: int) -> Workload:
    return Workload(f"{application}-{samples / 1000:g}k", application, row, samples)


WORKLOADS: Final[Mapping[str, Workload]] = {
    workload.name: workload
    for application, row in ROWS.items()
    for samples in SIZES[application.partition("-")[2]]
    for workload in [_named(application, row, samples)]
}


def workload_of(name: str) -> Workload:
    """The workload of that name.

    Args:
        name: the application, a dash, its samples in thousands, and k.

    Raises:
        TraceError: if there is none.
    """
    if name in WORKLOADS:
        return WORKLOADS[name]
    near = difflib.get_close_matches(name, WORKLOADS, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else f"one of them is {next(iter(WORKLOADS))}"
    raise TraceError(f"{name!r} is no workload of Table 2", hint, "workload")


@cache
def duration_s(name: str, slots: int) -> float:
    """Seconds that a workload trains on so many packed slots, with the batch tuned for them.

    Without its start, and without the differences between jobs.

    Args:
        slots: on as few nodes as possible.

    Raises:
        TraceError: if there is no such workload.
    """
    workload = workload_of(name)
    row, batch = workload.row, workload.row.tuned * slots
    seconds_per_sample = step_s(row, packed(slots, GPUS_PER_NODE), batch) / batch
    return sum(
        workload.samples
        * seconds_per_sample
        / efficiency(row, batch, noise_scale(row, epoch / row.epochs))
        for epoch in range(row.epochs + ABOVE_TARGET)
    )


def closest(gpu_seconds: float, slots: int) -> str:
    """The workload with the closest GPU time (ONES, appendix).

    Args:
        gpu_seconds: slots times seconds.
        slots: that it trains on.
    """
    return min(WORKLOADS, key=lambda name: abs(slots * duration_s(name, slots) - gpu_seconds))
