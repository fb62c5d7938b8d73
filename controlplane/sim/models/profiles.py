"""Measured applications: step times by placement and batch, progress by batch and epoch.

Each application has a folder with tables in the layout of Pollux' simulator (OSDI 2021).
`placements.csv` and `scalability.csv` contain the times of a pass, and `validation-BATCH.csv`
contains the progress of training at each global batch. Missing or damaged tables raise
`TraceError`, which names the file, and the line and column if any.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from controlplane.sim.cluster import TraceError
from controlplane.sim.csv_parsing import CsvRow, with_header
from controlplane.sim.models.job_model import (
    ChangeCosts,
    EpochMetrics,
    JobModel,
    Placement,
    Throughput,
    TrainingModel,
    job_spec,
    seconds_of,
)
from controlplane.sim.results import TraceJob
from schemas.epochs import StepTimes
from schemas.jobs import KEEP, JobSpec, StopRule

MIN_STEP_S: Final = 1e-9
MIN_NOISE: Final = 1e-30
MAX_NOISE: Final = 1e30
VALIDATION: Final = ("progress", "iteration", "grad_sqr", "grad_var")

PassTimes = tuple[float, float]  # seconds of a pass, and of its synchronisation
Size = tuple[int, int, int]  # nodes, slots, local batch


@dataclass(frozen=True, slots=True)
class EpochProfile:
    """Row of a validation table: measurements of one epoch at one global batch."""

    progress: float
    iteration: float
    sqr: float
    var: float


def smallest_rotation(placement: Placement) -> Placement:
    """Return the lexicographically smallest rotation of a placement; the nodes form a ring."""
    return min(placement[at:] + placement[:at] for at in range(len(placement)))


def read_placements(file: Path) -> dict[Placement, dict[int, PassTimes]]:
    """Read the times of a pass by smallest rotation of the placement and by local batch."""
    seen: dict[Placement, dict[int, list[PassTimes]]] = {}
    for row in with_header(file, ("placement", "local_bsz", "step_time", "sync_time")):
        digits = row.text("placement")
        if not digits.isdecimal() or "0" in digits:
            problem = f"{digits[:40]!r} is not a row of digits 1 to 9"
            raise row.error("placement", problem, "correct the cell")
        placement = smallest_rotation(tuple(int(digit) for digit in digits))
        times = _times(row)
        seen.setdefault(placement, {}).setdefault(row.whole("local_bsz", 1), []).append(times)
    if (1,) not in seen:
        raise TraceError(f"{file}: nothing was measured on one slot", "add placement 1")
    return {
        placement: {local: _mean(table[local]) for local in sorted(table)}
        for placement, table in seen.items()
    }


def read_sizes(file: Path) -> dict[Size, NDArray[np.float64]]:
    """Read the seconds (pass, synchronisation), shape (2,), by nodes, slots and local batch."""
    seen: dict[Size, list[PassTimes]] = {}
    columns = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
    for row in with_header(file, columns):
        key = (row.whole("num_nodes", 1), row.whole("num_replicas", 1), row.whole("local_bsz", 1))
        seen.setdefault(key, []).append(_times(row))
    return {key: np.array(_mean(times)) for key, times in seen.items()}


def _times(row: CsvRow) -> PassTimes:
    step_s = row.number("step_time", MIN_STEP_S)
    return step_s, row.number("sync_time", 0.0, step_s)


def _mean(times: Sequence[PassTimes]) -> PassTimes:
    return sum(t[0] for t in times) / len(times), sum(t[1] for t in times) / len(times)


def read_validation(folder: Path, epochs: int) -> dict[int, list[EpochProfile]]:
    """Read the validation table of each global batch, one row per epoch, `epochs` at least."""
    found: dict[int, list[EpochProfile]] = {}
    for file in sorted(folder.glob("validation-*.csv")):
        number = file.stem.partition("-")[2]
        if not number.isdigit() or int(number) < 1:
            raise TraceError(f"{file}: its name should say the batch", "as in validation-128.csv")
        table = [
            EpochProfile(
                row.number("progress"),
                row.number("iteration"),
                row.number("grad_sqr", 0.0, MAX_NOISE),
                row.number("grad_var", MIN_NOISE, MAX_NOISE),
            )
            for row in with_header(file, VALIDATION, ("metric",))
        ]
        if len(table) < epochs:
            problem = f"{file}: {len(table)} epochs, a job of {folder.name} takes {epochs}"
            raise TraceError(problem, "give a table with all of them")
        found[int(number)] = table
    if not found:
        raise TraceError(f"{folder} has no validation-BATCH.csv", "give one for each global batch")
    return found


EPOCHS: Final[Mapping[str, int]] = {  # number of epochs of a job, by application
    "bert": 2, "cifar10": 100, "deepspeech2": 80, "imagenet": 90, "ncf": 10, "yolov3": 50,
}  # fmt: skip
MAX_LOCAL_BATCH: Final = {"yolov3": 8}  # larger measured batches ran out of memory
MAX_NODES: Final = 16  # largest number of nodes that was measured
CEIL_TOLERANCE: Final = 1e-8


class MeasuredApplication:
    """Measurements of one application."""

    def __init__(self, folder: Path) -> None:
        """Read the tables in `folder`; the name of the folder is the name of the application."""
        self.name = folder.name
        if self.name not in EPOCHS:
            known = ", ".join(sorted(EPOCHS))
            raise TraceError(f"{folder}: unknown number of epochs", f"known: {known}")
        self.epochs = EPOCHS[self.name]
        self._placements = read_placements(folder / "placements.csv")
        self._sizes = read_sizes(folder / "scalability.csv")
        locals_ = [local for table in self._placements.values() for local in table]
        self.least_local = min(self._placements[1,])
        self.most_local = MAX_LOCAL_BATCH.get(self.name, max(locals_))
        self._validation = read_validation(folder, self.epochs)
        self.batches = sorted(self._validation)
        self.first_batch, self.most_batch = self.batches[0], self.batches[-1]
        tables = list(self._validation.values())
        self.ends = [min(table[epoch].progress for table in tables) for epoch in range(self.epochs)]
        self._steps: dict[tuple[Placement, int], tuple[int, StepTimes]] = {}
        self._surface: Any = None

    def step(self, placement: Placement, batch: int) -> tuple[int, StepTimes]:
        """Return the batch after division into equal passes, and the times of these passes."""
        key = (placement, batch)
        if key not in self._steps:
            slots = sum(placement)
            share = math.ceil(batch / slots - CEIL_TOLERANCE)
            least = int(slots == 1 and batch > self.first_batch)
            more = max(least, math.ceil(share / self.most_local - CEIL_TOLERANCE) - 1)
            local = math.ceil(share / (more + 1) - CEIL_TOLERANCE)
            local = max(1, min(local, self.most_batch // (slots * (more + 1))))
            step_s, sync_s = self._pass_times(smallest_rotation(placement), local)
            parts = StepTimes(step_s, sync_s, local, more + 1)
            self._steps[key] = slots * local * (more + 1), parts
        return self._steps[key]

    def _pass_times(self, placement: Placement, local: int) -> PassTimes:
        table = self._placements.get(placement)
        low = max(local, self.least_local)  # smaller batches are not faster
        if table is not None:
            batches = list(table)
            steps_s, syncs_s = zip(*table.values(), strict=True)
            step = float(np.interp(low, batches, steps_s, right=math.nan))
            sync = float(np.interp(low, batches, syncs_s))
        else:
            point = (min(len(placement), MAX_NODES), sum(placement), low)
            step, sync = self._interpolated()([point])[0].tolist()
        if math.isnan(step):
            shape = "+".join(map(str, placement))
            problem = f"{self.name} was not measured near {shape} slots"
            hint = "give a smaller batch, or tables with more measurements"
            raise TraceError(f"{problem} with a local batch of {local}", hint)
        return step, sync

    def _interpolated(self) -> Any:
        """Return a linear interpolator over nodes, slots and local batch; average equal points."""
        if self._surface is None:
            from scipy.interpolate import LinearNDInterpolator  # noqa: PLC0415 - slow to load

            seen: dict[Size, list[PassTimes]] = {}
            for placement, table in self._placements.items():
                for local, times in table.items():
                    seen.setdefault((len(placement), sum(placement), local), []).append(times)
            means = {point: np.mean(times, axis=0) for point, times in seen.items()}
            points = self._sizes | means
            order = sorted(points)
            self._surface = LinearNDInterpolator(
                np.array(order, dtype=np.float64), np.array([points[point] for point in order])
            )
        return self._surface

    def noise(self, batch: float, epoch: int) -> tuple[float, float]:
        """Return |g|^2 and the trace of the covariance in a 0-based epoch, or in the last one."""
        one, other, share = self._between(batch, min(epoch, self.epochs - 1))
        mixed = one.sqr * (1 - share) + other.sqr * share
        return mixed, one.var * (1 - share) + other.var * share

    def iterations(self, batch: float, epoch: int) -> float:
        """Return the steps until a 0-based epoch ends, interpolated linearly between batches."""
        one, other, share = self._between(batch, epoch)
        return one.iteration * (1 - share) + other.iteration * share

    def _between(self, batch: float, epoch: int) -> tuple[EpochProfile, EpochProfile, float]:
        """Return the rows of the measured batches around `batch`, and its place in [0, 1)."""
        batch = min(max(batch, self.first_batch), self.most_batch)
        if batch in self._validation:
            row = self._validation[int(batch)][epoch]
            return row, row, 0.0
        place = bisect_left(self.batches, batch)
        low, high = self.batches[place - 1], self.batches[place]
        share = (batch - low) / (high - low)
        return self._validation[low][epoch], self._validation[high][epoch], share


SINGLE_SLOT: Final = frozenset({"ncf"})  # applications that run on one slot only
MAX_PASSES: Final = 8  # largest number of passes of an elastic job on one slot
MAX_SLOTS: Final = 64
MAX_NAME: Final = 100


@dataclass
class ProfiledJob(JobModel):
    """Job of a measured application."""

    app: MeasuredApplication
    spec: JobSpec
    costs: ChangeCosts

    def __post_init__(self) -> None:
        """Read the job's name and lengths from the application; ||D|| is for the smallest batch."""
        app = self.app
        self.application, self.epochs = app.name, app.epochs
        self.epoch_samples = round(app.iterations(app.first_batch, 0) * app.first_batch)

    def throughput(self, placement: Placement, batch: int, epoch: int) -> Throughput:
        """Return the throughput: the progress of a step, divided by the step's duration."""
        true_batch, parts = self.app.step(placement, batch)
        step_s = seconds_of(parts)
        sqr, var = self.app.noise(true_batch, epoch)
        gain = (var + sqr) / (var / (true_batch / self.app.first_batch) + sqr)
        progress_per_s = gain / step_s * self.app.first_batch
        return Throughput(true_batch / step_s, progress_per_s, step_s, parts=parts)

    def epoch_ends_at(self, epoch: int) -> float:
        """Return the smallest progress that any measured batch reached at the end of the epoch."""
        return self.app.ends[min(epoch, self.epochs - 1)] * self.app.first_batch

    def noise_scale(self, epoch: int, batch: int) -> float | None:
        """Return the noise scale phi, or None if |g|^2 is 0.

        The gain of batch B over first batch B0 is B / B0 (phi + B0) / (phi + B). The noise scale
        belongs to the requested batch, not to the batch after division into passes.
        """
        sqr, var = self.app.noise(batch, epoch)
        return var / sqr * self.app.first_batch if sqr > 0 else None

    def epoch_metrics(self, epoch: int, batch: int) -> EpochMetrics:
        """Return a report that contains only the noise scale of the finished epoch."""
        noise = self.noise_scale(max(0, epoch - 1), batch)
        return EpochMetrics(train_loss=None, metrics={}, noise_scale=noise)

    def remaining_steps(self, epoch: int, progress: float) -> float:
        """Return the steps until the last epoch starts, at least 1, as published."""
        last = self.epochs - 1
        if epoch >= last:
            return 1.0
        batch = self.spec.batch_size
        return self.app.iterations(batch, last) - self.app.iterations(batch, epoch)


class ProfilesModel(TrainingModel):
    """Training model of the applications in a folder."""

    def __init__(
        self, folder: Path, costs: ChangeCosts, *, stated: bool = False, whole_seconds: bool = False
    ) -> None:
        """Select the folder; the tables of an application are read when its first job needs them.

        `folder` contains a folder for each application, or a folder `traces` that contains these.
        If `stated`, users state the epochs of their jobs.
        """
        if not folder.is_dir():
            hint = "give the one that has a folder for each application"
            raise TraceError(f"{folder} is not a folder", hint, "profiles")
        self.whole_seconds = whole_seconds
        self._folder = folder / "traces" if (folder / "traces").is_dir() else folder
        self.costs = costs
        self._stated = stated
        self._applications: dict[str, MeasuredApplication] = {}

    def job_model(
        self, job: TraceJob, batch: Literal["fixed", "elastic"], *, seed: int
    ) -> ProfiledJob:
        """Return the model of a job; the seed has no effect."""
        app = self._application(job.workload)
        stop = StopRule(epochs=app.epochs) if self._stated else None
        sizes = _elastic_sizes(app, job) if batch == "elastic" else _fixed_sizes(app, job)
        spec = job_spec(job, family=app.name, stop=stop, **sizes)
        return ProfiledJob(app, spec, self.costs)

    def _application(self, name: str) -> MeasuredApplication:
        if name not in self._applications:
            folder = self._folder / name
            if not name.isalnum() or len(name) > MAX_NAME or not folder.is_dir():
                found = sorted(each.name for each in self._folder.iterdir() if each.is_dir())
                problem = f"application {name[:40]!r} has no profile in {self._folder}"
                raise TraceError(problem, f"profiled: {', '.join(found)}", "application")
            self._applications[name] = MeasuredApplication(folder)
        return self._applications[name]


def _elastic_sizes(app: MeasuredApplication, job: TraceJob) -> dict[str, Any]:
    most, wanted = app.most_batch, min(job.slots, MAX_SLOTS)
    if app.name in SINGLE_SLOT:
        first, local, slots, wanted = most, most, (1, 1), 1
    else:
        first, slots = app.first_batch, (1, MAX_SLOTS)
        local = min(most, app.most_local * MAX_PASSES)
    return {
        "batch_size": first, "max_batch_size": most, "max_local_batch": local, "slots": slots,
        "slots_wanted": wanted,
    }  # fmt: skip


def _fixed_sizes(app: MeasuredApplication, job: TraceJob) -> dict[str, Any]:
    batch = job.batch or app.first_batch * job.slots
    if batch > app.most_batch:
        problem = f"job {job.name}: {app.name} was measured up to a batch of {app.most_batch}"
        raise TraceError(f"{problem}, not {batch}", "lower its batch_size", "batch_size")
    most, wanted = max(1, min(MAX_SLOTS, batch // app.least_local)), job.slots
    if app.name in SINGLE_SLOT:
        most = wanted = 1
    slots = (1, max(most, wanted))
    return {"batch_size": batch, "max_batch_size": KEEP, "slots": slots, "slots_wanted": wanted}
