"""Whether the last growth of a job pays, as its telemetry says within seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from controlplane.policy.api import JobView
from controlplane.prediction.mean_step_times import SMOOTHING
from controlplane.prediction.statistical_efficiency import statistical_efficiency

LOOKS: Final = 2  # measurements of the new group before it is judged
LOSS: Final = 0.1  # share of the progress before, below which a growth loses; less is noise


@dataclass(slots=True)
class GroupPace:
    """How long the steps of one group take, with the cores that it has to itself."""

    version: int
    slots: int
    batch: int  # global, samples per step
    step_s: float = 0.0
    looks: int = 0  # measurements

    def add(self, step_s: float) -> None:
        """One more measurement.

        Args:
            step_s: seconds of a step.
        """
        self.looks += 1
        share = max(SMOOTHING, 1.0 / self.looks)
        self.step_s += share * (step_s - self.step_s)


@dataclass(slots=True)
class GrowthTrial:
    """The group of a job, and the smaller one before it; None: it did not grow."""

    now: GroupPace | None = None
    before: GroupPace | None = None

    def add(self, version: int, slots: int, batch: int, step_s: float) -> None:
        """One more measurement; another group begins another trial.

        Args:
            version: of the group.
            slots: of the group.
            batch: global, samples per step.
            step_s: seconds of a step, at the speed that shared cores would have for it alone.
        """
        now = self.now
        if now is None or (now.version, now.batch) != (version, batch):
            self.before = self._smaller_than(slots)
            now = self.now = GroupPace(version, slots, batch)
        now.add(step_s)

    def _smaller_than(self, slots: int) -> GroupPace | None:
        """The last group that was smaller; another batch at the same size changes nothing."""
        found = (one for one in (self.now, self.before) if one is not None and one.looks > 0)
        return next((one for one in found if one.slots < slots), None)

    def ratio(self, progress: Callable[[int], float]) -> float | None:
        """Progress of now over that before; None while nothing can be said, or it did not grow.

        Args:
            progress: what one step with such a batch is worth.
        """
        now, before = self.now, self.before
        if now is None or before is None or now.looks < LOOKS:
            return None
        then = progress(before.batch) / before.step_s
        return progress(now.batch) / now.step_s / then

    def loss(self, progress: Callable[[int], float]) -> float | None:
        """The same, if the growth loses; None if it does not, or nothing can be said yet.

        Args:
            progress: see `ratio`.
        """
        ratio = self.ratio(progress)
        return ratio if ratio is not None and ratio < 1.0 - LOSS else None


def growth_loss(trial: GrowthTrial, job: JobView, noise_scale: float) -> tuple[float, int] | None:
    """What the last growth of a job made of its progress, a factor, and its slots before.

    Args:
        trial: of the job.
        job: as the view shows it; a trial of another group than it has says nothing.
        noise_scale: phi, samples.

    Returns:
        None if it did not grow, too little was measured, or the growth does not lose.
    """
    now, before = trial.now, trial.before
    present = (len(job.running_on), sum(job.running_on.values()))
    if now is None or before is None or (now.slots, now.batch) != present:
        return None

    def progress(batch: int) -> float:
        worth = statistical_efficiency(np.array([float(batch)]), job.batch_size, noise_scale)
        return batch * float(worth[0])

    loss = trial.loss(progress)
    return None if loss is None else (loss, before.slots)
