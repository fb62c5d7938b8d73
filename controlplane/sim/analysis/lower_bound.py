"""How small the average completion time of a trace could be, whatever the policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from controlplane.sim.analysis.fluid_bound import fluid_srpt
from controlplane.sim.analysis.min_cost import MinCost, known_throughput, min_cost
from controlplane.sim.models.job_model import TrainingModel
from controlplane.sim.submissions import TraceJob


def lower_bound_s(
    jobs: Sequence[TraceJob],
    model: TrainingModel,
    *,
    slots: int,
    widest: int,
    fastest: float,
    seed: int,
) -> float | None:
    """No schedule of these jobs on these slots has a smaller average completion time.

    Args:
        jobs: that are counted; the others enter as if they needed nothing.
        fastest: speed of its fastest GPU, relative to the one that the model describes.
        seed: of everything that differs from job to job.

    Returns:
        Seconds; None if there are no jobs, or some crash or are cancelled.
    """
    if not jobs or any(
        job.crashes_at is not None or job.cancelled_after_s is not None for job in jobs
    ):
        return None
    costs = _min_costs(jobs, model, slots=slots, widest=widest, seed=seed)
    return fluid_srpt(
        np.array([float(job.at) for job in jobs]),
        np.array([cost.slot_s for cost in costs]) / fastest,
        np.array([cost.slot_s / cost.least_s for cost in costs]),
        float(slots),
    )


def _min_costs(
    jobs: Sequence[TraceJob], model: TrainingModel, *, slots: int, widest: int, seed: int
) -> list[MinCost]:
    """The least that each job can cost, worked out once for those that are alike."""
    known: dict[tuple[str, int, int, int, float], MinCost] = {}
    batches: dict[tuple[str, int, int], int] = {}
    costs = []
    for job in jobs:
        job_model = model.job_model(job, "elastic", seed=seed)
        tuned = (job.workload, job.slots, job.batch)
        if tuned not in batches:
            batches[tuned] = model.job_model(job, "fixed", seed=seed).spec.batch_size
        # A batch that is not above the limit lies between those that are tried.
        beyond = batches[tuned] > job_model.spec.batch_limit
        fixed = batches[tuned] if beyond else 0
        alone = known_throughput(job_model, 1, job_model.spec.batch_size, 0, widest)
        speed = alone.samples_per_s if alone else 0.0
        key = (job.workload, job_model.epochs, job_model.epoch_samples, fixed, speed)
        if key not in known:
            known[key] = min_cost(job_model, fixed, slots, widest)
        costs.append(known[key])
    return costs
