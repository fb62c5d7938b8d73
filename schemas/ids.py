"""Identifiers and units that all processes share."""

from __future__ import annotations

from typing import Annotated, Final, NewType

import msgspec

JobId = NewType("JobId", str)  # NAME-N, unique for the life of the cluster
NodeId = NewType("NodeId", str)
SlotId = NewType("SlotId", str)  # NODE/INDEX: a GPU or a CPU slot; NODE/-K: a place beside slots
WorkerId = NewType("WorkerId", str)  # JOB.vVERSION.rRANK: one process on one slot
BootId = NewType("BootId", str)  # one run of an agent process
Version = NewType("Version", int)  # version of a job's group; only grows
Term = NewType("Term", int)  # incarnation of the controller; only grows
Rank = NewType("Rank", int)
Pid = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]  # a process; 0 and below mean other things
Seconds = NewType("Seconds", float)
Samples = NewType("Samples", int)
LAST: Final = Seconds(253_402_300_799.0)  # end of the year 9999, which is the limit of datetime
Time = Annotated[float, msgspec.Meta(ge=0.0, le=LAST)]  # seconds since the epoch


def slot_id(node: NodeId, index: int) -> SlotId:
    """Return the name of a slot. `index` is the slot's 0-based position on the node."""
    return SlotId(f"{node}/{index}")


def node_of(slot: SlotId) -> NodeId:
    """Return the node to which a slot belongs."""
    return NodeId(slot.rpartition("/")[0])


def index_of(slot: SlotId) -> int:
    """Return the 0-based position of a slot on its node, or the negative number of a place.

    Raises:
        ValueError: if the name does not end in a number.
    """
    return int(slot.rpartition("/")[2])


def is_place(slot: SlotId) -> bool:
    """True for a place of a job without slots, whose index is below 0."""
    return "/-" in slot


def worker_id(job: JobId, version: Version, rank: Rank) -> WorkerId:
    """Return the name of a worker that starts with `version`. Its folder has the same name."""
    return WorkerId(f"{job}.v{version}.r{rank}")


MAX_DIGITS: Final = 18  # of a job's number


def stated_number(name: str) -> int:
    """Return the number at the end of an untrusted job name, or 0 if there is none."""
    tail = name.rpartition("-")[2]
    return int(tail) if tail.isdecimal() and len(tail) <= MAX_DIGITS else 0
