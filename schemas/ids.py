"""Identifiers and units that every process shares."""

from __future__ import annotations

from typing import Final, NewType

JobId = NewType("JobId", str)  # NAME-N, unique for the life of a cluster
NodeId = NewType("NodeId", str)
SlotId = NewType("SlotId", str)  # NODE/INDEX: one GPU, or one declared CPU slot
WorkerId = NewType("WorkerId", str)  # JOB.vVERSION.rRANK: one process on one slot
BootId = NewType("BootId", str)  # one life of an agent process
Version = NewType("Version", int)  # of a job's group; only grows
Term = NewType("Term", int)  # incarnation of the controller; only grows
Rank = NewType("Rank", int)
Seconds = NewType("Seconds", float)
Samples = NewType("Samples", int)
LAST: Final = Seconds(253_402_300_799.0)  # since the epoch, that calendars have: of the year 9999


def slot_id(node: NodeId, index: int) -> SlotId:
    """The name of slot `index` of `node`.

    Args:
        index: 0-based position of the slot on its node.
    """
    return SlotId(f"{node}/{index}")


def node_of(slot: SlotId) -> NodeId:
    """The node that `slot` belongs to."""
    return NodeId(slot.rpartition("/")[0])


def index_of(slot: SlotId) -> int:
    """The position of `slot` on its node.

    Raises:
        ValueError: if it ends with no number.
    """
    return int(slot.rpartition("/")[2])


def worker_id(job: JobId, version: Version, rank: Rank) -> WorkerId:
    """The name of one worker process; also the name of its folder on the node.

    Args:
        version: of the group that the worker was born with.
    """
    return WorkerId(f"{job}.v{version}.r{rank}")
