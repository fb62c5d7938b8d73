"""Curves of all jobs that report losses; one is fitted again when its job reported."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from controlplane.policy.slaq.loss_reports import LossReports
from controlplane.prediction.convergence_curves import ConvergenceCurves, fit_curves
from schemas.ids import JobId


class FittedLosses:
    """Losses by job, and their curves."""

    def __init__(self, kept: int, decay: float) -> None:
        """Begin without reports.

        Args:
            kept: reports of each job that its curve is fitted to.
            decay: weight of a report against the one after it.
        """
        self._kept, self._decay = kept, decay
        self._reports: dict[JobId, LossReports] = {}
        self._fitted: dict[JobId, tuple[int, int]] = {}  # edition and row
        self._curves = self._fit([])

    def reports(self, job: JobId) -> LossReports:
        """Of one job, from none on."""
        found = self._reports.get(job)
        if found is None:
            found = self._reports[job] = LossReports(self._kept)
        return found

    def forget(self, job: JobId) -> None:
        """It has ended."""
        self._reports.pop(job, None)
        self._fitted.pop(job, None)

    def curves(self, jobs: Sequence[JobId]) -> ConvergenceCurves:
        """A curve for each, in their order."""
        stale = [
            name for name in jobs if self._fitted.get(name, (-1,))[0] != self.reports(name).edition
        ]
        if stale:
            kept = [name for name in self._fitted if name not in set(stale)]
            old = self._curves.rows(
                np.array([self._fitted[name][1] for name in kept], dtype=np.int64)
            )
            self._curves = old.followed_by(self._fit([self.reports(name) for name in stale]))
            self._fitted = {
                name: (self.reports(name).edition, row) for row, name in enumerate((*kept, *stale))
            }
        return self._curves.rows(np.array([self._fitted[name][1] for name in jobs], dtype=np.int64))

    def _fit(self, reports: Sequence[LossReports]) -> ConvergenceCurves:
        positions = np.full((len(reports), self._kept), np.nan)
        losses = positions.copy()
        for row, one in enumerate(reports):
            if one.losses:
                positions[row, -len(one.positions) :] = one.positions
                losses[row, -len(one.losses) :] = one.losses
        return fit_curves(positions, losses, decay=self._decay)
