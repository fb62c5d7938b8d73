"""Tells policies that are there to be compared with what no cluster can know."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

from controlplane.policy.api import JobView
from controlplane.sim.engine.kernel import Kernel
from controlplane.sim.engine.node_agents import Crew
from controlplane.sim.models.job_model import Placement
from schemas.ids import JobId


class Truth:
    """Knows every job's work; an `Oracle` of `policy.api`."""

    def __init__(self, kernel: Kernel, crews: Mapping[JobId, Crew], widest: int) -> None:
        self._kernel = kernel
        self._crews = crews
        self._widest = widest

    def remaining_s(self, job: JobView, slots: int) -> float:
        """Epoch by epoch, on whole nodes first."""
        training = self._crews[job.job].training
        training.catch_up(self._kernel.now)
        work, progress, total = training.work, training.progress, 0.0
        placement = compact(slots, self._widest)
        for epoch in range(training.epoch, work.epochs):
            ends = work.epoch_ends_at(epoch)
            pace = work.pace(placement, job.batch_size, epoch).progress_per_s
            total += max(0.0, ends - progress) / pace if pace > 0 else math.inf
            progress = max(progress, ends)
        return total

    def remaining_steps(self, job: JobView) -> float:
        """As the physics count them."""
        training = self._crews[job.job].training
        training.catch_up(self._kernel.now)
        return training.work.remaining_steps(training.epoch, training.progress)

    def step_s(self, job: JobView, slots: int) -> float:
        """On whole nodes first."""
        training = self._crews[job.job].training
        pace = training.work.pace(compact(slots, self._widest), job.batch_size, training.epoch)
        return pace.step_s or job.batch_size / pace.samples_per_s


@cache
def compact(slots: int, widest: int) -> Placement:
    """So many slots on as few nodes as possible."""
    whole, rest = divmod(slots, widest)
    return (*(widest,) * whole, *((rest,) if rest else ()))
