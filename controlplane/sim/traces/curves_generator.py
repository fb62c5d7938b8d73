"""Traces of jobs that train recorded loss curves, as SLAQ's evaluation submits them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from numpy.random import default_rng

from controlplane.sim.models.curves.curves_model import WORK_CORE_S
from controlplane.sim.models.curves.loss_curves import LossCurve
from controlplane.sim.models.table2.constants import CRASHES, PATIENCE
from controlplane.sim.simulator_errors import TraceError
from controlplane.sim.submissions import Trace, TraceJob
from controlplane.sim.traces.table2_generator import arrival_process, shares
from schemas.ids import Seconds

USER_CORES: Final = (16, 32, 64)  # that a user asks for, where a policy gives fixed sizes; chosen


def generate_curves(
    curves: Iterable[LossCurve],
    *,
    jobs: int,
    seed: int,
    arrivals: str = "poisson",
    mean_interval_s: float = 15.0,
    crash_share: float = 0.0,
    cancel_share: float = 0.0,
    work_core_s: float = WORK_CORE_S,
    most_slots: int | None = None,
) -> Trace:
    """A trace that is the same for the same arguments.

    SLAQ section 3: 160 jobs "with different models, following a Poisson distribution (mean arrival
    time 15 s)". Each algorithm comes as often as any other, and each of its curves too.

    Args:
        arrivals: the name of a process of `controlplane.sim.traces.arrivals`.
        crash_share: of the jobs; their scripts fail once.
        cancel_share: of the jobs; their users give up.
        work_core_s: mean of their work, seconds on one core: how long users wait before that.
        most_slots: of the cluster; nobody asks for more.

    Raises:
        TraceError: if a number is out of range, or there is no such process.
    """
    if jobs < 1:
        raise TraceError(f"{jobs} jobs are no trace", "give at least 1", "jobs")
    families: dict[str, list[str]] = {}
    for curve in curves:
        families.setdefault(curve.family, []).append(curve.name)
    rngs = [default_rng((seed, number)) for number in range(5)]
    times = [float(at) for at in arrival_process(arrivals)(rngs[0], jobs, mean_interval_s)]
    drawn = rngs[1].random((jobs, 2))
    sizes = rngs[2].choice(USER_CORES, size=jobs)
    most = most_slots or max(USER_CORES)
    crashes = shares(rngs[3], jobs, crash_share, CRASHES)
    patience = shares(rngs[4], jobs, cancel_share, PATIENCE)
    return Trace(
        name=f"curves-{jobs}-{seed}",
        jobs=tuple(
            TraceJob(
                name=f"job-{number:04d}",
                at=Seconds(at),
                workload=_pick(_pick(list(families.values()), one), other),
                slots=min(int(size), most),
                crashes_at=crash,
                cancelled_after_s=None if waits is None else waits * work_core_s / int(size),
            )
            for number, (at, (one, other), size, crash, waits) in enumerate(
                zip(times, drawn.tolist(), sizes, crashes, patience, strict=True), 1
            )
        ),
    )


def _pick(options: list[Any], share: float) -> Any:
    return options[int(share * len(options))]
