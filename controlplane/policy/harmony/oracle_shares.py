"""What an oracle says of neighbours, in the place of what was learnt."""

from __future__ import annotations

from controlplane.policy.api import Oracle
from controlplane.policy.planning.interference.occupancy import Occupancy
from schemas.ids import JobId


class OracleShares:
    """A `SpeedShares` that knows: for comparison, in a simulation.

    Args:
        oracle: is asked each time.
    """

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle

    def share(self, job: JobId, where: Occupancy) -> float:
        """See `SpeedShares`."""
        return self._oracle.speed_share(
            job, where.nodes, {node: where.on(node) for node in where.nodes[job]}
        )
