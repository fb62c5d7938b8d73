"""A model from measurements: step times by placement, statistical progress by batch and epoch.

A folder for each application, with tables in the layout of Pollux' simulator (OSDI 2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from controlplane.sim.models.job_model import (
    ChangeCosts,
    EpochMetrics,
    Placement,
    StepParts,
    Throughput,
)
from controlplane.sim.models.profiles.measured_application import MeasuredApplication
from controlplane.sim.simulator_errors import TraceError
from controlplane.sim.submissions import TraceJob
from schemas.jobs import KEEP, JobSpec, StopRule

ONE_SLOT: Final = frozenset({"ncf"})  # applications that never run on several
PASSES: Final = 8  # into which an elastic job may cut the batch of one slot
MOST_SLOTS: Final = 64
TINY: Final = 1e-8
MAX_NAME: Final = 100


@dataclass(slots=True)
class ProfiledJob:
    """A job of a measured application."""

    app: MeasuredApplication
    spec: JobSpec
    costs: ChangeCosts
    _steps: dict[tuple[Placement, int], tuple[int, StepParts]] = field(default_factory=dict)

    @property
    def application(self) -> str:
        """The folder's name."""
        return self.app.name

    @property
    def epoch_samples(self) -> int:
        """||D||, as the smallest batch went through it."""
        return round(self.app.iterations(self.app.first_batch, 0) * self.app.first_batch)

    @property
    def epochs(self) -> int:
        """Of its application."""
        return self.app.epochs

    def throughput(self, placement: Placement, batch: int, epoch: int) -> Throughput:
        """Gain over the first batch, divided by the time of a step with all its passes."""
        key = (placement, batch)
        known = self._steps.get(key)
        if known is None:
            known = self._steps[key] = self._step(placement, batch)
        true_batch, parts = known
        step_s = parts.step_s
        sqr, var = self.app.noise(true_batch, epoch)
        gain = (var + sqr) / (var / (true_batch / self.app.first_batch) + sqr)
        progress_per_s = gain / step_s * self.app.first_batch
        return Throughput(true_batch / step_s, progress_per_s, step_s, parts=parts)

    def _step(self, placement: Placement, batch: int) -> tuple[int, StepParts]:
        """The batch as it is dealt out in equal passes, and these."""
        app, slots = self.app, sum(placement)
        share = math.ceil(batch / slots - TINY)
        more = math.ceil(share / app.most_local - TINY) - 1
        if slots == 1 and batch > app.first_batch:
            more = max(1, more)
        local = math.ceil(share / (more + 1) - TINY)
        local = max(1, min(local, app.most_batch // (slots * (more + 1))))
        step_s, sync_s = app.speed(placement, local)
        return slots * local * (more + 1), StepParts(step_s, sync_s, local, more + 1)

    def epoch_ends_at(self, epoch: int) -> float:
        """At the smallest progress that any measured batch had by then."""
        return self.app.ends[min(epoch, self.epochs - 1)] * self.app.first_batch

    def lost_progress(self, before: int, batch: int, epoch: int) -> float:
        """None was measured."""
        return 0.0

    def noise_scale(self, epoch: int, batch: int) -> float | None:
        """The phi with which gain = B / B0 (phi + B0) / (phi + B); None where |g|^2 is 0.

        It is that of the batch as it was asked for; a group's throughput is that of the batch as
        it is dealt out, which may be a few samples more.
        """
        sqr, var = self.app.noise(batch, epoch)
        return var / sqr * self.app.first_batch if sqr > 0 else None

    def epoch_metrics(self, epoch: int, batch: int) -> EpochMetrics:
        """The noise scale of the epoch that is over, and nothing else."""
        noise = self.noise_scale(max(0, epoch - 1), batch)
        return EpochMetrics(train_loss=None, metrics={}, noise_scale=noise)

    def loss_left(self, epoch: int) -> float | None:
        """None was published."""
        return None

    def remaining_steps(self, epoch: int, progress: float) -> float:
        """Up to the beginning of the last epoch, at least 1: as the published simulator counts."""
        last = self.epochs - 1
        if epoch >= last:
            return 1.0
        batch = self.spec.batch_size
        return self.app.iterations(batch, last) - self.app.iterations(batch, epoch)


class ProfilesModel:
    """The applications of a folder."""

    def __init__(
        self, folder: Path, costs: ChangeCosts, *, stated: bool = False, whole_seconds: bool = False
    ) -> None:
        """Choose the tables; an application's are read when a job needs them.

        Args:
            folder: with a folder for each application, or a folder `traces` with these.
            stated: users state the epochs that their jobs take; else nobody knows.
            whole_seconds: epochs end at whole seconds.

        Raises:
            TraceError: if there is no such folder.
        """
        if not folder.is_dir():
            what = f"{folder} is no folder"
            raise TraceError(
                what, "give the one that has a folder for each application", "profiles"
            )
        self.whole_seconds = whole_seconds
        self._folder = folder / "traces" if (folder / "traces").is_dir() else folder
        self._costs = costs
        self._stated = stated
        self._applications: dict[str, MeasuredApplication] = {}

    def job_model(
        self, job: TraceJob, batch: Literal["fixed", "elastic"], *, seed: int
    ) -> ProfiledJob:
        """The truth about `job`; the same for every seed."""
        app = self._application(job.workload)
        stop = StopRule(epochs=app.epochs) if self._stated else None
        specify = self._elastic if batch == "elastic" else self._fixed
        return ProfiledJob(app, specify(app, job, stop), self._costs)

    def _application(self, name: str) -> MeasuredApplication:
        if name not in self._applications:
            folder = self._folder / name
            if not name.isalnum() or len(name) > MAX_NAME or not folder.is_dir():
                found = sorted(each.name for each in self._folder.iterdir() if each.is_dir())
                what = f"application {name[:40]!r} has no profile in {self._folder}"
                raise TraceError(what, f"profiled: {', '.join(found)}", "application")
            self._applications[name] = MeasuredApplication(folder)
        return self._applications[name]

    def _elastic(self, app: MeasuredApplication, job: TraceJob, stop: StopRule | None) -> JobSpec:
        alone = app.name in ONE_SLOT
        local = app.most_batch if alone else min(app.most_batch, app.most_local * PASSES)
        return JobSpec(
            name=job.name,
            script="train.py",
            family=app.name,
            batch_size=app.most_batch if alone else app.first_batch,
            max_batch_size=app.most_batch,
            max_local_batch=local,
            slots=(1, 1) if alone else (1, MOST_SLOTS),
            slots_wanted=1 if alone else min(job.slots, MOST_SLOTS),
            stop=stop,
            retries=1,
        )

    def _fixed(self, app: MeasuredApplication, job: TraceJob, stop: StopRule | None) -> JobSpec:
        alone = app.name in ONE_SLOT
        batch = job.batch or app.first_batch * job.slots
        if batch > app.most_batch:
            what = f"job {job.name}: {app.name} was measured up to a batch of {app.most_batch}"
            raise TraceError(f"{what}, not {batch}", "lower its batch_size", "batch_size")
        most = 1 if alone else max(1, min(MOST_SLOTS, batch // app.least_local))
        return JobSpec(
            name=job.name,
            script="train.py",
            family=app.name,
            batch_size=batch,
            max_batch_size=KEEP,
            slots=(1, max(most, 1 if alone else job.slots)),
            slots_wanted=1 if alone else job.slots,
            stop=stop,
            retries=1,
        )
