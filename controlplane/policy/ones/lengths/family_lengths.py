"""What the jobs of one family tell of how long its jobs are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from controlplane.policy.search.observed_families import KEPT_RELATIVES
from controlplane.prediction.length_distribution import pooled_spread
from schemas.ids import JobId

PRIOR_SPREAD: Final = 0.3  # of logarithms of totals within a family, before there are any
PRIOR_TRUST: Final = 2.0  # relatives that this counts for; a judgement, as the next one
COMMON_TRUST: Final = 4.0  # relatives that what all families say counts for in one of them


@dataclass(slots=True)
class FamilyLengths:
    """Totals and progress, samples."""

    finished: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_RELATIVES))
    given_up: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_RELATIVES))
    at_work: dict[JobId, int] = field(default_factory=dict)  # what active jobs have done
    reached: int = 0  # by the job that came furthest
    epoch_samples: int = 0  # ||D||, as reported last

    def outlived(self, job: JobId) -> list[int]:
        """What relatives had done that did not finish there: given up, or still at work.

        Args:
            job: itself is none of its relatives.
        """
        running = [done for other, done in self.at_work.items() if other != job and done > 0]
        return [*self.given_up, *running]

    def progressed(self, job: JobId, done: int) -> None:
        """An active job has done so much."""
        self.at_work[job] = max(self.at_work.get(job, 0), done)
        self.reached = max(self.reached, done)

    def ended(self, job: JobId, done: int, *, succeeded: bool) -> None:
        """A job is over.

        Args:
            succeeded: else it was given up, and might have gone on.
        """
        self.at_work.pop(job, None)
        if done:
            (self.finished if succeeded else self.given_up).append(done)
        self.reached = max(self.reached, done)


class SpreadOfLengths:
    """How much lengths differ within a family, which few relatives cannot tell alone."""

    def __init__(self) -> None:
        self._common = PRIOR_SPREAD
        self._of: dict[str, float] = {}

    def update(self, families: Iterable[FamilyLengths]) -> None:
        """A job has finished."""
        totals = [family.finished for family in families]
        self._common = pooled_spread(totals, PRIOR_SPREAD, PRIOR_TRUST)
        self._of.clear()

    def of(self, name: str, family: FamilyLengths) -> float:
        """Standard deviation of the logarithm of totals."""
        if name not in self._of:
            self._of[name] = pooled_spread([family.finished], self._common, COMMON_TRUST)
        return self._of[name]
