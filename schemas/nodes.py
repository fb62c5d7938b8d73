"""What a node offers."""

from __future__ import annotations

import msgspec

from schemas.ids import NodeId


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
