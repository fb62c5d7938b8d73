"""What every search remembers of jobs: R and what moves it, and how often jobs are submitted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from controlplane.policy.api import JobView
from controlplane.policy.search.batch_limits import LimitBounds, ScaleDown, after_epoch
from schemas.ids import Seconds

KEPT_ARRIVALS: Final = 200  # lambda of the latest submissions, not of last week's


@dataclass(slots=True)
class JobHistory:
    """What is remembered of an active job."""

    bounds: LimitBounds = LimitBounds(1, 1, 1)
    limit: int = 0  # R, samples per step; 0: never seen in a view
    steps: int = 0  # that telemetry reported
    samples: int = 0  # Y_processed, by telemetry
    epoch_due: bool = False  # an epoch ended since R was last looked at
    counted_at: Seconds = Seconds(0.0)  # when the last epoch, or piece of a long one, was counted

    def count_epoch(
        self,
        job: JobView,
        now: Seconds,
        reading: ScaleDown,
        arrivals_per_s: float,
        *,
        contended: bool,
        gradual: bool,
    ) -> None:
        """Move R as after an epoch; the next one is not due yet.

        Args:
            now: seconds on the controller's clock.
        """
        self.epoch_due = False
        self.limit = after_epoch(
            self.limit,
            self.bounds,
            reading,
            ran_s=job.ran_s + max(0.0, now - job.moved_at),
            arrivals_per_s=arrivals_per_s,
            contended=contended,
            gradual=gradual,
        )


class ArrivalRate:
    """Lambda: the mean rate of submissions, over the latest of them."""

    def __init__(self) -> None:
        self._submitted: deque[Seconds] = deque(maxlen=KEPT_ARRIVALS)

    def add(self, submitted_at: Seconds) -> None:
        """One more job came.

        Args:
            submitted_at: seconds on the controller's clock.
        """
        self._submitted.append(submitted_at)

    @property
    def per_s(self) -> float:
        """Jobs per second; 0 until two came at different times."""
        if len(self._submitted) < 2:  # noqa: PLR2004 - an interval has two ends
            return 0.0
        first, last = min(self._submitted), max(self._submitted)
        return (len(self._submitted) - 1) / (last - first) if last > first else 0.0
