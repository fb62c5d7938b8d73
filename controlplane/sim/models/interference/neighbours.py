"""Slow-downs by who the neighbours are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from typing import Final
from zlib import crc32

from numpy.random import default_rng

from controlplane.sim.models.interference.demands import Bound
from schemas.ids import JobId, NodeId

# How much a job loses (first) beside another one (second), as it is bound; chosen: most beside its
# like, but on the GPU, which it shares with nobody; scaled to the mean that is asked for.
LOSSES: Final[Mapping[tuple[Bound, Bound], float]] = {
    ("cpu", "cpu"): 1.0, ("cpu", "pcie"): 0.3, ("cpu", "network"): 0.3, ("cpu", "compute"): 0.4,
    ("pcie", "cpu"): 0.2, ("pcie", "pcie"): 1.0, ("pcie", "network"): 0.5, ("pcie", "compute"): 0.1,
    ("network", "cpu"): 0.2, ("network", "pcie"): 0.4, ("network", "network"): 1.0,
    ("network", "compute"): 0.1, ("compute", "cpu"): 0.4, ("compute", "pcie"): 0.1,
    ("compute", "network"): 0.1, ("compute", "compute"): 0.1,
}  # fmt: skip
STEPS: Final = 60  # of a bisection


@dataclass(slots=True)
class DistributedInterference:
    """Pollux' rule: jobs on several nodes that share one of them are slowed by a fixed share."""

    share: float
    spread: Callable[[JobId], bool]  # whether a job is on several nodes

    def remaining_speed(self, job: JobId, at: Mapping[NodeId, Iterable[JobId]]) -> float:
        """Less when another spread job is on one of its nodes."""
        if not self.spread(job):
            return 1.0
        meets = any(other != job and self.spread(other) for here in at.values() for other in here)
        return 1.0 - self.share if meets else 1.0


@dataclass(slots=True)
class PairwiseInterference:
    """The worst neighbour counts: speed = exp(-max theta[family, family of the other]).

    Each ordered pair of families has a slow-down of its own, drawn once from the seed between 0
    and twice the mean.
    """

    mean: float
    seed: int
    family: Callable[[JobId], str]
    _drawn: dict[tuple[str, str], float] = field(default_factory=dict)

    def remaining_speed(self, job: JobId, at: Mapping[NodeId, Iterable[JobId]]) -> float:
        """What the worst neighbour leaves."""
        mine = self.family(job)
        others = {self.family(other) for here in at.values() for other in here if other != job}
        return min((1.0 - self._loss(mine, other) for other in others), default=1.0)

    def _loss(self, mine: str, other: str) -> float:
        known = self._drawn.get((mine, other))
        if known is None:
            rng = default_rng((self.seed, crc32(mine.encode()), crc32(other.encode())))
            known = self._drawn[mine, other] = min(0.9, float(rng.uniform(0.0, 2.0 * self.mean)))
        return known


@dataclass(slots=True)
class ClassInterference:
    """Classes of jobs slow each other down, and every neighbour adds to it.

    speed = exp(-max over the job's nodes of scale x sum of LOSSES[class, class of the other]).
    """

    bound: Callable[[JobId], Bound]
    scale: float = 1.0

    def remaining_speed(self, job: JobId, at: Mapping[NodeId, Iterable[JobId]]) -> float:
        """What the worst node leaves."""
        mine = self.bound(job)
        sums = [
            math.fsum(LOSSES[mine, self.bound(other)] for other in here if other != job)
            for here in at.values()
        ]
        return math.exp(-self.scale * max(sums, default=0.0))


def class_scale(share: float, bounds: Iterable[Bound]) -> float:
    """The scale at which random pairs of jobs lose so much of their speed on average.

    Args:
        share: mean over both jobs of all pairs of two models, in (0, 1).
    """
    pairs = [LOSSES[pair] for pair in permutations(bounds, 2)]
    low, high = 0.0, 1e3
    for _ in range(STEPS):
        middle = (low + high) / 2.0
        mean = sum(1.0 - math.exp(-middle * loss) for loss in pairs) / max(1, len(pairs))
        low, high = (middle, high) if mean < share else (low, middle)
    return high
