"""What all jobs came to, in a few numbers, and sweeps: for people; no decision looks at it."""

from __future__ import annotations

from typing import Final

import msgspec

from controlplane.core.model.job import Job, SpeedPromise
from controlplane.core.model.job_phases import Phase
from controlplane.core.sweep_read_model import SweepHistory
from schemas.ids import JobId, Seconds

KEPT_GAINS: Final = 1000


class Totals(msgspec.Struct, kw_only=True):
    """Counted while handlers decide, so the journal rebuilds it through the same `handle`."""

    plans_taken: int = 0
    ended: dict[str, int] = {}  # jobs by the state that they ended in
    promises_kept: int = 0  # ends of jobs, by when they were promised first
    promises_broken: int = 0
    rescales: int = 0  # changes of membership, of all jobs
    batch_changes: int = 0
    gains: list[tuple[float, float]] = []  # speed-ups of changes, predicted and realised; latest
    sweeps: dict[JobId, SweepHistory] = {}

    def sweep_of(self, job: JobId) -> SweepHistory:
        """The past of the sweep `job`; empty if nothing happened to it yet.

        Args:
            job: may be unknown. What is returned for it is not kept.
        """
        return self.sweeps.get(job) or SweepHistory()

    def sweep(self, job: JobId) -> SweepHistory:
        """The past of the sweep `job`, to be written to."""
        return self.sweeps.setdefault(job, SweepHistory())

    def job_ended(self, job: Job, now: Seconds) -> None:
        """A job is over."""
        phase = job.phase
        self.ended[phase.value] = self.ended.get(phase.value, 0) + 1
        if job.promised_end is None or phase in {Phase.FAILED, Phase.CANCELLED}:
            return
        if now <= job.promised_end.first:
            self.promises_kept += 1
        else:
            self.promises_broken += 1

    def speed_measured(self, promise: SpeedPromise, samples_per_s: float) -> None:
        """A speed-up was measured.

        Args:
            samples_per_s: what came, mean over an epoch.
        """
        self.gains.append((promise.then / promise.now, samples_per_s / promise.now))
        del self.gains[:-KEPT_GAINS]
