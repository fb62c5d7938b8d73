"""Tells policies that are there to be compared with what no cluster can know."""

from __future__ import annotations

import math
from collections.abc import Mapping

from controlplane.policy.api import JobView
from controlplane.sim.engine.event_queue import Kernel
from controlplane.sim.engine.simulated_job import JobProcesses
from controlplane.sim.models.job_model import packed
from schemas.ids import JobId


class SimulatorOracle:
    """Knows every job's model; an `Oracle` of `policy.api`."""

    def __init__(self, kernel: Kernel, jobs: Mapping[JobId, JobProcesses], widest: int) -> None:
        """Look at the jobs of a simulation.

        Args:
            kernel: virtual time.
            jobs: of the simulation.
            widest: slots of its largest node.
        """
        self._kernel = kernel
        self._jobs = jobs
        self._widest = widest

    def remaining_s(self, job: JobView, slots: int) -> float:
        """Seconds that a job still trains, epoch by epoch, on whole nodes first.

        Args:
            job: that is there.
            slots: that it would have.
        """
        training = self._jobs[job.job].training
        training.advance(self._kernel.now)
        model, progress, total = training.model, training.progress, 0.0
        placement = packed(slots, self._widest)
        for epoch in range(training.epoch, model.epochs):
            ends = model.epoch_ends_at(epoch)
            rate = model.throughput(placement, job.batch_size, epoch).progress_per_s
            total += max(0.0, ends - progress) / rate if rate > 0 else math.inf
            progress = max(progress, ends)
        return total

    def remaining_steps(self, job: JobView) -> float:
        """Steps that are left, as the job's model counts them.

        Args:
            job: that is there.
        """
        training = self._jobs[job.job].training
        training.advance(self._kernel.now)
        return training.model.remaining_steps(training.epoch, training.progress)

    def step_s(self, job: JobView, slots: int) -> float:
        """Seconds of a step with the first batch, on whole nodes first.

        Args:
            job: that is there.
            slots: that it would have.
        """
        training = self._jobs[job.job].training
        placement = packed(slots, self._widest)
        rate = training.model.throughput(placement, job.batch_size, training.epoch)
        return rate.step_s or job.batch_size / rate.samples_per_s
