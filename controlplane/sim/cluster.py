"""Nodes of a simulated cluster, and the errors that the simulator raises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, Literal

import msgspec

from schemas.errors import OnesError
from schemas.ids import NodeId
from schemas.nodes import NodeSpec, SlotSpec

RELEASE: Final = "simulated"
RELATIVE_SPEEDS: Final[Mapping[str, float]] = {  # 1.0: the GPU of the training model
    "": 1.0,
    "v100": 1.0,
    # Gavel's published throughput table (OSDI 2020): mean over its models on one GPU at the
    # largest batch, rounded to one decimal.
    "p100": 0.6,
    "k80": 0.2,
}


class NodeGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Group of `count` equal nodes."""

    count: int
    slots: int  # GPUs per node
    model: str = ""  # GPU model, a key of `RELATIVE_SPEEDS`
    kind: Literal["gpu", "cpu"] = "gpu"  # kind of the slots
    cores: int = 0  # per node; 0: 8 per slot


def node_specs(groups: tuple[NodeGroup, ...]) -> list[NodeSpec]:
    """Return the nodes of all groups in order, named n0000, n0001, ..."""
    nodes = (group for group in groups for _ in range(group.count))
    return [
        NodeSpec(
            node=NodeId(f"n{number:04d}"),
            host=f"n{number:04d}",
            address="192.0.2.1",  # documentation address, never connected to
            slots=tuple(
                SlotSpec(index=index, kind=group.kind, model=group.model)
                for index in range(group.slots)
            ),
            cores=group.cores or 8 * group.slots,
            memory_bytes=1 << 38,
            release=RELEASE,
        )
        for number, group in enumerate(nodes)
    ]


class TraceError(OnesError):
    """Raised, with place and remedy, when a trace, profile or scenario cannot be simulated."""

    code: ClassVar[str] = "bad_trace"


class ResultsError(OnesError):
    """Raised, with a remedy, when results cannot be read, written, compared or drawn."""

    code: ClassVar[str] = "bad_results"


class TrainingError(OnesError):
    """Raised, with a remedy, when the training of a policy cannot start, resume or be saved."""

    code: ClassVar[str] = "bad_training"
