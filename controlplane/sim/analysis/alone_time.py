"""How long a job takes with the cluster to itself, as its user submitted it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from controlplane.sim.analysis.min_cost import known_throughput
from controlplane.sim.models.job_model import JobModel, TrainingModel
from controlplane.sim.submissions import TraceJob


def times_alone(
    jobs: Sequence[TraceJob],
    model: TrainingModel,
    *,
    widest: int,
    speed: float,
    first_stall_s: float | None,
    seed: int,
) -> Mapping[str, tuple[int, float]]:
    """The slots that each job asks for, and what it takes alone on them, close together.

    The batch is the one that its user tuned for these slots, whatever a policy would choose, so
    that it is the same for every policy; the GPUs are as fast as the cluster's are on average. Its
    first start counts, too.

    Args:
        widest: slots of the cluster's largest node.
        speed: mean speed of its GPUs, relative to the one that the model describes.
        first_stall_s: what any start takes; None: as the model says.
        seed: of everything that differs from job to job.

    Returns:
        Job -> slots and seconds; jobs whose group was never measured are missing.
    """
    found: dict[str, tuple[int, float]] = {}
    for job in jobs:
        job_model = model.job_model(job, "fixed", seed=seed)
        training_s = _training_s(job_model, widest)
        if training_s is not None:
            start_s = job_model.costs.overridden(None, first_stall_s).start_s
            found[job.name] = (job_model.spec.wanted, start_s + training_s / speed)
    return found


def _training_s(job_model: JobModel, widest: int) -> float | None:
    """Seconds that it trains; None: a group like it was never measured."""
    wanted, batch = job_model.spec.wanted, job_model.spec.batch_size
    total, before = 0.0, 0.0
    for epoch in range(job_model.epochs):
        known = known_throughput(job_model, wanted, batch, epoch, widest)
        if known is None or known.progress_per_s <= 0.0:
            return None
        ends = job_model.epoch_ends_at(epoch)
        total += max(0.0, ends - before) / known.progress_per_s
        before = max(before, ends)
    return total
