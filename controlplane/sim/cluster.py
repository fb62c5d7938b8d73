"""The nodes of a simulated cluster.

Errors of the simulator: of what it reads, of its results, and of trainings in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, Literal

import msgspec

from schemas.errors import OnesError
from schemas.ids import NodeId
from schemas.nodes import NodeSpec, SlotSpec

RELEASE: Final = "simulated"
RELATIVE_SPEEDS: Final[Mapping[str, float]] = {  # to the GPU that a model describes
    "": 1.0,
    "v100": 1.0,
    # Means over the models that Gavel's published throughput table (OSDI 2020) has on one GPU at
    # its largest batch, to one decimal.
    "p100": 0.6,
    "k80": 0.2,
}


class NodeGroup(msgspec.Struct, frozen=True, kw_only=True):
    """So many nodes alike."""

    count: int
    slots: int  # GPUs on each
    model: str = ""  # of its GPUs, as in `RELATIVE_SPEEDS`
    kind: Literal["gpu", "cpu"] = "gpu"  # of its slots
    cores: int = 0  # of each node; 0: 8 for each slot


def node_specs(groups: tuple[NodeGroup, ...]) -> list[NodeSpec]:
    """Nodes n0000, n0001, ... in the order of `groups`.

    Args:
        groups: of nodes alike, in this order.
    """
    found: list[NodeSpec] = []
    for group in groups:
        for _ in range(group.count):
            name = NodeId(f"n{len(found):04d}")
            slots = tuple(
                SlotSpec(index=index, kind=group.kind, model=group.model)
                for index in range(group.slots)
            )
            found.append(
                NodeSpec(
                    node=name,
                    host=str(name),
                    address="192.0.2.1",  # documentation address: nobody connects
                    slots=slots,
                    cores=group.cores or 8 * group.slots,
                    memory_bytes=1 << 38,
                    release=RELEASE,
                )
            )
    return found


class TraceError(OnesError):
    """A trace, profile or scenario that cannot be simulated; says where and what to do."""

    code: ClassVar[str] = "bad_trace"


class ResultsError(OnesError):
    """Results that cannot be read, written, compared or drawn; says what to do."""

    code: ClassVar[str] = "bad_results"


class TrainingError(OnesError):
    """A training that cannot begin, go on or be kept; says what to do."""

    code: ClassVar[str] = "bad_training"
