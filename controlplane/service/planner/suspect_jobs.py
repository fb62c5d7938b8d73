"""Which jobs a search dies of: they are left out of what it sees, and the others have it back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from controlplane.policy.api import ClusterView
from schemas.ids import JobId

CHANCES: Final = 2  # deaths in a row, before jobs are suspected


class SuspectJobs:
    """Halves the jobs that a search sees until it lives, then lets them back group by group.

    A group on trial that it dies of again is halved; one job alone stays aside until it ends.
    """

    def __init__(self) -> None:
        self.guilty: dict[JobId, None] = {}
        self._groups: list[list[JobId]] = []  # set aside, to be tried; the last one next
        self._trial: list[JobId] = []  # seen again, on trial
        self._seen: Sequence[JobId] = ()  # in the last view
        self._deaths = 0  # in a row, with nobody on trial

    @property
    def aside(self) -> set[JobId]:
        """Jobs that the search is not told of."""
        return {*self.guilty, *(job for group in self._groups for job in group)}

    @property
    def in_doubt(self) -> bool:
        """Whether something is still to be found out."""
        return bool(self._groups or self._trial)

    def shown(self, view: ClusterView) -> ClusterView:
        """The view without the jobs that are set aside.

        Args:
            view: of all of them; those that are not in it any more are forgotten.
        """
        for job in [job for job in self.guilty if job not in view.jobs]:
            del self.guilty[job]
        self._groups = [kept for group in self._groups if (kept := _among(group, view.jobs))]
        aside = self.aside
        if aside:
            jobs = {name: job for name, job in view.jobs.items() if name not in aside}
            view = ClusterView(version=view.version, slots=view.slots, jobs=jobs)
        self._seen = tuple(view.jobs)
        return view

    def died(self) -> None:
        """The search died of what it had seen, or with it."""
        if self._trial:
            self._put_back(_among(self._trial, self._seen))
            self._trial = []
            return
        self._deaths += 1
        if self._deaths >= CHANCES and self._seen:
            middle = len(self._seen) // 2
            self._groups.append(list(self._seen[middle:]))  # the newer half
            self._seen = self._seen[:middle]

    def lived(self) -> None:
        """The search lives with what it sees: the next group is let back, on trial."""
        self._deaths, self._trial = 0, []
        if self._groups:
            self._trial = self._groups.pop()

    def _put_back(self, group: list[JobId]) -> None:
        middle = len(group) // 2
        if len(group) == 1:
            self.guilty |= dict.fromkeys(group)
        elif group:
            self._groups += [group[:middle], group[middle:]]


def _among(group: Iterable[JobId], known: Iterable[JobId]) -> list[JobId]:
    names = set(known)
    return [job for job in group if job in names]
