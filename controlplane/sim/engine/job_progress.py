"""One job's progress through time: constant between changes of its group."""

from __future__ import annotations

import math
from dataclasses import dataclass

from controlplane.sim.models.job_model import JobModel, Throughput

STOPPED = Throughput(samples_per_s=0.0, progress_per_s=0.0)


@dataclass(slots=True)
class TrainingProgress:
    """Where a job stands, and how fast it goes on.

    Times are virtual seconds; progress is in samples at the job's first batch.
    """

    model: JobModel
    progress: float = 0.0
    epoch: int = 0  # finished
    steps: float = 0.0
    throughput: Throughput = STOPPED
    batch: int = 0  # global, of its present or last group
    since: float = 0.0  # up to when the progress was counted
    stalled_until: float = 0.0
    saved: float = 0.0  # progress of the last checkpoint
    saved_steps: float = 0.0
    epoch_trained_s: float = 0.0  # in the running epoch, without stalls
    epoch_samples: float = 0.0  # processed in it
    trained_s: float = 0.0  # in all, without stalls
    extrapolated_s: float = 0.0  # of that, at speeds that nobody measured
    revision: int = 0  # of its throughput: what was scheduled before is void

    @property
    def is_training(self) -> bool:
        """Whether it makes progress, but for a stall."""
        return self.throughput.progress_per_s > 0.0

    def advance(self, now: float) -> None:
        """Count what was trained up to `now`.

        Args:
            now: virtual seconds; an earlier time than the last one counts nothing.
        """
        trained_s = now - max(self.since, self.stalled_until)
        if trained_s > 0.0 and self.throughput is not STOPPED:
            self.progress += self.throughput.progress_per_s * trained_s
            samples = self.throughput.samples_per_s * trained_s
            self.epoch_samples += samples
            self.epoch_trained_s += trained_s
            self.trained_s += trained_s
            self.extrapolated_s += trained_s if self.throughput.extrapolated else 0.0
            self.steps += samples / self.batch if self.batch else 0.0
        self.since = max(self.since, now)

    def set_throughput(self, throughput: Throughput, now: float) -> None:
        """Train at another speed from now on (virtual seconds).

        Args:
            throughput: of the group from now on; `STOPPED` if there is none.
            now: virtual seconds; up to then the old speed counts.
        """
        self.advance(now)
        self.throughput = throughput
        self.revision += 1

    def stall(self, until: float, now: float) -> None:
        """Nobody trains before `until` (virtual seconds).

        Args:
            until: virtual seconds; a longer stall that is under way stays.
            now: virtual seconds.
        """
        self.advance(now)
        self.stalled_until = max(self.stalled_until, until)
        self.revision += 1

    def stop(self, now: float) -> None:
        """No group trains any more.

        Args:
            now: virtual seconds.
        """
        self.set_throughput(STOPPED, now)

    def save(self) -> None:
        """A checkpoint of this moment is durable."""
        self.saved, self.saved_steps = self.progress, self.steps

    def roll_back(self, progress: float) -> None:
        """Go on from an earlier place, perhaps below where the running epoch began.

        Args:
            progress: samples at the first batch; below 0 counts as 0.
        """
        self.progress = max(0.0, progress)

    def epoch_due(self, now: float) -> float:
        """When the running epoch will be finished, if nothing changes; infinite if it will not.

        Args:
            now: virtual seconds.

        Returns:
            Virtual seconds.
        """
        if not self.is_training:
            return math.inf
        return self.due_at(self.model.epoch_ends_at(self.epoch), now)

    def due_at(self, progress: float, now: float) -> float:
        """When a training job will have come so far, if nothing changes.

        Args:
            now: virtual seconds.
        """
        left = progress - self.progress
        begin = max(self.since, self.stalled_until, now)
        return begin + max(0.0, left) / self.throughput.progress_per_s

    def finish_epoch(self, now: float) -> float:
        """The running epoch is over.

        Args:
            now: virtual seconds; the progress becomes that of the epoch's end.

        Returns:
            Samples per second over the time that it trained.
        """
        self.advance(now)
        self.progress = self.model.epoch_ends_at(self.epoch)
        self.epoch += 1
        trained_s, samples = self.epoch_trained_s, self.epoch_samples
        self.epoch_trained_s = self.epoch_samples = 0.0
        return samples / trained_s if trained_s > 0.0 else self.throughput.samples_per_s
