"""What workers measure of their speed and their gradients: what they can, and with an error."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final
from zlib import crc32

from numpy.random import Generator, default_rng

from controlplane.sim.engine.sim_options import SimOptions
from controlplane.sim.engine.simulated_job import JobProcesses
from controlplane.sim.models.job_model import StepParts
from schemas.ids import JobId

REPORT_DRAWS: Final = 78  # which stream of a seed the errors of reports are drawn from
JOB_DRAWS: Final = 79  # and those that a job keeps
WAIT_DRAWS: Final = 80  # and those of waits for reductions


class MeasuredFigures:
    """Between the truth and every report of a worker.

    Errors are drawn job by job, in the order of its reports: those of one job do not depend on what
    others do.
    """

    def __init__(self, options: SimOptions) -> None:
        """Begin with no report made.

        Args:
            options: how far measurements are off, and who measures a noise scale.
        """
        self._options = options
        self._draws: dict[tuple[int, JobId], Generator] = {}
        self._scale_errors: dict[JobId, float] = {}

    def error(self, job: JobId) -> float:
        """The factor by which one figure of one report is off: log-normal around 1."""
        return self._drawn(job, REPORT_DRAWS)

    def _drawn(self, job: JobId, stream: int) -> float:
        spread = self._options.noise
        if spread <= 0.0:
            return 1.0
        draws = self._draws.get((stream, job))
        if draws is None:
            seed = (self._options.seed, stream, crc32(job.encode()))
            draws = self._draws[stream, job] = default_rng(seed)
        return math.exp(spread * float(draws.standard_normal()))

    def parts(self, job: JobId, true: StepParts | None, faster: float) -> StepParts | None:
        """How a step divides, as it is told with a speed.

        Waits for peers have an error of their own: else the share of a step in which a worker waits
        would be known exactly, however wrong its time is.

        Args:
            true: of its group's steps; None: nobody knows.
        """
        if true is None:
            return None
        pass_s, wait_s = true.pass_s / faster, true.sync_s / faster
        if wait_s > 0.0:
            wait_s = min(wait_s * self._drawn(job, WAIT_DRAWS), pass_s)
        return replace(true, pass_s=pass_s, sync_s=wait_s)

    def noise_scale(self, job: JobProcesses, true: float | None) -> float | None:
        """As rank 0 of the present group tells it.

        A live worker needs two sizes of batch: its share and the group's, or a pass and the step
        (`elastic.metrics.noise_scale`). One that is alone and takes its step in one pass has one.

        Args:
            true: of its gradients, samples; None: it measures none.
        """
        if true is None or not (self._options.noise_scale_alone or _has_two_batches(job)):
            return None
        return true * self._scale_error(job.id) * self.error(job.id)

    def _scale_error(self, job: JobId) -> float:
        """The factor by which all its noise scales are off."""
        most = self._options.noise_scale_error
        if most <= 1.0:
            return 1.0
        known = self._scale_errors.get(job)
        if known is None:
            rng = default_rng((self._options.seed, JOB_DRAWS, crc32(job.encode())))
            known = self._scale_errors[job] = most ** float(rng.uniform(-1.0, 1.0))
        return known


def _has_two_batches(job: JobProcesses) -> bool:
    parts = job.training.throughput.parts
    alone = job.group is None or len(job.group.members) == 1
    return not alone or (parts is not None and parts.passes > 1)
