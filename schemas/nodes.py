"""What a node offers.

One version of a job's group of workers.
"""

from __future__ import annotations

import msgspec

from schemas.ids import NodeId, Rank, SlotId, Version, WorkerId


class SlotSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, or one declared CPU slot where there is none."""

    index: int
    kind: str  # "gpu" or "cpu"
    model: str = ""  # as the driver names it
    memory_bytes: int = 0
    uuid: str = ""  # of the GPU; empty for a CPU slot


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A host with an agent on it."""

    node: NodeId
    host: str
    address: str  # where other nodes reach its workers
    slots: tuple[SlotSpec, ...]
    cores: int
    memory_bytes: int
    release: str  # of the agent's software
    fenced_s: float = 0.0  # unanswered for so long, its workers have been ended; 0: they never are
    states_port: int = 0  # where it serves states of sweeps; 0: an older agent serves none


class ResumePoint(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that a group starts from: written after `epoch` by `version`.

    At the epoch's end, or somewhere in the next epoch by a group that was paused.
    """

    epoch: int  # 1-based, finished
    version: Version


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of a group."""

    rank: Rank
    slot: SlotId
    local_batch: int  # b_j^i of ONES eq. 1, samples per step
    worker: WorkerId  # the process: named after the version and rank it was born with


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Who trains a job at one version, in rank order, and with which batch."""

    version: Version
    members: tuple[Member, ...]
    lr: float | None  # at `base_batch`; None: the script's own
    base_batch: int = 0  # global batch that `lr` belongs to
    resume: ResumePoint | None = None

    @property
    def global_batch(self) -> int:
        """B_j of ONES eq. 2, samples per step."""
        return sum(member.local_batch for member in self.members)

    def member(self, worker: WorkerId) -> Member | None:
        """The place of `worker` in this group, if it has one.

        Returns:
            Its place in this group; None if it has none.
        """
        return next((member for member in self.members if member.worker == worker), None)
