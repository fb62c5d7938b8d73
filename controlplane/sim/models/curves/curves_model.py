"""Jobs that replay recorded loss curves on cores: what SLAQ was evaluated with.

A job trains one recorded curve, an iteration an epoch. The paper gives 160 jobs, 15 s apart, on 20
nodes of 32 cores, and says after how long their losses had come down by 90 and 95% under its fair
scheduler (71 and 98 s); it gives neither sizes of jobs nor times of iterations. Here a job's work
is drawn, with a mean that brings those two times about under `fair` (`WORK_CORE_S`). No
bound on the cores of a job but the cluster, as in the paper.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal
from zlib import crc32

from numpy.random import default_rng

from controlplane.sim.models.curves.loss_curves import LossCurve
from controlplane.sim.models.job_model import ChangeCosts, EpochMetrics, Placement, Throughput
from controlplane.sim.simulator_errors import TraceError
from controlplane.sim.submissions import TraceJob
from schemas.jobs import JobSpec, StopRule

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
