"""Numbering of the cluster's slots, nodes and GPU types."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from controlplane.policy.api import ClusterView, SlotView
from controlplane.prediction import FloatArray, IntArray
from schemas.ids import NodeId, SlotId

EMPTY: Final = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class ClusterIndex:
    """An index of slots, nodes and GPU types, which is valid while the slots stay the same."""

    slots: tuple[SlotId, ...]
    node_of: IntArray  # shape (S,)
    type_of: IntArray  # shape (S,)
    slots_on: tuple[IntArray, ...]  # places of the slots of each node
    types: tuple[str, ...]  # GPU types
    widest: int  # number of slots of the largest node
    # Cores that the workers of each node share, shape (N,). The number is infinite if a node has a
    # core for each slot, or if its cores are not known.
    cores: FloatArray = field(default_factory=lambda: np.zeros(0))

    @cached_property
    def shares_cores(self) -> bool:
        """True if some node has more slots than cores."""
        return bool(np.isfinite(self.cores).any())

    @cached_property
    def most_cores(self) -> float:
        """Most cores that the slots of a node share; infinite if some node has a core per slot."""
        return float(self.cores.max(initial=0.0)) if len(self.cores) else math.inf

    @cached_property
    def place_of(self) -> dict[SlotId, int]:
        """Number of each slot."""
        return {slot: place for place, slot in enumerate(self.slots)}

    @classmethod
    def of(cls, view: ClusterView) -> ClusterIndex:
        """Return the index of a view; nodes, slots and types are numbered in the view's order."""
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
        cores = np.zeros(len(many))
        cores[node_of] = [slot.cores for slot in view.slots]
        return cls(
            slots=tuple(slot.slot for slot in view.slots),
            node_of=node_of,
            type_of=type_of,
            slots_on=tuple(slots_on),
            types=tuple(types),
            widest=int(many.max(initial=1)),
            cores=np.where((cores > 0) & (cores < many), cores, math.inf),
        )


NO_CLUSTER: Final = ClusterIndex((), EMPTY, EMPTY, (), (), 1)


class ClusterIndexCache:
    """A cache of the last index; builds a new index only if the slots have changed."""

    def __init__(self) -> None:
        self._slots: tuple[SlotView, ...] = ()
        self._index = NO_CLUSTER

    def of(self, view: ClusterView) -> ClusterIndex:
        """Return the index of the view's slots."""
        slots = view.slots
        if slots is not self._slots:
            if len(slots) != len(self._slots) or not all(map(_same_place, slots, self._slots)):
                self._index = ClusterIndex.of(view)
            self._slots = slots
        return self._index


def _same_place(one: SlotView, other: SlotView) -> bool:
    """True if both are the same slot with the same hardware, in whatever state."""
    return one is other or (
        one.slot == other.slot and one.model == other.model and one.cores == other.cores
    )
