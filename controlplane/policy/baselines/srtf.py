"""Shortest remaining time first with an oracle; a bound with which to compare other policies."""

from __future__ import annotations

from controlplane.policy.api import ClusterView, ImmediatePolicy, JobView, Oracle, Plan, PolicyEvent
from controlplane.policy.options import Options
from controlplane.policy.placement.placers import PlacerName, make_placer
from controlplane.policy.placement.sizes import fit_gangs, gang_plan
from controlplane.policy.placement.slot_partition import gang_size, partition_of
from schemas.ids import Seconds


class SrtfOptions(Options, frozen=True):
    """Options of policy `srtf`."""

    placer: PlacerName = "consolidate"


class Srtf(ImmediatePolicy):
    """Pre-emptive gangs of the wanted size, shortest remaining time first, with backfill.

    Only a simulator knows how long a job will still train. A long job may starve.
    """

    def __init__(self, options: SrtfOptions, oracle: Oracle) -> None:
        self.options = options
        self._oracle = oracle
        self._placer = make_placer(options.placer)

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Pass the event to the placer."""
        self._placer.observe(event, now)

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Return a plan that goes through jobs by rising remaining time and runs all that fit."""
        partition = partition_of(view, now)
        jobs = [*partition.running, *partition.waiting]
        left = {job.job: self._oracle.remaining_s(job, gang_size(job, partition)) for job in jobs}
        in_order = sorted(jobs, key=lambda job: (left[job.job], job.submitted_at))

        def why(job: JobView) -> tuple[str, dict[str, float]]:
            return f"{left[job.job]:.0f} s left", {"remaining_s": left[job.job]}

        return gang_plan(partition, fit_gangs(partition, in_order), self._placer, why)
