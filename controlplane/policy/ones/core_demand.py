"""Whether workers of CPU slots really want a core each, by what they report to use."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from controlplane.policy.api import (
    ClusterView,
    JobEnded,
    JobView,
    PolicyEvent,
    SlotView,
    StepsSeen,
)
from schemas.ids import JobId

KEPT: Final = 0.8  # weight of what was known, at each report
CLEARLY_LESS: Final = 0.35  # of a core: who uses no more waits for something else; a judgement
SATURATED: Final = 0.85  # of a host's cores in use: nobody can tell what workers would use


class CoreDemand:
    """Shows slots with as many cores as their workers make of them.

    A worker of one thread is taken to want a core. Where all jobs' workers are seen to use much
    less, because they wait for a device, for data or for each other, a host has room for more.
    """

    def __init__(self) -> None:
        """Begin with nothing reported."""
        self._jobs: dict[JobId, float] = {}  # cores of a worker
        self._families: dict[str, float] = {}
        self._slots: tuple[SlotView, ...] = ()  # of the last view, and what was shown of them
        self._shown: tuple[float, tuple[SlotView, ...]] = (1.0, ())

    def observe(self, event: PolicyEvent) -> None:
        """Take in what workers use.

        Args:
            event: telemetry, or the end of a job.
        """
        match event:
            case StepsSeen(cpu_cores=float(cores)):
                before = self._jobs.get(event.job, cores)
                self._jobs[event.job] = KEPT * before + (1.0 - KEPT) * cores
                before = self._families.get(event.family, cores)
                self._families[event.family] = KEPT * before + (1.0 - KEPT) * cores
            case JobEnded():
                self._jobs.pop(event.job, None)

    def shown(self, view: ClusterView) -> ClusterView:
        """The view with the cores that count; itself where nobody shares cores, or all want one."""
        if not any(slot.cores for slot in view.slots):
            return view
        demand = self._demand(view)
        if demand == 1.0:
            return view
        if self._slots is not view.slots or self._shown[0] != demand:
            slots = tuple(replace(one, cores=int(one.cores / demand)) for one in view.slots)
            self._slots, self._shown = view.slots, (demand, slots)
        return replace(view, slots=self._shown[1])

    def _demand(self, view: ClusterView) -> float:
        """Cores of one worker of the job that wants most: 1, 1/2, 1/4, ... to keep it steady."""
        most, used = 0.0, 0.0
        for job in view.jobs.values():
            cores = self._of(job)
            if cores > CLEARLY_LESS:
                return 1.0
            most = max(most, cores)
            used += cores * len(job.running_on)
        hosts = {slot.node: slot.cores for slot in view.slots}
        if not view.jobs or used > SATURATED * sum(hosts.values()):
            return 1.0
        demand = 1.0
        while demand / 2.0 >= most and demand > 1.0 / 64.0:
            demand /= 2.0
        return demand

    def _of(self, job: JobView) -> float:
        """Its own, else its family's, else the mean of all families; a core if nobody reported."""
        known = self._jobs.get(job.job, self._families.get(job.family))
        if known is not None:
            return known
        families = self._families.values()
        return sum(families) / len(families) if families else 1.0
