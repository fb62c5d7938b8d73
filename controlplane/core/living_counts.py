"""How many jobs stand where, so that nobody has to walk over all of them to know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import ENDED, Phase
from schemas.ids import JobId


class LivingCounts:
    """Of jobs that have not ended: derived from them once, and kept by whoever changes one.

    Args:
        jobs: that have not ended.
    """

    def __init__(self, jobs: Iterable[Job]) -> None:
        self.phases: Counter[Phase] = Counter()
        self.promised: set[JobId] = set()  # whose end somebody promised
        for job in jobs:
            self.came(job)
            if job.promised_end is not None:
                self.promised.add(job.job)

    def came(self, job: Job) -> None:
        """Count a job that was not there."""
        self.phases[job.phase] += 1

    def moved(self, job: Job, before: Phase) -> None:
        """Count a job elsewhere, or no more."""
        self.phases[before] -= 1
        if job.phase in ENDED:
            self.promised.discard(job.job)
        else:
            self.phases[job.phase] += 1
