"""Which node holds which partitions of the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from schemas.ids import NodeId


def partition_holders(
    workers: Mapping[NodeId, int],
    partitions: int,
    replicas: int,
    before: Mapping[NodeId, set[int]],
    can_hold: Callable[[NodeId, int], bool] = lambda _node, _partition: True,
) -> dict[NodeId, set[int]]:
    """Give each partition to nodes, in proportion to their workers, moving as few as can be.

    Cerebro section 3.1 fixes the place of each partition and section 5.5 replicates it; here nodes
    come and go. What a lost node held is spread over all that are left, and a new node takes its
    share from those that have most.

    Args:
        workers: nodes that have any, and how many.
        replicas: nodes that hold each; more than there are: every node.
        can_hold: False of a node that could not give the partition.

    Returns:
        What each of `workers` holds. A partition that nobody can hold is left out.
    """
    held = {node: {p for p in before.get(node, ()) if can_hold(node, p)} for node in workers}

    def load(node: NodeId) -> float:
        return len(held[node]) / workers[node]

    for partition in range(partitions):
        able = [node for node in workers if can_hold(node, partition)]
        having = [node for node in able if partition in held[node]]
        while len(having) > replicas:
            most = max(having, key=load)
            having.remove(most)
            held[most].discard(partition)
        while len(having) < min(replicas, len(able)):
            least = min((node for node in able if node not in having), key=load)
            having.append(least)
            held[least].add(partition)
    while (move := _better(workers, held, can_hold)) is not None:
        source, target, partition = move
        held[source].discard(partition)
        held[target].add(partition)
    return held


def _better(
    workers: Mapping[NodeId, int],
    held: Mapping[NodeId, set[int]],
    can_hold: Callable[[NodeId, int], bool],
) -> tuple[NodeId, NodeId, int] | None:
    """A partition to be moved from a loaded node to one that has less even afterwards."""
    by_load = sorted(held, key=lambda node: len(held[node]) / workers[node])
    for target in by_load:
        for source in reversed(by_load):
            after = (len(held[target]) + 1) / workers[target]
            if after >= len(held[source]) / workers[source]:
                break
            for partition in sorted(held[source] - held[target], reverse=True):
                if can_hold(target, partition):
                    return source, target, partition
    return None
