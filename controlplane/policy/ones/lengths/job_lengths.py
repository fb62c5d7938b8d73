"""How much every job has left, as the chosen model says, and how well it did so far."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from controlplane.policy.api import EpochSeen, JobEnded, JobView, PolicyEvent, StepsSeen
from controlplane.policy.ones.lengths.beta_progress import BetaProgress
from controlplane.policy.ones.lengths.family_lengths import FamilyLengths
from controlplane.policy.ones.lengths.length_calibration import Calibration, LengthCalibration
from controlplane.policy.ones.lengths.length_models import LengthMixture, LengthModel, ResidualLife
from controlplane.policy.ones.lengths.own_evidence import OwnEvidence
from controlplane.policy.ones.lengths.work_left import WorkLeft, exactly
from controlplane.policy.ones.options import LengthModelName
from schemas.ids import JobId

MODELS: Final[dict[LengthModelName, Callable[[], LengthModel]]] = {
    "residual": ResidualLife,
    "beta": BetaProgress,
    "mixture": LengthMixture,
}

SPARE: Final = 100  # jobs that may be remembered for nothing


class _Said(NamedTuple):
    """An answer, which holds while the job and all that it comes from stand as they did."""

    view: JobView
    key: tuple[float, int, int]
    left: WorkLeft | None


class JobLengths:
    """Takes policy events in; answers how much a job has left."""

    def __init__(self, model: LengthModelName) -> None:
        """Begin with nothing learnt.

        Args:
            model: how lengths are predicted where no rule says them.
        """
        self._model = MODELS[model]()
        self._families: dict[str, FamilyLengths] = {}
        self._own = OwnEvidence()
        self._calibration = LengthCalibration()
        self._said: dict[JobId, _Said] = {}  # what each job was told last
        self._edition = 0  # of what is known of lengths: jobs that ended

    def observe(self, event: PolicyEvent) -> None:
        """Learn from `event`.

        Args:
            event: an epoch, telemetry or the end of a job; others teach nothing of lengths.
        """
        match event:
            case EpochSeen():
                family = self.family(event.family)
                self._own.epoch(event)
                self._model.epoch(event, family)
                family.progressed(event.job, event.samples_done)
            case StepsSeen():
                self.family(event.family).progressed(event.job, event.samples_done)
            case JobEnded():
                family, total = self.family(event.family), event.samples_done
                family.ended(event.job, total, succeeded=event.succeeded)
                self._own.ended(event.job, event.family, total, succeeded=event.succeeded)
                self._model.ended(event, family)
                self._said.pop(event.job, None)
                self._edition += 1
                self._calibration.ended(event.job, total, succeeded=event.succeeded)
            case _:
                return

    def forget(self, active: Collection[JobId]) -> None:
        """Drop what is known of jobs that nobody will hear of again, if there are many of them."""
        if self._own.known <= 2 * len(active) + SPARE:
            return
        there = set(active)
        self._own.forget(there)
        self._model.forget(there)
        self._calibration.forget(there)
        self._said = {job: said for job, said in self._said.items() if job in there}
        for family in self._families.values():
            family.at_work = {job: done for job, done in family.at_work.items() if job in there}

    def family(self, name: str) -> FamilyLengths:
        """Lengths of a family, from nothing on."""
        found = self._families.get(name)
        if found is None:
            found = self._families[name] = FamilyLengths()
        return found

    def left(self, job: JobView, *, bounds: bool = True) -> WorkLeft | None:
        """What a job has left; None if nothing at all is known.

        Args:
            bounds: whether quantiles are wanted too.
        """
        family = self.family(job.family)
        if job.epoch_samples:
            family.epoch_samples = job.epoch_samples
        done = float(max(job.samples_done, family.at_work.get(job.job, 0)))
        certain = self._own.certain(job, done)
        if certain is not None:
            return exactly(certain)
        key = (done, self._edition, 0 if family.finished else family.reached)
        said = self._said.get(job.job)
        if said is not None and said.view is job and said.key == key and not bounds:
            return said.left
        due = self._calibration.due(job.job, done)
        found = self._model.left(job, family, done, self._own, bounds=bounds or due)
        self._said[job.job] = _Said(job, key, found)
        if found is not None and due:
            self._calibration.add(job.job, done, found)
        return found

    def remaining(self, job: JobView) -> float | None:
        """The mean of that, samples."""
        found = self.left(job, bounds=False)
        return None if found is None else found.mean

    def is_settled(self, job: JobView) -> bool:
        """Whether what is left follows from its own progress alone, until some job ends."""
        if job.stop_samples is not None and not self._own.leaves_early(job.family):
            return True
        return isinstance(self._model, ResidualLife) and bool(self.family(job.family).finished)

    def informed(self, job: JobId) -> bool:
        """Whether what was last said of a job is more than that it is as old as it is."""
        said = self._said.get(job)
        return said is not None and said.left is not None and said.left.informed

    @property
    def calibration(self) -> Calibration | None:
        """Of the model, by jobs that finished; None before the first."""
        return self._calibration.summary()
