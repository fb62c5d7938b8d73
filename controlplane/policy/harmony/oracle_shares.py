"""What an oracle says of neighbours, in the place of what was learnt."""

from __future__ import annotations

from typing import Final

from controlplane.policy.api import Oracle
from controlplane.policy.planning.interference.occupancy import Occupancy
from schemas.ids import JobId, NodeId

Place = tuple[JobId, frozenset[tuple[NodeId, int]]]
KEPT: Final = 50_000  # answers


class OracleShares:
    """A `SpeedShares` that knows: for comparison, in a simulation.

    The same job in the same place beside the same others is asked about once.
    """

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._answers: dict[tuple[JobId, frozenset[Place]], float] = {}

    def share(self, job: JobId, where: Occupancy) -> float:
        """See `SpeedShares`."""
        asked = (job, *where.neighbours(job))
        key = (job, frozenset((one, frozenset(where.nodes[one].items())) for one in asked))
        known = self._answers.get(key)
        if known is None:
            if len(self._answers) >= KEPT:
                self._answers.clear()
            on = {node: where.on(node) for node in where.nodes[job]}
            known = self._answers[key] = self._oracle.speed_share(job, where.nodes, on)
        return known
