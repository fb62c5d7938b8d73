"""Where jobs are, as the last view showed it: on which GPUs, and beside whom."""

from __future__ import annotations

from controlplane.policy.api import ClusterView, JobView
from controlplane.policy.search.family_history import Company
from schemas.ids import JobId, NodeId, SlotId


class Whereabouts:
    """Answers from one view; looked up when somebody asks."""

    def __init__(self) -> None:
        self._view: ClusterView | None = None
        self._nodes: dict[SlotId, NodeId] = {}
        self._kinds: dict[SlotId, str] = {}
        self.types: tuple[str, ...] = ()  # of GPUs, in the cluster
        self._crowd: dict[NodeId, list[JobId]] | None = None  # who is on each node

    def look(self, view: ClusterView) -> None:
        """From now on this one counts."""
        if self._view is None or self._view.slots is not view.slots:
            self._nodes = {slot.slot: slot.node for slot in view.slots}
            self._kinds = {slot.slot: slot.model for slot in view.slots}
            self.types = tuple(dict.fromkeys(self._kinds.values()))
        self._view, self._crowd = view, None

    def kind(self, job: JobId) -> str:
        """The type of a job's GPUs; several joined by a plus, for the slowest sets the pace."""
        found = self._seen(job)
        if found is None or len(self.types) <= 1:
            return ""
        return "+".join(sorted({self._kinds.get(slot, "") for slot in found.running_on}))

    def company(self, job: JobId) -> list[Company]:
        """Classes of the jobs that share a node with this one."""
        found = self._seen(job)
        if found is None or self._view is None:
            return []
        nodes = self._of(found)
        crowd = self._crowded()
        others = dict.fromkeys(name for node in nodes for name in crowd.get(node, ()))
        classes: dict[Company, None] = {}
        for name in others:
            if name != job:
                other = self._view.jobs[name]
                classes[len(nodes) > 1, other.family, len(self._of(other)) > 1] = None
        return sorted(classes)

    def changes(self, job: JobId) -> bool:
        """Whether it starts, changes or ends just now: its slots are not yet those it trains on."""
        found = self._seen(job)
        return found is not None and not found.movable

    def plain(self, job: JobId) -> bool:
        """Whether it has its nodes to itself."""
        return not self.company(job)

    def _seen(self, job: JobId) -> JobView | None:
        return self._view.jobs.get(job) if self._view is not None else None

    def _of(self, job: JobView) -> set[NodeId]:
        return {self._nodes[slot] for slot in job.running_on if slot in self._nodes}

    def _crowded(self) -> dict[NodeId, list[JobId]]:
        if self._crowd is None:
            self._crowd = {}
            for name, job in self._view.jobs.items() if self._view is not None else ():
                for node in self._of(job):
                    self._crowd.setdefault(node, []).append(name)
        return self._crowd
