"""The worker processes of one job, and how far its training is."""

from __future__ import annotations

from dataclasses import dataclass, field

from controlplane.sim.engine.job_progress import TrainingProgress
from controlplane.sim.models.job_model import ChangeCosts, Placement
from schemas.groups import Group
from schemas.ids import JobId, NodeId, Rank, SlotId, Version, WorkerId, node_of


@dataclass(slots=True)
class WorkerProcess:
    """One worker; its times are virtual seconds."""

    slot: SlotId
    version: Version  # that it was born with
    rank: Rank
    ready_at: float
    ready: bool = False
    reports: int = 0  # so far: the index of the last one

    def next_index(self) -> int:
        """The index of its next report, from 1 on."""
        self.reports += 1
        return self.reports


@dataclass(slots=True)
class JobProcesses:
    """The workers of one job, wherever they are."""

    id: JobId
    training: TrainingProgress
    costs: ChangeCosts
    crashes_at: float | None = None  # share of its work, in (0, 1), where its script fails once
    group: Group | None = None  # that trains
    workers: dict[WorkerId, WorkerProcess] = field(default_factory=dict)
    seen: tuple[int, int] = (0, 0)  # newest version and stage that was acted on
    started: bool = False  # at least once
    crashed: bool = False  # as its trace wanted
    ended: bool = False  # in the core; some workers may still be there

    def placement(self) -> Placement:
        """Slots of its group on each node, in rank order; empty without a group."""
        counts: dict[NodeId, int] = {}
        for member in self.group.members if self.group else ():
            node = node_of(member.slot)
            counts[node] = counts.get(node, 0) + 1
        return tuple(counts.values())

    def nodes(self) -> list[NodeId]:
        """The nodes of its group, each once, in rank order."""
        members = self.group.members if self.group else ()
        return list(dict.fromkeys(node_of(member.slot) for member in members))
