"""Facts of finished epochs and times of steps, as workers report them."""

from __future__ import annotations

import msgspec


class StepTimes(msgspec.Struct, frozen=True):
    """Mean times of a worker's steps, each of which has `passes` passes.

    The last pass includes the reduction and is longer than the others by `sync_s`.
    """

    pass_s: float  # seconds of a step's last pass, with its reduction
    sync_s: float  # seconds of the reduction, including waits for peers; 0 without peers
    local_batch: int  # samples in the largest pass of the step
    passes: int  # passes in a step; more than 1: gradient accumulation

    @property
    def step_s(self) -> float:
        """Seconds of a whole step."""
        return (self.pass_s - self.sync_s) * self.passes + self.sync_s


class EpochFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one finished epoch of a job."""

    epoch: int  # 1-based, counted by the job
    step: int  # optimizer steps since the job began
    samples_per_s: float  # X_j, mean over the epoch, pauses included
    train_loss: float | None  # mean over the epoch; None: not measured, or not finite
    metrics: dict[str, float]
    global_batch: int
    lr: float
    samples_done: int = 0  # Y_processed since the job began; 0: not known
    epoch_samples: int = 0  # ||D||; 0: not known
    noise_scale: float | None = None  # gradient noise scale, samples; needs two batch sizes
    trained_samples: int | None = None  # samples trained in this epoch; None: not known
    left_early: bool = False  # the script left its loop before the epoch's end
    loss_is_not_finite: bool = False  # the mean training loss is NaN or infinite
    step_times: StepTimes | None = None  # means over the epoch; None: not measured
