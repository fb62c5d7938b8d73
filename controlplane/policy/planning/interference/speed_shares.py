"""Who knows how neighbours slow jobs down is asked this: somebody who learns, or an oracle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from controlplane.policy.planning.interference.occupancy import Layout, Occupancy
from schemas.ids import JobId


class SpeedShares(Protocol):
    """The share of its speed alone and close together that a job keeps."""

    def share(self, job: JobId, where: Occupancy) -> float:
        """Normalised speed, in (0, 1]."""
        ...


def all_shares(where: Occupancy, shares: SpeedShares) -> dict[JobId, float]:
    """Normalised speeds of everybody, whose sum a placement is judged by (Harmony's reward)."""
    return {job: shares.share(job, where) for job in where.nodes}


def gain_of(
    changes: Mapping[JobId, Layout],
    where: Occupancy,
    shares: SpeedShares,
    now: Mapping[JobId, float] | None = None,
) -> float:
    """What it adds to the sum of normalised speeds if jobs have other workers.

    Args:
        changes: new workers of each; `where` is the same afterwards.
        now: normalised speeds of everybody, if they are known already.
    """
    before = {job: where.nodes.get(job, {}) for job in changes}
    concerned = _with_neighbours(changes, where)
    for job, layout in changes.items():
        where.put(job, layout)
    concerned |= _with_neighbours(changes, where)
    then = sum(shares.share(job, where) for job in concerned if job in where.nodes)
    for job, layout in before.items():
        where.put(job, layout)
    there = [job for job in concerned if job in where.nodes]
    return then - sum(shares.share(job, where) if now is None else now[job] for job in there)


def _with_neighbours(jobs: Iterable[JobId], where: Occupancy) -> dict[JobId, None]:
    found = dict.fromkeys(jobs)
    for job in list(found):
        found |= dict.fromkeys(where.neighbours(job))
    return found
