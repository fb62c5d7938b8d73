"""One job's progress through time: constant between changes of its group."""

from __future__ import annotations

import math
from dataclasses import dataclass

from controlplane.sim.models.job_model import Pace, Work

STILL = Pace(samples_per_s=0.0, progress_per_s=0.0)


@dataclass(slots=True)
class Training:
    """Where a job stands, and how fast it goes on.

    Times are virtual seconds; progress is in samples at the job's first batch.
    """

    work: Work
    progress: float = 0.0
    epoch: int = 0  # finished
    steps: float = 0.0
    pace: Pace = STILL
    batch: int = 0  # global, of its present or last group
    since: float = 0.0  # up to when the progress was counted
    stalled_until: float = 0.0
    saved: float = 0.0  # progress of the last checkpoint
    saved_steps: float = 0.0
    epoch_trained_s: float = 0.0  # in the running epoch, without stalls
    epoch_samples: float = 0.0  # processed in it
    edition: int = 0  # of its pace: what was foreseen before is void

    def catch_up(self, now: float) -> None:
        """Count what was trained up to `now`."""
        trained_s = now - max(self.since, self.stalled_until)
        if trained_s > 0.0 and self.pace is not STILL:
            self.progress += self.pace.progress_per_s * trained_s
            samples = self.pace.samples_per_s * trained_s
            self.epoch_samples += samples
            self.epoch_trained_s += trained_s
            self.steps += samples / self.batch if self.batch else 0.0
        self.since = max(self.since, now)

    def go_on(self, pace: Pace, now: float) -> None:
        """Train at another pace from now on."""
        self.catch_up(now)
        self.pace = pace
        self.edition += 1

    def stall(self, until: float, now: float) -> None:
        """Nobody trains before `until`."""
        self.catch_up(now)
        self.stalled_until = max(self.stalled_until, until)
        self.edition += 1

    def stop(self, now: float) -> None:
        """No group trains any more."""
        self.go_on(STILL, now)

    def save(self) -> None:
        """A checkpoint of this moment is durable."""
        self.saved, self.saved_steps = self.progress, self.steps

    def fall_back(self, progress: float) -> None:
        """Go on from an earlier place, perhaps below where the running epoch began."""
        self.progress = max(0.0, progress)

    def epoch_due(self, now: float) -> float:
        """When the running epoch will be finished, if nothing changes."""
        if self.pace.progress_per_s <= 0.0:
            return math.inf
        left = self.work.epoch_ends_at(self.epoch) - self.progress
        begin = max(self.since, self.stalled_until, now)
        return begin + max(0.0, left) / self.pace.progress_per_s

    def finish_epoch(self, now: float) -> float:
        """The running epoch is over; returns samples per second over it."""
        self.catch_up(now)
        self.progress = self.work.epoch_ends_at(self.epoch)
        self.epoch += 1
        trained_s, samples = self.epoch_trained_s, self.epoch_samples
        self.epoch_trained_s = self.epoch_samples = 0.0
        return samples / trained_s if trained_s > 0.0 else self.pace.samples_per_s
