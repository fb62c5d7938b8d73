"""Where jobs are, as the last view showed it: on which GPUs, and beside whom."""

from __future__ import annotations

import math
from collections import Counter

from controlplane.policy.api import ClusterView, JobView
from controlplane.policy.search.cluster_index import ClusterIndex
from controlplane.policy.search.observed_families import Colocation
from controlplane.prediction.core_sharing import stretch
from schemas.ids import JobId, NodeId, SlotId


class PlacementIndex:
    """Answers from one view; looked up when somebody asks."""

    def __init__(self) -> None:
        self._view: ClusterView | None = None
        self._nodes: dict[SlotId, NodeId] = {}
        self._kinds: dict[SlotId, str] = {}
        self.types: tuple[str, ...] = ()  # of GPUs, in the cluster
        self._jobs_on: dict[NodeId, list[JobId]] | None = None  # who is on each node
        self._stretch: dict[NodeId, float] = {}  # of steps on each node whose cores are shared
        self.cores = math.inf  # of the node that has most, if its CPU slots share them

    def update(self, view: ClusterView) -> None:
        """From now on this one counts."""
        if self._view is None or self._view.slots is not view.slots:
            self._nodes = {slot.slot: slot.node for slot in view.slots}
            self._kinds = {slot.slot: slot.model for slot in view.slots}
            self.types = tuple(dict.fromkeys(self._kinds.values()))
            shared = any(slot.cores for slot in view.slots)
            self._stretch = stretches(view) if shared else {}
            self.cores = ClusterIndex.of(view).most_cores if shared else math.inf
        self._view, self._jobs_on = view, None

    def gpu_type(self, job: JobId) -> str:
        """The type of a job's GPUs; several joined by a plus, for the slowest sets the pace."""
        found = self._seen(job)
        if found is None or len(self.types) <= 1:
            return ""
        return "+".join(sorted({self._kinds.get(slot, "") for slot in found.running_on}))

    def colocations(self, job: JobId) -> list[Colocation]:
        """Classes of the jobs that share a node with this one."""
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
        """Whether it starts, changes or ends just now: its slots are not yet those it trains on."""
        found = self._seen(job)
        return found is not None and not found.movable

    def stretch(self, job: JobId) -> float:
        """Times that its steps take longer because workers share the cores of its nodes.

        Args:
            job: its id; of one that is not in the view, the worst node counts.
        """
        if not self._stretch:
            return 1.0
        found = self._seen(job)
        nodes = self._nodes_of(found) if found is not None else self._stretch.keys()
        return max((self._stretch.get(node, 1.0) for node in nodes), default=1.0)

    def is_alone(self, job: JobId) -> bool:
        """Whether it has its nodes to itself."""
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


def stretches(view: ClusterView) -> dict[NodeId, float]:
    """Times that steps take longer on each node whose busy slots share its cores.

    Args:
        view: the cluster; a slot that is not usable is busy.
    """
    slots: Counter[NodeId] = Counter()
    busy: Counter[NodeId] = Counter()
    cores: dict[NodeId, int] = {}
    for slot in view.slots:
        slots[slot.node] += 1
        busy[slot.node] += not slot.usable
        cores[slot.node] = slot.cores
    return {
        node: stretch(busy[node], cores[node])
        for node, many in slots.items()
        if 0 < cores[node] < many
    }
