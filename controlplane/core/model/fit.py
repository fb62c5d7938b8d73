"""Slots and nodes that fit the requests of a job: type of GPU, labels, cores and memory.

An image and requirements request nodes that run containers, and that build environments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from schemas.ids import NodeId, SlotId, slot_id
from schemas.jobs import Shape, words_of
from schemas.nodes import NodeSpec, SlotSpec

EPSILON: Final = 1e-6  # rounding of shares
PLACE_CPUS: Final = 1.0  # cores of a job without slots that states none
GIB: Final = 1 << 30
PLACE_USER: Final = "a job without slots"


@dataclass(frozen=True, slots=True)
class Fit:
    """Slots that a job may use."""

    slots: frozenset[SlotId] | None = None  # None: all
    shares: Mapping[NodeId, float] = field(default_factory=dict)  # of a slot, if it takes more
    missing: str = ""  # why nothing fits


ANY: Final = Fit()


def fit_of(shape: Shape, nodes: Sequence[NodeSpec], *, rigid: bool, places: bool) -> Fit:
    """Return the slots that fit a request.

    Args:
        shape: what is requested.
        nodes: all known nodes.
        rigid: a slot may take the shares of others on its node, which stay empty. A slot of an
            elastic job has its own share.
        places: the job has no slots. `shares` has the part of what each fitting node has set
            aside, and `slots` is empty.
    """
    named = [node for node in nodes if _has_all(node, shape)]
    if places:
        cpus = shape.cpus or PLACE_CPUS
        parts = {node.node: node.place_part(cpus, shape.memory_bytes) for node in named}
        parts = {node: part for node, part in parts.items() if part <= 1 + EPSILON}
        return Fit(frozenset(), parts, "" if parts else _missing(shape, nodes, named, PLACE_USER))
    found: set[SlotId] = set()
    shares: dict[NodeId, float] = {}
    for node in named:
        share = node.shares(shape.cpus, shape.memory_bytes)
        if share > (len(node.slots) if rigid else 1) + EPSILON:
            continue
        found.update(slot_id(node.node, one.index) for one in node.slots if _is_of(one, shape))
        if share > 1 + EPSILON:
            shares[node.node] = share
    return Fit(
        frozenset(found), shares, "" if found else _missing(shape, nodes, named, "a slot of it")
    )


def _has_all(node: NodeSpec, shape: Shape) -> bool:
    if (shape.image and not node.containers) or (shape.requirements and not node.environments):
        return False
    return all(node.labels.get(name) == value for name, value in shape.labels)


def _is_of(slot: SlotSpec, shape: Shape) -> bool:
    return words_of(shape.gpu_type) <= words_of(slot.model)


def _missing(shape: Shape, nodes: Sequence[NodeSpec], named: Sequence[NodeSpec], user: str) -> str:
    """Return which request no node meets, and what the nodes report instead."""
    if shape.image and not any(one.containers for one in nodes):
        return "no node runs containers, which its image needs"
    if shape.requirements and not any(one.environments for one in nodes):
        return "no node has uv, which its requirements need"
    for name, value in shape.labels:
        has = sorted({f"{name} = {one.labels[name]}" for one in nodes if name in one.labels})
        if f"{name} = {value}" not in has:
            others = sorted({label for one in nodes for label in one.labels})
            report = ", ".join(has or others) or "no labels"
            return f"no node has label {name} = {value}; nodes report: {report}"
    models = sorted({slot.model for one in nodes for slot in one.slots if slot.model})
    if shape.gpu_type and not any(_is_of(slot, shape) for one in nodes for slot in one.slots):
        return f"no slot is of type {shape.gpu_type}; slots report: {', '.join(models) or 'none'}"
    stated = [
        f"{name} = {value:g}" if name == "cpus" else f"{name} = {value} ({value / GIB:.3g} GiB)"
        for name, value in (("cpus", shape.cpus), ("memory_bytes", shape.memory_bytes))
        if value
    ]
    if named and stated:
        return f"no node has {' and '.join(stated)} for {user}"
    if user == PLACE_USER and not any(one.place_cores for one in nodes):
        return "no node has cores for jobs without slots"
    return "no node has all that it requests"
