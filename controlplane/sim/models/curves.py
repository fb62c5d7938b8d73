"""Jobs that replay recorded loss curves on cores: what SLAQ was evaluated with.

A job trains one recorded curve, an iteration an epoch. The paper gives 160 jobs, 15 s apart, on 20
nodes of 32 cores, and says after how long their losses had come down by 90 and 95% under its fair
scheduler (71 and 98 s); it gives neither sizes of jobs nor times of iterations. Here a job's work
is drawn, with a mean that brings those two times about under `fair` (`WORK_CORE_S`). No
bound on the cores of a job but the cluster, as in the paper.

Loss curves of real trainings as values, and the file that keeps them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Final, Literal
from zlib import crc32

import msgspec
from numpy.random import default_rng

from controlplane.sim.cluster import TraceError
from controlplane.sim.models.job_model import ChangeCosts, EpochMetrics, Placement, Throughput
from controlplane.sim.results import TraceJob
from schemas.jobs import JobSpec, StopRule

FILE: Final = "recorded_curves.json"  # ships beside this module
REMEDY: Final = "write it anew: ones sim record-curves FILE"

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Convergence = Literal["sublinear", "linear", "non-convex"]


class LossCurve(msgspec.Struct, frozen=True, kw_only=True):
    """What one training lost, iteration by iteration."""

    name: Text  # unique: family, data set and what tells it from its siblings
    family: Text  # the algorithm
    convergence: Convergence  # as SLAQ section 2 sorts algorithms; linear: superlinear too
    data: Text  # the data set
    settings: dict[str, str | float]  # of the algorithm
    losses: tuple[float, ...]  # before the first iteration, then after each one

    @property
    def iterations(self) -> int:
        """That the training took."""
        return len(self.losses) - 1

    @property
    def least(self) -> float:
        """Smallest loss that it reached."""
        return min(self.losses)

    def normalised(self, iteration: int) -> float:
        """The share of its loss reduction that is still to come: 1 at first, 0 at the least.

        SLAQ, figure 4: "when a new job arrives, its initial loss is 1.0".

        Args:
            iteration: finished ones; beyond the last one it is that of the last.

        Returns:
            Above 1 where it has lost more than at first.
        """
        least = self.least
        value = self.losses[min(iteration, self.iterations)]
        return (value - least) / (self.losses[0] - least)


class RecordedCurves(msgspec.Struct, frozen=True, kw_only=True):
    """All curves of one recording, and how they came about."""

    command: str
    date: str  # ISO 8601, of the day
    seed: int
    versions: dict[str, str]  # of the libraries that trained
    curves: tuple[LossCurve, ...]

    def by_name(self) -> dict[str, LossCurve]:
        """The curves, each under its name."""
        return {curve.name: curve for curve in self.curves}


def encode(recorded: RecordedCurves) -> bytes:
    """As a JSON document, each curve on a line of its own.

    Args:
        recorded: to write down.
    """
    head = msgspec.json.encode(msgspec.structs.replace(recorded, curves=()))
    lines = b",\n".join(msgspec.json.encode(curve) for curve in recorded.curves)
    return head.removesuffix(b"[]}") + b"[\n" + lines + b"\n]}\n"


def decode(text: bytes, source: str) -> RecordedCurves:
    """The curves that `encode` wrote.

    Args:
        text: a JSON document.

    Raises:
        TraceError: if it is none, or a curve cannot be replayed.
    """
    try:
        recorded = msgspec.json.decode(text, type=RecordedCurves)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{source}: {error}", REMEDY) from None
    names = [curve.name for curve in recorded.curves]
    if not names or len(set(names)) < len(names):
        raise TraceError(f"{source}: curves need names, each its own", REMEDY, "name")
    for curve in recorded.curves:
        if curve.iterations < 1 or not curve.least < curve.losses[0]:
            what = f"{source}: curve {curve.name!r} lowers no loss"
            raise TraceError(what, "give a loss before the first iteration, and lower ones after")
    return recorded


def read_curves(path: Path) -> RecordedCurves:
    """The curves of a file that `ones sim record-curves` wrote.

    Raises:
        TraceError: if it cannot be read, or is none.
    """
    try:
        return decode(path.read_bytes(), str(path))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}", REMEDY, "curves") from None


@cache
def shipped_curves() -> RecordedCurves:
    """The curves that ship with the simulator.

    Raises:
        TraceError: if somebody changed the file, and it cannot be read any more.
    """
    text = resources.files(__package__).joinpath(FILE).read_bytes()
    return decode(text, FILE)


WORK_CORE_S: Final = 12_500.0  # mean of a job's work: 130% of what 640 cores do in 15 s
SPREAD: Final = 0.8  # of the logarithm of a job's work; chosen
MOST_CORES: Final = 4096  # that a job can use: with linear speeds, all that there are
SAMPLES: Final = 2**20  # of a job's data set: each iteration passes over all of it
# Spark starts tasks on other executors with the next iteration. Chosen: tenths of a second.
COSTS: Final = ChangeCosts(start_s=0.5, restart_s=0.5, prepare_s=0.2, switch_s=0.05)


class CurvesModel:
    """Jobs that replay loss curves, each as fast as its cores."""

    def __init__(
        self,
        curves: Mapping[str, LossCurve],
        costs: ChangeCosts = COSTS,
        *,
        work_core_s: float = WORK_CORE_S,
        scaling: float = 1.0,
        stated: bool = False,
    ) -> None:
        """Choose what the curves do not say.

        Args:
            curves: by name, as traces name them.
            work_core_s: mean over jobs of the seconds that all iterations take on one core.
            scaling: exponent of the speed over the cores, in (0, 1]: c cores are c ** scaling times
                as fast as one. Paper: 1, as many times as fast as there are cores.
            stated: users state how many iterations their jobs take; else nobody knows.
        """
        self._curves = curves
        self._costs = costs
        self._work_core_s = work_core_s
        self._scaling = scaling
        self._stated = stated

    @property
    def whole_seconds(self) -> bool:
        """Epochs last as long as they last."""
        return False

    def job_model(
        self, job: TraceJob, batch: Literal["fixed", "elastic"], *, seed: int
    ) -> CurvesJob:
        """The truth about `job`; its batch is fixed whatever the policy.

        Raises:
            TraceError: if there is no such curve.
        """
        curve = self._curves.get(job.workload)
        if curve is None:
            what = f"job {job.name}: {job.workload[:60]!r} is no recorded curve"
            hint = f"choose from {len(self._curves)}, such as {next(iter(self._curves))}"
            raise TraceError(what, hint, "workload")
        if job.slots < 1:
            what = f"job {job.name} asks for {job.slots} cores"
            raise TraceError(what, "give at least 1", "slots")
        rng = default_rng((seed, crc32(job.name.encode())))
        spread = rng.lognormal(-(SPREAD**2) / 2.0, SPREAD)  # mean 1
        return CurvesJob(
            job,
            curve,
            core_s=self._work_core_s * spread,
            scaling=self._scaling,
            costs=self._costs,
            stated=self._stated,
        )


class CurvesJob:
    """One job; see `JobModel`."""

    def __init__(
        self,
        job: TraceJob,
        curve: LossCurve,
        *,
        core_s: float,
        scaling: float,
        costs: ChangeCosts,
        stated: bool,
    ) -> None:
        """Let it train a curve.

        Args:
            core_s: seconds that all its iterations take on one core.
            scaling: exponent of its speed over its cores.
            stated: whether policies know how many iterations it takes.
        """
        self._curve = curve
        self._iteration_s = core_s / curve.iterations  # on one core
        self._scaling = scaling
        self._costs = costs
        self._spec = JobSpec(
            name=re.sub(r"[^A-Za-z0-9_-]+", "-", job.name).lstrip("-_")[:48] or "job",
            script="train.py",
            args=(curve.name,),
            family=curve.family,
            batch_size=SAMPLES,
            max_batch_size=SAMPLES,
            max_local_batch=SAMPLES,
            slots=(1, max(MOST_CORES, job.slots)),
            slots_wanted=job.slots,
            stop=StopRule(epochs=curve.iterations) if stated else None,
            retries=1,
        )

    @property
    def application(self) -> str:
        """Its algorithm."""
        return self._curve.family

    @property
    def spec(self) -> JobSpec:
        """What its user submits."""
        return self._spec

    @property
    def epoch_samples(self) -> int:
        """Of one iteration: all."""
        return SAMPLES

    @property
    def costs(self) -> ChangeCosts:
        """Of this job's changes."""
        return self._costs

    @property
    def epochs(self) -> int:
        """Iterations of its curve."""
        return self._curve.iterations

    def throughput(self, placement: Placement, batch: int, epoch: int) -> Throughput:
        """The same wherever its cores are; no iteration is harder than another."""
        step_s = self._iteration_s / float(sum(placement)) ** self._scaling
        return Throughput(batch / step_s, batch / step_s, step_s)

    def epoch_ends_at(self, epoch: int) -> float:
        """After so many passes over its data."""
        return float((epoch + 1) * SAMPLES)

    def lost_progress(self, before: int, batch: int, epoch: int) -> float:
        """None: its batch never changes."""
        return 0.0

    def noise_scale(self, epoch: int, batch: int) -> float | None:
        """It measures none."""
        return None

    def epoch_metrics(self, epoch: int, batch: int) -> EpochMetrics:
        """The loss after so many iterations, as it was recorded."""
        loss = self._curve.losses[min(epoch, self._curve.iterations)]
        return EpochMetrics(train_loss=loss, metrics={}, noise_scale=None)

    def loss_left(self, epoch: int) -> float | None:
        """Of its curve."""
        return self._curve.normalised(epoch)

    def remaining_steps(self, epoch: int, progress: float) -> float:
        """Iterations that are left."""
        return max(0.0, self._curve.iterations - progress / SAMPLES)
