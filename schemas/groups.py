"""One version of a job's group of workers."""

from __future__ import annotations

import msgspec

from schemas.ids import Rank, SlotId, Version


class ResumePoint(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that a group starts from: written at the end of `epoch` by `version`."""

    epoch: int  # 1-based, finished
    version: Version


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of a group."""

    rank: Rank
    slot: SlotId
    local_batch: int  # b_j^i of ONES eq. 1, samples per step


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Who trains a job at one version, in rank order, and with which batch."""

    version: Version
    members: tuple[Member, ...]
    lr: float | None  # at the group's global batch; None: the script's own
    resume: ResumePoint | None = None

    @property
    def global_batch(self) -> int:
        """B_j of ONES eq. 2, samples per step."""
        return sum(member.local_batch for member in self.members)
