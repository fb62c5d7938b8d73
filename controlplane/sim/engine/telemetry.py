"""Measurements of simulated workers, with their errors, and step telemetry for the policy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final
from zlib import crc32

from msgspec.structs import replace
from numpy.random import Generator, default_rng

from controlplane.core.model.report_bounds import first_valid_noise_scale
from controlplane.core.reactor import Reactor
from controlplane.policy.api import StepsSeen
from controlplane.sim.engine.event_queue import Kernel, SimOptions
from controlplane.sim.engine.jobs import JobProcesses
from controlplane.sim.engine.oracle import demand_of_model
from controlplane.sim.engine.planner import SimulatedPlanner
from schemas.epochs import StepTimes
from schemas.ids import JobId, node_of
from schemas.nodes import Group

REPORT_STREAM: Final = 78  # random stream of the errors of reports
JOB_STREAM: Final = 79  # random stream of the constant error of a job
WAIT_STREAM: Final = 80  # random stream of the errors of waits for reductions


class MeasuredFigures:
    """Error model that converts true figures to the figures that workers report.

    Each job draws the errors of its reports from a separate random stream, so that they do not
    depend on other jobs.
    """

    def __init__(self, options: SimOptions) -> None:
        self._options = options
        self._draws: dict[tuple[int, JobId], Generator] = {}

    def error(self, job: JobId) -> float:
        """Draw the error factor of one report; it is log-normal around 1."""
        return self._drawn(job, REPORT_STREAM)

    def _drawn(self, job: JobId, stream: int) -> float:
        spread = self._options.scenario.report_noise
        if spread <= 0.0:
            return 1.0
        draws = self._draws.get((stream, job))
        if draws is None:
            seed = (self._options.seed, stream, crc32(job.encode()))
            draws = self._draws[stream, job] = default_rng(seed)
        return math.exp(spread * float(draws.standard_normal()))

    def parts(self, job: JobId, true: StepTimes | None, faster: float) -> StepTimes | None:
        """Return the parts of a step that a worker reports if it measures `faster` times its speed.

        Waits have a separate error. Otherwise their share of a step would be reported exactly.
        """
        if true is None:
            return None
        pass_s, wait_s = true.pass_s / faster, true.sync_s / faster
        if wait_s > 0.0:
            wait_s = min(wait_s * self._drawn(job, WAIT_STREAM), pass_s)
        return replace(true, pass_s=pass_s, sync_s=wait_s)

    def noise_scale(self, job: JobProcesses, true: float | None) -> float | None:
        """Return the noise scale that rank 0 reports, in samples, or None if it has none."""
        if true is None:
            return None
        return true * self._scale_error(job.id) * self.error(job.id)

    def _scale_error(self, job: JobId) -> float:
        """Return the factor by which all noise scales of a job are wrong."""
        most = self._options.scenario.noise_scale_error
        if most <= 1.0:
            return 1.0
        rng = default_rng((self._options.seed, JOB_STREAM, crc32(job.encode())))
        return math.pow(most, rng.uniform(-1.0, 1.0))


FIRST_REPORT_S: Final = 2.0  # minimum delay of a group's first report
MIN_REPORTED_STEPS: Final = 12  # minimum steps before the first report
MIN_SPEED: Final = 1e-9  # samples per second


@dataclass(frozen=True, eq=False)
class StepTelemetry:
    """Sender of the step reports of training groups.

    A group sends its first report after a dozen steps. Each later interval doubles, up to a limit.
    """

    kernel: Kernel
    reactor: Reactor
    planner: SimulatedPlanner
    measured: MeasuredFigures
    longest_s: float  # longest time between two reports

    def begin(self, job: JobProcesses) -> None:
        """Start the reports of the job's group; the first report follows the end of its stall."""
        training, group = job.training, job.group
        if group is None:
            return
        speed = max(training.throughput.samples_per_s, MIN_SPEED)
        step_s = training.throughput.step_s or group.global_batch / speed
        wait_s = max(FIRST_REPORT_S, MIN_REPORTED_STEPS * step_s)
        begin = max(self.kernel.now, training.stalled_until)
        first = (job, group.version, training.steps, wait_s, 0)
        self.kernel.call_at(begin + wait_s, self._report, *first)

    def _report(
        self, job: JobProcesses, version: int, begun: float, wait_s: float, reported: int
    ) -> None:
        """Send a report of a group that started after `begun` steps of the job."""
        group = job.group
        known = self.reactor.state.jobs.get(job.id)
        if group is None or group.version != version or known is None or known.group is None:
            return
        now, training = self.kernel.now, job.training
        training.advance(now)
        if training.throughput.samples_per_s > 0.0 and known.group.version == version:
            group_steps = max(1, int(training.steps - begun))
            self.planner.observe(self._steps(job, group, known.family, group_steps))
            if reported <= 1:  # the speed has just become known
                self.planner.ask()
        if reported:
            wait_s = min(2.0 * wait_s, max(self.longest_s, wait_s))
        following = (job, version, begun, wait_s, reported + 1)
        self.kernel.call_at(now + wait_s, self._report, *following)

    def _steps(self, job: JobProcesses, group: Group, family: str, group_steps: int) -> StepsSeen:
        training = job.training
        slots = [member.slot for member in group.members]
        scale = training.model.noise_scale(training.epoch, group.global_batch)
        faster = self.measured.error(job.id)  # the same error for times and speed
        cores, sent = _usage(job)
        return StepsSeen(
            job=job.id,
            family=family,
            group=group.version,
            slots=len(slots),
            nodes=len({node_of(slot) for slot in slots}),
            global_batch=group.global_batch,
            step=int(training.steps),
            samples_done=int(training.progress),
            samples_per_s=training.throughput.samples_per_s * faster,
            noise_scale=first_valid_noise_scale(self.measured.noise_scale(job, scale)),
            cpu_cores=cores,
            sent_bytes_per_s=sent,
            group_steps=group_steps,
            step_times=self.measured.parts(job.id, training.throughput.parts, faster),
        )


def _usage(job: JobProcesses) -> tuple[float, float]:
    """Return the cores and the sent bytes per second of one worker: its demand times its speed."""
    training, placement = job.training, job.placement()
    demand, workers = demand_of_model(training.model), sum(placement)
    alone = training.model.throughput(placement, training.batch, training.epoch)
    share = min(1.0, training.throughput.samples_per_s / max(alone.samples_per_s, MIN_SPEED))
    sent = 1.0 if demand.servers else 2.0 * (workers - 1) / workers
    return share * demand.cores, share * sent * demand.gradient_bytes_per_s
