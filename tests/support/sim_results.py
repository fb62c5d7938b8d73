"""Results of simulations that name only what matters."""

from __future__ import annotations

import msgspec

from controlplane.sim.results import JobResult, SimulationResult
from schemas.ids import Seconds


def job_result(name: str, jct: float | None, at: float = 0.0, **changes: object) -> JobResult:
    """A job that waited for a quarter of its time; with None it did not end."""
    made = JobResult(
        job=name,
        application="bert",
        submitted_at=Seconds(at),
        started_at=Seconds(at),
        ended_at=None if jct is None else Seconds(at + jct),
        state="running" if jct is None else "succeeded",
        queued_s=(jct or 0.0) / 4,
        exec_s=(jct or 0.0) * 3 / 4,
        slot_s=jct or 0.0,
        rescales=2,
        batch_changes=0,
    )
    return msgspec.structs.replace(made, **changes)


def result(
    *jobs: JobResult, policy: str = "ones", seed: int = 5, **changes: object
) -> SimulationResult:
    """A simulation of these jobs on four slots."""
    made = SimulationResult(
        policy=policy,
        options={},
        setting={"physics": "table2"},
        seed=seed,
        slots=4,
        jobs=jobs,
        ended_at=Seconds(max((job.ended_at or 0.0 for job in jobs), default=0.0)),
        busy_slot_s=100.0,
        decisions_ms=(1.0, 3.0),
        events=70,
        wall_s=0.5,
    )
    return msgspec.structs.replace(made, **changes)


def times(policy: str, *jct: float, seed: int = 5) -> SimulationResult:
    """A result of jobs with these completion times."""
    jobs = [job_result(f"job-{index}", value) for index, value in enumerate(jct)]
    return result(*jobs, policy=policy, seed=seed)
