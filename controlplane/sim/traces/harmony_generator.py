"""Traces of Harmony's testbed: random models, workers and servers, three patterns of arrival."""

from __future__ import annotations

from typing import Final, Literal

from numpy.random import Generator, default_rng

from controlplane.sim.models.harmony.harmony_model import BATCHES, JOB_S
from controlplane.sim.models.interference.demands import demand_of
from controlplane.sim.models.table2.constants import CRASHES, PATIENCE
from controlplane.sim.simulator_errors import TraceError
from controlplane.sim.submissions import Trace, TraceJob
from controlplane.sim.traces.table2_generator import arrival_process, shares
from schemas.ids import Seconds

Exchange = Literal["servers", "all-reduce", "mixed"]
MOST_WORKERS: Final = 3
SPREAD: Final = 0.5  # of the logarithm of a job's length; chosen


def generate_harmony(
    *,
    jobs: int,
    seed: int,
    arrivals: str = "poisson",
    mean_interval_s: float,
    exchange: Exchange = "servers",
    job_s: float = JOB_S,
    crash_share: float = 0.0,
    cancel_share: float = 0.0,
    most_slots: int | None = None,
) -> Trace:
    """A trace that is the same for the same arguments.

    "Randomly select a job from the 6 jobs and set its required number of workers and PSs randomly
    in [1, 3]" (evaluation, workloads).

    Args:
        arrivals: the name of a process of `controlplane.sim.traces.arrivals`.
        exchange: of gradients: with parameter servers, all-reduce, or either for half of the jobs.
        job_s: mean over jobs of the seconds that they train by themselves.
        crash_share: of the jobs; their scripts fail once.
        cancel_share: of the jobs; their users give up.
        most_slots: of the cluster; nobody asks for more.

    Raises:
        TraceError: if a number is out of range, or there is no such process.
    """
    if jobs < 1:
        raise TraceError(f"{jobs} jobs are no trace", "give at least 1", "jobs")
    rngs = [default_rng((seed, number)) for number in range(7)]
    times = [float(at) for at in arrival_process(arrivals)(rngs[0], jobs, mean_interval_s)]
    models = [str(name) for name in rngs[1].choice(tuple(BATCHES), size=jobs)]
    workers = rngs[2].integers(1, min(MOST_WORKERS, most_slots or MOST_WORKERS) + 1, size=jobs)
    servers = _servers(rngs[3], jobs, exchange)
    lengths = job_s * rngs[4].lognormal(-(SPREAD**2) / 2.0, SPREAD, size=jobs)  # that mean
    crashes = shares(rngs[5], jobs, crash_share, CRASHES)
    patience = shares(rngs[6], jobs, cancel_share, PATIENCE)
    return Trace(
        name=f"harmony-{exchange}-{jobs}-{seed}",
        jobs=tuple(
            TraceJob(
                name=f"job-{number:04d}",
                at=Seconds(at),
                workload=f"{model}-{ps}ps" if ps else model,
                slots=int(many),
                samples=round(length * BATCHES[model] * int(many) / demand_of(model).step_s),
                crashes_at=crash,
                cancelled_after_s=None if waits is None else waits * float(length),
            )
            for number, (at, model, many, ps, length, crash, waits) in enumerate(
                zip(times, models, workers, servers, lengths, crashes, patience, strict=True), 1
            )
        ),
    )


def _servers(rng: Generator, jobs: int, exchange: Exchange) -> list[int]:
    """Of each job; 0: all-reduce."""
    drawn = rng.integers(1, MOST_WORKERS + 1, size=jobs)
    uses = rng.random(jobs) < {"servers": 1.0, "all-reduce": 0.0, "mixed": 0.5}[exchange]
    return [int(many) if used else 0 for many, used in zip(drawn, uses, strict=True)]
