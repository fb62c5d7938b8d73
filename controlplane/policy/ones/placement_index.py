"""Where jobs are, as the last view showed it: on which GPUs, and beside whom."""

from __future__ import annotations

from controlplane.policy.api import ClusterView, JobView
from controlplane.policy.search.observed_families import Colocation
from schemas.ids import JobId, NodeId, SlotId


class PlacementIndex:
    """Answers from one view; looked up when somebody asks."""

    def __init__(self) -> None:
        self._view: ClusterView | None = None
        self._nodes: dict[SlotId, NodeId] = {}
        self._kinds: dict[SlotId, str] = {}
        self.types: tuple[str, ...] = ()  # of GPUs, in the cluster
        self._jobs_on: dict[NodeId, list[JobId]] | None = None  # who is on each node

    def update(self, view: ClusterView) -> None:
        """From now on this one counts.

        Args:
            view: that counts from now on.
        """
        if self._view is None or self._view.slots is not view.slots:
            self._nodes = {slot.slot: slot.node for slot in view.slots}
            self._kinds = {slot.slot: slot.model for slot in view.slots}
            self.types = tuple(dict.fromkeys(self._kinds.values()))
        self._view, self._jobs_on = view, None

    def gpu_type(self, job: JobId) -> str:
        """The type of a job's GPUs; several joined by a plus, for the slowest sets the pace.

        Args:
            job: its id.
        """
        found = self._seen(job)
        if found is None or len(self.types) <= 1:
            return ""
        return "+".join(sorted({self._kinds.get(slot, "") for slot in found.running_on}))

    def colocations(self, job: JobId) -> list[Colocation]:
        """Classes of the jobs that share a node with this one.

        Args:
            job: its id.
        """
        found = self._seen(job)
        if found is None or self._view is None:
            return []
        nodes = self._nodes_of(found)
        crowd = self._jobs_by_node()
        others = dict.fromkeys(name for node in nodes for name in crowd.get(node, ()))
        classes: dict[Colocation, None] = {}
        for name in others:
            if name != job:
                other = self._view.jobs[name]
                classes[len(nodes) > 1, other.family, len(self._nodes_of(other)) > 1] = None
        return sorted(classes)

    def is_changing(self, job: JobId) -> bool:
        """Whether it starts, changes or ends just now: its slots are not yet those it trains on.

        Args:
            job: its id.
        """
        found = self._seen(job)
        return found is not None and not found.movable

    def is_alone(self, job: JobId) -> bool:
        """Whether it has its nodes to itself.

        Args:
            job: its id.
        """
        return not self.colocations(job)

    def _seen(self, job: JobId) -> JobView | None:
        return self._view.jobs.get(job) if self._view is not None else None

    def _nodes_of(self, job: JobView) -> set[NodeId]:
        return {self._nodes[slot] for slot in job.running_on if slot in self._nodes}

    def _jobs_by_node(self) -> dict[NodeId, list[JobId]]:
        if self._jobs_on is None:
            self._jobs_on = {}
            for name, job in self._view.jobs.items() if self._view is not None else ():
                for node in self._nodes_of(job):
                    self._jobs_on.setdefault(node, []).append(name)
        return self._jobs_on
