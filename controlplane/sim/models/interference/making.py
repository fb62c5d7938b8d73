"""From the form of an option to the rule that it names."""

from __future__ import annotations

from pathlib import Path

from controlplane.sim.models.interference.demands import Demand
from controlplane.sim.models.interference.form import Form
from controlplane.sim.models.interference.gavel_pairs import MeasuredInterference, read_pairs
from controlplane.sim.models.interference.neighbours import (
    ClassInterference,
    DistributedInterference,
    PairwiseInterference,
    class_scale,
)
from controlplane.sim.models.interference.resources import ResourceInterference, scale_for
from controlplane.sim.models.interference.rule import Interference, TrainingJobs


def make_interference(
    form: Form, jobs: TrainingJobs, seed: int, demands: tuple[Demand, ...]
) -> Interference | None:
    """The rule; None: nobody slows anybody down.

    Args:
        jobs: that train, now and later.
        seed: of what `pairwise` draws; nothing else is drawn.
        demands: of the models among which SHARE is the mean, for `class` and `resources`.

    Raises:
        TraceError: if a file cannot be used, or the share cannot be reached.
    """
    match form.kind:
        case "none":
            return None
        case "pollux":
            return DistributedInterference(form.share, lambda job: len(jobs.placement(job)) > 1)
        case "pairwise":
            return PairwiseInterference(form.share, seed, jobs.family)
        case "class":
            scale = class_scale(form.share, [demand.bound for demand in demands])
            return ClassInterference(lambda job: jobs.demand(job).bound, scale)
        case "resources":
            return ResourceInterference(jobs, scale_for(form.share, demands))
        case "gavel":
            return MeasuredInterference(read_pairs(Path(form.file)), jobs)
