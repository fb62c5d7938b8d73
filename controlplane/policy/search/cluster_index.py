"""The cluster's slots by number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from controlplane.policy.api import ClusterView
from controlplane.prediction.arrays import IntArray
from schemas.ids import NodeId, SlotId

NOTHING: Final = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class ClusterIndex:
    """The cluster's slots by number; the same as long as the cluster is."""

    slots: tuple[SlotId, ...]
    node_of: IntArray  # shape (S,)
    type_of: IntArray  # shape (S,)
    slots_on: tuple[IntArray, ...]  # of each node
    types: tuple[str, ...]  # of GPUs
    widest: int  # slots of the largest node

    @classmethod
    def of(cls, view: ClusterView) -> ClusterIndex:
        """Number nodes, slots and types in the order of the view."""
        nodes: dict[NodeId, int] = {}
        types: dict[str, int] = {}
        node_of = np.array(
            [nodes.setdefault(slot.node, len(nodes)) for slot in view.slots], dtype=np.int64
        )
        type_of = np.array(
            [types.setdefault(slot.model, len(types)) for slot in view.slots], dtype=np.int64
        )
        order = np.argsort(node_of, kind="stable")
        many = np.bincount(node_of, minlength=len(nodes))
        slots_on = np.split(order, np.cumsum(many)[:-1]) if len(many) else []
        return cls(
            slots=tuple(slot.slot for slot in view.slots),
            node_of=node_of,
            type_of=type_of,
            slots_on=tuple(slots_on),
            types=tuple(types),
            widest=int(many.max(initial=1)),
        )
