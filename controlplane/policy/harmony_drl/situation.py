"""A view as the networks take it: nodes and classes by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from controlplane.policy.api import ClusterView
from controlplane.policy.harmony_drl.model import CLASSES
from controlplane.policy.harmony_drl.reward_model import RewardModel
from controlplane.policy.harmony_drl.shared_nodes import SharedNodes
from schemas.ids import NodeId, SlotId, node_of


class Classes:
    """Numbers of families: those that were trained, then others as they come."""

    def __init__(self, trained: Sequence[str]) -> None:
        """Begin with those that were trained.

        Args:
            trained: families as job files state them, by number.
        """
        self._trained = {name: number for number, name in enumerate(trained)}
        self._others: dict[str, int] = {}

    def number(self, family: str) -> int:
        """Of a family; when all numbers are given, the last one stands for all that follow.

        Args:
            family: of a job, as views have it: behind the name of its user, if it was stated.
        """
        trained = self._trained.get(family.partition("/")[2])
        if trained is not None:
            return trained
        known = self._others.get(family)
        if known is None:
            known = min(len(self._trained) + len(self._others), CLASSES - 1)
            self._others[family] = known
        return known


@dataclass(slots=True)
class Situation:
    """A view as the networks take it."""

    nodes: list[NodeId]
    shared: SharedNodes
    slots: list[list[SlotId]]  # of each node, that can be given out now

    def take(self, nodes: Sequence[int]) -> list[SlotId]:
        """A free slot of each node, node by node."""
        order = sorted(nodes, key=nodes.index)
        return [self.slots[node].pop(0) for node in order]


def situation(view: ClusterView, model: RewardModel, classes: Classes) -> Situation:
    """Who is where, and what is free.

    Args:
        model: predicts what jobs cost each other.
        classes: gets the families that it does not know.
    """
    # A job that changes may count on a slot whose process is gone already.
    held = {slot for job in view.jobs.values() for slot in job.running_on}
    free: dict[NodeId, list[SlotId]] = {slot.node: [] for slot in view.slots}
    sizes = dict.fromkeys(free, 0)
    for slot in view.slots:
        sizes[slot.node] += 1
        if slot.usable and slot.slot not in held:
            free[slot.node].append(slot.slot)
    nodes = list(free)
    place = {node: number for number, node in enumerate(nodes)}
    shared = SharedNodes(model, [sizes[node] for node in nodes])
    for job in view.jobs.values():
        number = classes.number(job.family)
        on = [place[node_of(slot)] for slot in job.running_on if node_of(slot) in place]
        if on:
            shared.add(job.job, number, len(on))
            for node in dict.fromkeys(on):
                shared.put(job.job, node, on.count(node), predict=False)
    shared.predict(range(len(nodes)))
    shared.free = np.array([len(free[node]) for node in nodes], dtype=np.int64)
    return Situation(nodes, shared, [free[node] for node in nodes])
