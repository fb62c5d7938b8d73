"""What a cluster can know of jobs beforehand: how fast they would be, and how long they last."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from controlplane.policy.api import EpochSeen, JobEnded, JobView, PolicyEvent, StepsSeen
from controlplane.policy.search.observed_ring_speeds import RingSpeeds
from controlplane.prediction.remaining_work import remaining_samples
from schemas.ids import JobId

KEPT_RELATIVES: Final = 200  # the latest: a bound on memory
FIRST_STEPS: Final = 1000  # that a job is thought to have, if nothing at all is known
DRIFT: Final = 0.05  # of a measured time, that makes its family's speeds be fitted again


@dataclass(slots=True)
class _Family:
    """Jobs of one script and model."""

    finished: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_RELATIVES))
    reached: int = 0  # samples, by the job that came furthest
    left: dict[int, float] = field(default_factory=dict)  # samples done -> to come, until news


class ObservedJobs:
    """Speeds and lengths by family; a job without one is a family of its own."""

    def __init__(self) -> None:
        """Begin with nothing learnt."""
        self._speeds = RingSpeeds(DRIFT)
        self._families: dict[str, _Family] = {}

    def observe(self, event: PolicyEvent) -> None:
        """Learn from `event`.

        Args:
            event: epochs and telemetry teach speeds, a job's end how long relatives last.
        """
        match event:
            case EpochSeen() | StepsSeen():
                self._speeds.observe(event)
                family = self._family(event.family, event.job)
                family.reached = max(family.reached, event.samples_done)
                family.left.clear()
            case JobEnded():
                family = self._family(event.family, event.job)
                family.left.clear()
                if event.succeeded and event.samples_done:
                    family.finished.append(event.samples_done)
                family.reached = max(family.reached, event.samples_done)
                if not event.family:  # nobody is related to it
                    self._families.pop(f"job {event.job}", None)
                    self._speeds.forget(event.job)

    def coefficients(self, job: JobView) -> tuple[float, float, float, float]:
        """Of the model of its step times at its user's batch (`prediction.ring_step_time`)."""
        return self._speeds.model(job).coefficients

    def remaining_steps(self, job: JobView) -> float:
        """Steps of its user's batch that it has left.

        By what its user stated; else as long as its relatives lasted; else as many again as it
        has made, or an epoch.
        """
        family = self._family(job.family, job.job)
        if job.stop_samples is not None:
            stated = float(job.stop_samples)
            left = remaining_samples(job.samples_done, stated, family.finished, family.reached)
            return left / job.batch_size
        done = job.samples_done
        if done not in family.left:
            family.left[done] = remaining_samples(done, None, family.finished, family.reached)
        left = family.left[done] or float(job.epoch_samples or FIRST_STEPS * job.batch_size)
        return left / job.batch_size

    def length_known(self, job: JobView) -> bool:
        """Whether its length was stated, or a relative has finished."""
        return job.stop_samples is not None or bool(self._family(job.family, job.job).finished)

    def _family(self, name: str, job: JobId) -> _Family:
        return self._families.setdefault(name or f"job {job}", _Family())
