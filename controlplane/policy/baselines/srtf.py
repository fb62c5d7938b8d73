"""Shortest remaining time first, for one who knows it: what others can be compared with."""

from __future__ import annotations

import msgspec

from controlplane.policy.api import ClusterView, ImmediatePolicy, JobView, Oracle, Plan, PolicyEvent
from controlplane.policy.placement.placers import PlacerName, placer_of
from controlplane.policy.placement.shares import fit_gangs, gang_plan
from controlplane.policy.placement.slot_partition import gang_size, partition_of
from schemas.ids import Seconds


class SrtfOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of policy `srtf`."""

    placer: PlacerName = "consolidate"


class Srtf(ImmediatePolicy):
    """Pre-emptive gangs of the wanted size, the one that is done soonest first, with backfill.

    Only a simulator can tell how long a job still trains. A long job may starve.
    """

    def __init__(self, options: SrtfOptions, oracle: Oracle) -> None:
        """Ask `oracle` at every plan.

        Args:
            oracle: knows how many seconds each job has left on a gang of its size.
        """
        self.options = options
        self._oracle = oracle
        self._placer = placer_of(options.placer)

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Let the placer learn."""
        self._placer.observe(event, now)

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Serve those first that are done soonest, each that fits."""
        partition = partition_of(view, now)
        jobs = [*partition.running, *partition.waiting]
        left = {job.job: self._oracle.remaining_s(job, gang_size(job, partition)) for job in jobs}
        in_order = sorted(jobs, key=lambda job: (left[job.job], job.submitted_at))

        def why(job: JobView) -> tuple[str, dict[str, float]]:
            return f"{left[job.job]:.0f} s left", {"remaining_s": left[job.job]}

        return gang_plan(partition, fit_gangs(partition, in_order), self._placer, why)
