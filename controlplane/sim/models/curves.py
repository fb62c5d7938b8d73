"""Jobs that replay recorded loss curves on cores, as in SLAQ's evaluation.

A job trains one recorded curve; an iteration is an epoch. The paper reports 160 jobs, 15 s apart,
on 20 nodes of 32 cores, and the times to 90 and 95% loss reduction under its fair scheduler (71 and
98 s), but neither sizes of jobs nor times of iterations. Here a job's work is random, with a mean
that reproduces those two times under `fair` (`WORK_CORE_S`). Only the size of the cluster limits
the cores of a job, as in the paper. Invalid files and unknown curves raise `TraceError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Final, Literal
from zlib import crc32

import msgspec
from numpy.random import default_rng

from controlplane.sim.cluster import TraceError
from controlplane.sim.models.job_model import (
    ChangeCosts,
    EpochMetrics,
    JobModel,
    Placement,
    Throughput,
    TrainingModel,
    job_spec,
)
from controlplane.sim.results import TraceJob
from schemas.jobs import StopRule

FILE: Final = "recorded_curves.json"  # ships in the folder of this module
REMEDY: Final = "write the file again: ones sim record-curves FILE"

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Convergence = Literal["sublinear", "linear", "non-convex"]


class LossCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Losses of one training, before the first iteration and after each iteration."""

    name: Text  # unique: family, data set and settings
    family: Text  # the algorithm
    convergence: Convergence  # class in SLAQ section 2; "linear" includes superlinear
    data: Text  # the data set
    settings: dict[str, str | float]  # settings of the algorithm
    losses: tuple[float, ...]  # before the first iteration and after each iteration

    @property
    def iterations(self) -> int:
        """Number of iterations of the training."""
        return len(self.losses) - 1

    @property
    def least(self) -> float:
        """Smallest loss of the training."""
        return min(self.losses)

    def normalised(self, iteration: int) -> float:
        """Return the share of the loss reduction that remains: 1 at first, 0 at the smallest loss.

        SLAQ, figure 4. The share can be above 1; it is constant after the last iteration.
        """
        least = self.least
        value = self.losses[min(iteration, self.iterations)]
        return (value - least) / (self.losses[0] - least)


class RecordedCurves(msgspec.Struct, frozen=True, kw_only=True):
    """Loss curves of one recording, with its command, date, seed and library versions."""

    command: str
    date: str  # day of the recording, ISO 8601
    seed: int
    versions: dict[str, str]  # versions of the libraries used
    curves: tuple[LossCurve, ...]

    def by_name(self) -> dict[str, LossCurve]:
        """Return a dictionary from the name of a curve to the curve."""
        return {curve.name: curve for curve in self.curves}


def encode(recorded: RecordedCurves) -> bytes:
    """Return recorded curves as a JSON document with one line per curve."""
    head = msgspec.json.encode(msgspec.structs.replace(recorded, curves=()))
    lines = b",\n".join(msgspec.json.encode(curve) for curve in recorded.curves)
    return head.removesuffix(b"[]}") + b"[\n" + lines + b"\n]}\n"


def decode(text: bytes, source: str) -> RecordedCurves:
    """Return the curves in a document that `encode` made; an error names `source`."""
    try:
        recorded = msgspec.json.decode(text, type=RecordedCurves)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{source}: {error}", REMEDY) from None
    names = [curve.name for curve in recorded.curves]
    if not names or len(set(names)) < len(names):
        raise TraceError(f"{source}: curves need names, each its own", REMEDY, "name")
    for curve in recorded.curves:
        if curve.iterations < 1 or not curve.least < curve.losses[0]:
            problem = f"{source}: curve {curve.name!r} lowers no loss"
            hint = "give a loss before the first iteration, and lower ones after"
            raise TraceError(problem, hint)
    return recorded


def read_curves(path: Path) -> RecordedCurves:
    """Read a file that `ones sim record-curves` wrote."""
    try:
        return decode(path.read_bytes(), str(path))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}", REMEDY, "curves") from None


@cache
def shipped_curves() -> RecordedCurves:
    """Return the curves that ship with the simulator."""
    text = resources.files(__package__).joinpath(FILE).read_bytes()
    return decode(text, FILE)


WORK_CORE_S: Final = 12_500.0  # mean work of a job: 130% of the work of 640 cores in 15 s
WORK_SPREAD: Final = 0.8  # sigma of the logarithm of a job's work; chosen
MAX_CORES: Final = 4096  # limit per job; large, because speeds are linear in the cores
SAMPLES: Final = 2**20  # size of a job's data set; each iteration passes over all samples
# Spark moves tasks to other executors between two iterations. Chosen: tenths of a second.
COSTS: Final = ChangeCosts(start_s=0.5, restart_s=0.5, prepare_s=0.2, switch_s=0.05)


@dataclass(eq=False)
class CurvesModel(TrainingModel):
    """Training model of jobs that replay loss curves."""

    curves: Mapping[str, LossCurve]  # key: name of the curve, which is the workload in traces
    costs: ChangeCosts = COSTS
    work_core_s: float = WORK_CORE_S  # mean seconds of a job on one core
    scaling: float = 1.0  # c cores are c ** scaling times as fast as one; in (0, 1], paper: 1
    stated: bool = False  # True: users state the number of iterations

    def job_model(
        self, job: TraceJob, batch: Literal["fixed", "elastic"], *, seed: int
    ) -> CurvesJob:
        """Return the model of a job; the batch is the same under any policy."""
        curve = self.curves.get(job.workload)
        if curve is None:
            problem = f"job {job.name}: {job.workload[:60]!r} is not a recorded curve"
            hint = f"choose from {len(self.curves)}, such as {next(iter(self.curves))}"
            raise TraceError(problem, hint, "workload")
        if job.slots < 1:
            problem = f"job {job.name} asks for {job.slots} cores"
            raise TraceError(problem, "give at least 1", "slots")
        rng = default_rng((seed, crc32(job.name.encode())))
        spread = rng.lognormal(-(WORK_SPREAD**2) / 2.0, WORK_SPREAD)  # mean 1
        return CurvesJob(job, curve, self, core_s=self.work_core_s * spread)


class CurvesJob(JobModel):
    """Job that replays a loss curve; each iteration passes over all samples."""

    def __init__(
        self, job: TraceJob, curve: LossCurve, model: CurvesModel, *, core_s: float
    ) -> None:
        """Create a job. On one core, all of its iterations take `core_s` seconds in total."""
        self._curve = curve
        self._iteration_s = core_s / curve.iterations  # time on one core
        self._scaling = model.scaling
        self.application, self.costs = curve.family, model.costs
        self.epochs, self.epoch_samples = curve.iterations, SAMPLES
        self.spec = job_spec(
            job,
            args=(curve.name,),
            family=curve.family,
            batch_size=SAMPLES,
            max_batch_size=SAMPLES,
            max_local_batch=SAMPLES,
            slots=(1, max(MAX_CORES, job.slots)),
            stop=StopRule(epochs=curve.iterations) if model.stated else None,
        )

    def throughput(self, placement: Placement, batch: int, epoch: int) -> Throughput:
        """Return the throughput of a group; only the number of cores matters."""
        step_s = self._iteration_s / float(sum(placement)) ** self._scaling
        return Throughput(batch / step_s, batch / step_s, step_s)

    def epoch_metrics(self, epoch: int, batch: int) -> EpochMetrics:
        """Return the recorded loss after `epoch` iterations."""
        loss = self._curve.losses[min(epoch, self._curve.iterations)]
        return EpochMetrics(train_loss=loss, metrics={}, noise_scale=None)

    def loss_left(self, epoch: int) -> float | None:
        """Return the curve's remaining share of the loss reduction after `epoch` iterations."""
        return self._curve.normalised(epoch)

    def remaining_steps(self, epoch: int, progress: float) -> float:
        """Return the number of iterations until the end of the job."""
        return max(0.0, self._curve.iterations - progress / SAMPLES)
