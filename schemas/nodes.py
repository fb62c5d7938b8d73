"""Nodes with their slots, and one version of a job's group of workers."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec

from schemas.ids import NodeId, Rank, Seconds, SlotId, Version, WorkerId

Label = Annotated[str, msgspec.Meta(max_length=256)]
Amount = Annotated[float, msgspec.Meta(ge=0.0)]
Bytes = Annotated[int, msgspec.Meta(ge=0)]
NOTICE: Final = "notice of "  # prefix of a drain's user if the node itself gave notice


class SlotSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, or a declared CPU slot on a host without GPUs."""

    index: int
    kind: str  # "gpu" or "cpu"
    model: str = ""  # name given by the driver
    memory_bytes: int = 0
    uuid: str = ""  # GPU UUID; empty for a CPU slot


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A host that runs an agent."""

    node: NodeId
    host: str
    address: str  # for other nodes, to reach its workers
    slots: tuple[SlotSpec, ...]
    cores: int
    memory_bytes: int
    release: str  # release of the agent
    fenced_s: float = 0.0  # time without a reply after which its workers are dead; 0: never
    containers: str = ""  # engine that runs containers; empty: none
    environments: bool = True  # it has uv; an older agent does not say
    states_port: int = 0  # port that serves states of sweeps; 0: an older agent serves none
    labels: dict[Label, Label] = {}  # given by its operator
    place_cores: Amount = 0.0  # of `cores`, for jobs without slots
    place_memory_bytes: Bytes = 0  # of `memory_bytes`, for jobs without slots

    def shares(self, cpus: float, memory_bytes: float) -> float:
        """Return how many slots' shares of the node a request is. The larger part decides."""
        slots = max(1, len(self.slots))
        cores, memory = self.cores - self.place_cores, self.memory_bytes - self.place_memory_bytes
        return max(_part(cpus, cores / slots), _part(memory_bytes, memory / slots))

    def place_part(self, cpus: float, memory_bytes: float) -> float:
        """Return the part of what is set aside for jobs without slots that a request is."""
        return max(_part(cpus, self.place_cores), _part(memory_bytes, self.place_memory_bytes))


def _part(needs: float, has: float) -> float:
    if not needs:
        return 0.0
    return needs / has if has > 0 else math.inf


class ResumePoint(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint from which a group starts, written by the group of `version` after `epoch`.

    It was written at the end of the epoch, or during the next epoch if the group was paused in that
    epoch.
    """

    epoch: int  # finished epoch, 1-based
    version: Version


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """Worker of a group."""

    rank: Rank
    slot: SlotId
    local_batch: int  # b_j^i of ONES eq. 1, samples per step
    worker: WorkerId  # named after the version and rank with which it started


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The workers that train a job at one version, in rank order, with their batch sizes."""

    version: Version
    members: tuple[Member, ...]
    lr: float | None  # learning rate at `base_batch`; None: the script's own
    base_batch: int = 0  # global batch for which `lr` is given
    resume: ResumePoint | None = None

    @property
    def global_batch(self) -> int:
        """Global batch size, B_j of ONES eq. 2, in samples per step."""
        return sum(member.local_batch for member in self.members)

    def member(self, worker: WorkerId) -> Member | None:
        """Return the entry of a worker in this group, or None if the worker is not a member."""
        return next((member for member in self.members if member.worker == worker), None)


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Time in which nodes are for jobs of some projects and users; for none: maintenance."""

    begin: Seconds
    end: Seconds
    reason: str = ""
    projects: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    user: str = ""  # who requested it; set by the controller, as is the id
    id: str = ""  # of the request, which may name several nodes

    def admits(self, user: str, project: str) -> bool:
        """True if jobs of this user in this project may run there."""
        return project in self.projects or user in self.users

    @property
    def purpose(self) -> str:
        """Description for users, without the times."""
        names = [f"project {one}" for one in self.projects] + [f"user {one}" for one in self.users]
        return f"reservation {self.id} for {', '.join(names)}" if names else "maintenance"

    @property
    def text(self) -> str:
        """Description for users."""
        times = (datetime.fromtimestamp(at, UTC) for at in (self.begin, self.end))
        begin, end = (f"{at:%Y-%m-%dT%H:%M:%SZ}" for at in times)
        why = f": {self.reason}" if self.reason else ""
        return f"{self.purpose} from {begin} to {end} by {self.user}{why}"
