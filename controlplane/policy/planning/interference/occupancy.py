"""Which jobs have how many workers on which node: as it is, or as it could be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from controlplane.policy.api import ClusterView
from schemas.ids import JobId, NodeId, node_of

Layout = Mapping[NodeId, int]  # workers of a job on each of its nodes, at least 1


class Occupancy:
    """Who is beside whom.

    Args:
        families: of all jobs that are ever put somewhere.
    """

    def __init__(self, families: Mapping[JobId, str]) -> None:
        self.families = families
        self.nodes: dict[JobId, Layout] = {}  # of each job that has any
        self.jobs: dict[NodeId, dict[JobId, int]] = {}  # on each node: its workers there

    @classmethod
    def of(cls, view: ClusterView) -> Occupancy:
        """As a view shows it; jobs that change are where they are going to be."""
        found = cls({name: job.family for name, job in view.jobs.items()})
        for name, job in view.jobs.items():
            if job.running_on:
                found.put(name, Counter(map(node_of, job.running_on)))
        return found

    def put(self, job: JobId, layout: Layout) -> None:
        """The job has these workers and no others.

        Args:
            job: may be somewhere else until now.
            layout: empty: none.
        """
        self.take(job)
        if layout:
            self.nodes[job] = layout
        for node, workers in layout.items():
            self.jobs.setdefault(node, {})[job] = workers

    def take(self, job: JobId) -> None:
        """The job has no workers any more.

        Args:
            job: may have none already.
        """
        for node in self.nodes.pop(job, {}):
            del self.jobs[node][job]

    def on(self, node: NodeId) -> Mapping[JobId, int]:
        """Jobs on a node, and how many workers each has there.

        Args:
            node: may be empty.
        """
        return self.jobs.get(node, {})

    def neighbours(self, job: JobId) -> list[JobId]:
        """Other jobs on any node of this one, each once.

        Args:
            job: itself is not among them.
        """
        here = dict.fromkeys(name for node in self.nodes.get(job, ()) for name in self.on(node))
        here.pop(job, None)
        return list(here)
