"""What Optimus can know in a cluster: steps that a job has left, and how long they take."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from controlplane.policy.api import EpochSeen, JobEnded, JobView, PolicyEvent, StepsSeen
from controlplane.policy.search.observed_ring_speeds import RingSpeeds
from controlplane.prediction.loss_curves import LossCurve, fit_loss
from controlplane.prediction.remaining_work import remaining_samples
from schemas.ids import JobId

KEPT_RELATIVES: Final = 200  # the latest: a bound on memory
KEPT_LOSSES: Final = 200
FIRST_STEPS: Final = 1000  # that a job is thought to have, if nothing at all is known


@dataclass(slots=True)
class _Family:
    """Jobs of one script and model."""

    finished: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_RELATIVES))
    reached: int = 0  # samples, by the job that came furthest


class Estimates:
    """Answers as an oracle would, from what jobs and their relatives reported."""

    def __init__(self, convergence: float) -> None:
        """Begin with nothing learnt.

        Args:
            convergence: share of the loss, in (0, 1): a job whose next epoch takes less away has
                converged.
        """
        self._convergence = convergence
        self._speeds = RingSpeeds()
        self._families: dict[str, _Family] = {}
        self._losses: dict[JobId, dict[int, float]] = {}  # epoch -> loss
        self._curves: dict[JobId, LossCurve | None] = {}

    def observe(self, event: PolicyEvent) -> None:
        """Learn from `event`.

        Args:
            event: an epoch teaches speed and loss, telemetry speed, a job's end how long relatives
                last.
        """
        match event:
            case EpochSeen():
                self._speeds.observe(event)
                if event.train_loss is not None and event.epoch:
                    losses = self._losses.setdefault(event.job, {})
                    losses[event.epoch] = event.train_loss
                    if len(losses) > KEPT_LOSSES:
                        del losses[min(losses)]
                    self._curves.pop(event.job, None)
            case StepsSeen():
                self._speeds.observe(event)
                family = self._family(event.family, event.job)
                family.reached = max(family.reached, event.samples_done)
            case JobEnded():
                family = self._family(event.family, event.job)
                if event.succeeded and event.samples_done:
                    family.finished.append(event.samples_done)
                family.reached = max(family.reached, event.samples_done)
                self._losses.pop(event.job, None)
                self._curves.pop(event.job, None)
                if not event.family:  # nobody is related to it
                    self._families.pop(f"job {event.job}", None)
                    self._speeds.forget(event.job)

    def step_s(self, job: JobView, slots: int) -> float:
        """Seconds of a step of its user's batch on so many slots.

        Returns:
            Seconds; relative ones before anything was measured.
        """
        return self._speeds.model(job).step_s(slots, job.batch_size)

    def remaining_steps(self, job: JobView) -> float:
        """Steps of its user's batch that it has left.

        By what its user stated; else until its loss converges (Optimus section 3.1); else as long
        as its relatives lasted; else as many again as it has made, or an epoch.
        """
        if job.stop_samples is None:
            curve = self._curve(job.job)
            if curve is not None and job.epoch_samples:
                epochs = max(1.0, curve.converged_at(self._convergence) - job.epoch)
                return epochs * job.epoch_samples / job.batch_size
        family = self._family(job.family, job.job)
        stated = None if job.stop_samples is None else float(job.stop_samples)
        left = remaining_samples(job.samples_done, stated, family.finished, family.reached)
        if stated is None and left <= 0:
            left = float(job.epoch_samples or FIRST_STEPS * job.batch_size)
        return left / job.batch_size

    def _curve(self, job: JobId) -> LossCurve | None:
        if job not in self._curves:
            losses = self._losses.get(job, {})
            self._curves[job] = fit_loss(list(losses), list(losses.values()))
        return self._curves[job]

    def _family(self, name: str, job: JobId) -> _Family:
        return self._families.setdefault(name or f"job {job}", _Family())
