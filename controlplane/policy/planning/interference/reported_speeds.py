"""Puts what jobs report beside where they were: what neighbour costs are learnt from."""

from __future__ import annotations

from typing import Final

from controlplane.policy.api import ClusterView, EpochSeen, JobView, PolicyEvent, StepsSeen
from controlplane.policy.planning.interference.neighbour_costs import (
    NeighbourCosts,
    Place,
    crowds_of,
)
from controlplane.policy.planning.interference.occupancy import Occupancy
from schemas.ids import JobId, Seconds, SlotId

SETTLED_S: Final = 4.0  # after neighbours changed: two windows of a worker's speed


class ReportedSpeeds:
    """Learns from telemetry, and from epochs that passed beside the same neighbours."""

    def __init__(self, costs: NeighbourCosts) -> None:
        self._costs = costs
        self._types: dict[SlotId, str] = {}
        self._view: ClusterView | None = None
        self._places: dict[JobId, tuple[Place, Seconds]] = {}  # and since when, of those that train
        self._groups: dict[JobId, int] = {}  # that telemetry was last of

    def update(self, view: ClusterView, now: Seconds) -> None:
        """From now on jobs are where this view shows them.

        Args:
            now: seconds on the controller's clock.
        """
        if view is self._view:
            return
        if self._view is None or view.slots is not self._view.slots:
            self._types = {slot.slot: slot.model for slot in view.slots}
        self._view = view
        where, before = Occupancy.of(view), self._places
        self._places = {}
        for name, job in view.jobs.items():
            if job.running_on and self._is_steady(job, view, where):
                place = self._place(job, where)
                same = before.get(name, (None, now))
                self._places[name] = (place, same[1] if same[0] == place else now)
        self._groups = {name: at for name, at in self._groups.items() if name in view.jobs}

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn from a speed that was measured where its job still is.

        Args:
            now: seconds on the controller's clock.
        """
        match event:
            case StepsSeen():
                again = self._groups.get(event.job) == event.group
                self._groups[event.job] = event.group
                if again and event.samples_per_s:  # the first may be of a group half formed
                    self._measured(event, now)
            case EpochSeen(beside=beside) if beside is not None and event.whole and event.slots:
                local = max(1, round(event.global_batch / event.slots))
                place = (event.slots, local, "", beside)
                self._costs.add(event.family, place, event.global_batch, event.samples_per_s)

    def _measured(self, event: StepsSeen, now: Seconds) -> None:
        place, since = self._places.get(event.job, (None, now))
        if place is None or now - since < SETTLED_S or place[0] != event.slots:
            return
        self._costs.add(event.family, place, event.global_batch, event.samples_per_s)

    def _is_steady(self, job: JobView, view: ClusterView, where: Occupancy) -> bool:
        """Whether it and its neighbours train where the view shows them."""
        return job.movable and all(view.jobs[one].movable for one in where.neighbours(job.job))

    def _place(self, job: JobView, where: Occupancy) -> Place:
        slots = len(job.running_on)
        local = max(1, round(sum(job.running_on.values()) / slots))
        models = sorted({self._types.get(slot, "") for slot in job.running_on})
        return slots, local, "+".join(models), crowds_of(job.job, where)
