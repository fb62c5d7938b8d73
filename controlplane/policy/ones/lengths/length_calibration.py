"""Whether predicted lengths came true: predictions are kept until their jobs have finished."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from controlplane.policy.ones.lengths.work_left import WorkLeft
from schemas.ids import JobId

STEP: Final = 1.25  # times the work of the last prediction that is kept, before the next one
KEPT: Final = 60  # predictions of one job
KEPT_ERRORS: Final = 2000  # of the latest predictions that were held against what came
LEAST_LEFT: Final = 0.02  # of the total: errors of less are of no use to anybody


@dataclass(frozen=True, slots=True)
class Outcome:
    """One prediction held against what came."""

    error: float  # of what was left, as a share of it
    ratio: float  # predicted over true
    in_wide: bool  # interval of 90%
    in_narrow: bool  # of 80%


@dataclass(frozen=True, slots=True)
class Calibration:
    """How well predictions of the work left matched what came."""

    predictions: int
    median_error: float  # absolute, as a share of what was left
    wide: float  # share of them inside the 90% interval
    narrow: float  # and inside the 80% interval


@dataclass(slots=True)
class _Predictions:
    next_at: float = 0.0  # samples done, from which on the next one is kept
    made: list[tuple[float, WorkLeft]] = field(default_factory=list)  # after so many samples


class LengthCalibration:
    """Of all jobs that finished lately."""

    def __init__(self) -> None:
        self._predictions: dict[JobId, _Predictions] = {}
        self.outcomes: deque[Outcome] = deque(maxlen=KEPT_ERRORS)

    def due(self, job: JobId, done: float) -> bool:
        """Whether a prediction would be kept now."""
        known = self._predictions.get(job)
        return known is None or (done >= known.next_at and len(known.made) < KEPT)

    def add(self, job: JobId, done: float, left: WorkLeft) -> None:
        """Keep a prediction."""
        known = self._predictions.setdefault(job, _Predictions())
        known.made.append((done, left))
        known.next_at = max(done, 1.0) * STEP

    def ended(self, job: JobId, total: float, *, succeeded: bool) -> None:
        """Hold a job's predictions against what came; one that was given up tells nothing."""
        known = self._predictions.pop(job, None)
        if known is None or not succeeded:
            return
        for done, said in known.made:
            left = total - done
            if left > LEAST_LEFT * total:
                wide, narrow = said.within(left)
                error = abs(said.mean - left) / left
                self.outcomes.append(Outcome(error, said.mean / left, wide, narrow))

    def forget(self, active: set[JobId]) -> None:
        """Drop predictions of jobs that nobody will hear of again."""
        self._predictions = {job: own for job, own in self._predictions.items() if job in active}

    def summary(self) -> Calibration | None:
        """Of the latest predictions; None before the first job has finished."""
        seen = self.outcomes
        if not seen:
            return None
        return Calibration(
            predictions=len(seen),
            median_error=median(outcome.error for outcome in seen),
            wide=sum(outcome.in_wide for outcome in seen) / len(seen),
            narrow=sum(outcome.in_narrow for outcome in seen) / len(seen),
        )
