"""Ways to say how much a job has left: what option `length_model` chooses from."""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

import numpy as np

from controlplane.policy.api import EpochSeen, JobEnded, JobView
from controlplane.policy.ones.lengths.family_lengths import FamilyLengths, SpreadOfLengths
from controlplane.policy.ones.lengths.own_evidence import OwnEvidence
from controlplane.policy.ones.lengths.work_left import SHARES, WorkLeft
from controlplane.policy.search.observed_families import KEPT_RELATIVES
from controlplane.prediction.length_distribution import (
    LengthDistribution,
    of_relatives,
    one_length,
)
from controlplane.prediction.remaining_work import remaining_samples
from schemas.ids import JobId

LEAST_STRANGERS: Final = 3  # jobs of other families that finished, before they count
LEAST_STRANGE: Final = 0.3  # spread of the logarithm of their epochs, at least


class LengthModel(Protocol):
    """One way to predict."""

    def epoch(self, event: EpochSeen, family: FamilyLengths) -> None:
        """A job finished an epoch."""
        ...

    def ended(self, event: JobEnded, family: FamilyLengths) -> None:
        """A job is over; its family knows its length already."""
        ...

    def forget(self, active: set[JobId]) -> None:
        """Drop what is known of jobs that nobody will hear of again."""
        ...

    def left(
        self, job: JobView, family: FamilyLengths, done: float, own: OwnEvidence, *, bounds: bool
    ) -> WorkLeft | None:
        """What a job has left that no rule says exactly; None if nothing at all is known.

        Args:
            bounds: whether quantiles are wanted too, which may take ten times as long.
        """
        ...


class ResidualLife:
    """The mean residual life of finished relatives, and nothing else."""

    def epoch(self, event: EpochSeen, family: FamilyLengths) -> None:
        """Nothing is learnt from it."""

    def ended(self, event: JobEnded, family: FamilyLengths) -> None:
        """Nothing is learnt beside its length."""

    def forget(self, active: set[JobId]) -> None:
        """Nothing is remembered of single jobs."""

    def left(
        self, job: JobView, family: FamilyLengths, done: float, own: OwnEvidence, *, bounds: bool
    ) -> WorkLeft | None:
        """As relatives that went on longer; bounds are quantiles of these."""
        if not family.finished and not max(done, family.reached):
            return None
        mean = remaining_samples(done, None, family.finished, family.reached)
        informed = bool(family.finished)
        if not bounds:
            return WorkLeft(mean, informed=informed)
        longer = [total - done for total in family.finished if total > done]
        if not longer:
            as_old = _as_old_as_it_gets(max(done, family.reached), done)
            return WorkLeft(mean, as_old, informed=informed)
        return WorkLeft(mean, tuple(np.quantile(longer, SHARES).tolist()), informed=informed)


class LengthMixture:
    """Relatives' lengths as a mixture, in the light of what tells of the job's own end."""

    def __init__(self) -> None:
        self._before = ResidualLife()
        self._spread = SpreadOfLengths()
        self._epochs: dict[JobId, int] = {}  # finished ones of active jobs
        self._strangers: deque[int] = deque(maxlen=KEPT_RELATIVES)  # epochs of jobs that finished
        self._families: dict[str, FamilyLengths] = {}

    def epoch(self, event: EpochSeen, family: FamilyLengths) -> None:
        """Its epochs are counted, for families of which no job has finished."""
        self._epochs[event.job] = max(self._epochs.get(event.job, 0), event.epoch)

    def ended(self, event: JobEnded, family: FamilyLengths) -> None:
        """Spreads are taken anew."""
        self._families[event.family] = family
        epochs = self._epochs.pop(event.job, 0)
        if event.succeeded:
            self._spread.update(self._families.values())
            if epochs:
                self._strangers.append(epochs)

    def forget(self, active: set[JobId]) -> None:
        """Epochs of other jobs are dropped."""
        self._epochs = {job: many for job, many in self._epochs.items() if job in active}

    def left(
        self, job: JobView, family: FamilyLengths, done: float, own: OwnEvidence, *, bounds: bool
    ) -> WorkLeft | None:
        """The mean residual life of the mixture, within what is certain."""
        likely = self._relatives(job, family) or self._like_strangers(job)
        for evidence in own.evidence(job, done):
            likely = likely.given(evidence) if likely is not None else one_length(evidence)
        if likely is None:
            left = self._before.left(job, family, done, own, bounds=bounds)
        else:
            quantiles = likely.quantiles_left(done, SHARES) if bounds else []
            left = WorkLeft(likely.mean_left(done), tuple(quantiles))
        if left is None:
            return None
        least, most = own.bounds(job, done)
        return left.at_least(least).at_most(most)

    def _relatives(self, job: JobView, family: FamilyLengths) -> LengthDistribution | None:
        if not family.finished:
            return None
        spread = self._spread.of(job.family, family)
        return of_relatives(family.finished, family.outlived(job.job), spread)

    def _like_strangers(self, job: JobView) -> LengthDistribution | None:
        """As many epochs as jobs of other families took."""
        if not job.epoch_samples or len(self._strangers) < LEAST_STRANGERS:
            return None
        totals = [float(epochs * job.epoch_samples) for epochs in self._strangers]
        return of_relatives(totals, [], max(LEAST_STRANGE, float(np.std(np.log(totals)))))


def _as_old_as_it_gets(reached: float, done: float) -> tuple[float, ...]:
    """Where nobody was seen to end: half of those that came so far go on for as much again."""
    return tuple(reached / (1.0 - share) - done for share in SHARES)
