"""Jobs that share a node slow each other down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol
from zlib import crc32

from numpy.random import default_rng

from controlplane.sim.simulator_errors import TraceError
from schemas.ids import JobId, NodeId

KINDS = "none, pollux:SHARE or pairwise:SHARE"


class Interference(Protocol):
    """By how much a job is slowed down."""

    def remaining_speed(self, job: JobId, at: Mapping[NodeId, Iterable[JobId]]) -> float:
        """The share of its speed that `job` keeps.

        Args:
            job: the one to look at.
            at: every node that it is on, and all jobs there, itself too.
        """
        ...


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


def parse_interference(text: str) -> tuple[str, float]:
    """The kind and the share, in [0, 1), of `none`, `pollux:0.25` or `pairwise:0.25`.

    Args:
        text: as an option of a command has it.

    Raises:
        TraceError: if it is none of these.
    """
    kind, _, number = text.partition(":")
    try:
        share = float(number) if number else 0.0
    except ValueError:
        share = -1.0
    if kind not in {"none", "pollux", "pairwise"} or not 0.0 <= share < 1.0:
        raise TraceError(
            f"interference {text!r} is not one of {KINDS}", "with 0 <= SHARE < 1", "interference"
        )
    return ("none", 0.0) if not share else (kind, share)
