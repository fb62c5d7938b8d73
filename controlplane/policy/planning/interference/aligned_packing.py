"""Multi-resource packing: the placer `tetris-resources`.

Grandl et al., SIGCOMM '14 (Tetris), section 3.2: a task goes to a machine that has room for its
peak demands, where the dot product of demand and what is free is greatest, both as shares of the
machine. Harmony compares itself with it ("to avoid resource fragmentation"). Demands are what
workers report to use. Tetris knows every capacity; here a node's slots and cores are known, and its
bandwidth is taken to be the most that was ever used on one. Tetris does not prefer nodes in use;
here it does, because a node alone is what the next gang wants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from controlplane.policy.api import ClusterView, JobEnded, JobView, PolicyEvent, StepsSeen
from controlplane.policy.planning.interference.worker_usages import WorkerUsages
from controlplane.policy.planning.scored_rooms import NodeLoad, Score
from schemas.ids import NodeId, Seconds

DIGITS: Final = 6  # of alignments, in which nodes are equally good
Amounts = tuple[float, float]  # cores, bytes per second that are sent


class AlignedPacking:
    """Nodes with room for all that a worker uses, those in use first, the best aligned first."""

    def __init__(self) -> None:
        """Begin with nothing reported: then only slots count."""
        self._usages = WorkerUsages()
        self._view: ClusterView | None = None
        self._loads: Sequence[NodeLoad] = ()
        self._cores: dict[NodeId, int] = {}
        self._peak_bytes_per_s = 0.0

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn what workers use."""
        match event:
            case StepsSeen():
                self._usages.take(event)
            case JobEnded():
                self._usages.forget(event.job)

    def begin(self, view: ClusterView, loads: Sequence[NodeLoad], now: Seconds) -> None:
        """A plan is being made: what was planned before is what was used since."""
        for load in self._loads:
            self._peak_bytes_per_s = max(self._peak_bytes_per_s, self._used(load)[1])
        self._view, self._loads = view, loads
        self._cores = {slot.node: slot.host_cores for slot in view.slots}

    def score(self, job: JobView, load: NodeLoad) -> Score:
        """Whether it has no room, whether it is empty, and minus the alignment."""
        mine, used = self._usages.of(job.job, job.family), self._used(load)
        there = (float(self._cores.get(load.node, 0)), self._peak_bytes_per_s)
        fits, alignment = True, len(load.free) / load.slots**2
        for asks, taken, whole in zip((mine.cores, mine.bytes_per_s), used, there, strict=True):
            if whole > 0.0:
                fits &= asks + taken <= whole
                alignment += asks / whole * max(0.0, 1.0 - taken / whole)
        return float(not fits), float(not load.workers), -round(alignment, DIGITS)

    def _used(self, load: NodeLoad) -> Amounts:
        jobs = self._view.jobs if self._view is not None else {}
        uses = [
            (many, self._usages.of(job, jobs[job].family))
            for job, many in load.workers.items()
            if job in jobs
        ]
        cores = math.fsum(many * use.cores for many, use in uses)
        return cores, math.fsum(many * use.bytes_per_s for many, use in uses)
