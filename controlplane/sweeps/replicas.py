"""Placement of states and partitions on nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from controlplane.sweeps.orders import CopyState, Order, StateName
from controlplane.sweeps.states import ModelState
from controlplane.sweeps.sweep_state import SweepState
from controlplane.sweeps.trials import Trial
from schemas.ids import NodeId

MIN_REPLICAS = 2  # nodes that have a state before its predecessor is dropped
MAX_COPY_TRIES = 3  # after so many failed copies of a state, only later states are copied


def keep_states(state: SweepState) -> list[Order]:
    """Return orders to copy the newest states that lack a replica, and to drop unneeded states.

    Trials without a running unit continue from their newest stored state.
    """
    needed: set[StateName] = set()
    found: list[Order] = []
    leased = {lease.trial for lease in state.leases.values()}
    copied = {name for name, _ in state.copying}
    for trial, model in zip(state.trials, state.models, strict=True):
        if trial.ended or not model.finished_units:
            continue
        if trial.number not in leased:
            _use_newest_stored(state, model)
        copy = _keep_newest(state, model, needed, copied)
        if copy is not None and copy.state not in copied:
            copied.add(copy.state)
            state.copying.add((copy.state, copy.target))
            found.append(copy)
    for trial in _best(state):
        epochs = trial.start_epochs + 1 + trial.scores.index(max(trial.scores))
        needed.update(state.models[trial.number].names(epochs * state.partitions))
    needed.update(state.graduated_states.values())
    needed.update(lease.order.state for lease in state.leases.values() if lease.order.state)
    dropped = state.stored.drop_all_but(needed)
    state.copying = {(name, node) for name, node in state.copying if name in needed}
    state.failed_copies = {name: n for name, n in state.failed_copies.items() if name in needed}
    return [*found, *dropped]


def _keep_newest(
    state: SweepState, model: ModelState, needed: set[StateName], copied: set[StateName]
) -> CopyState | None:
    """Add the trial's needed states to `needed`; return an order to copy the newest state, or None.

    The trial needs its newest state, a state that is being copied, and the newest state with enough
    replicas. Only one copy per trial is pending, so nodes keep at most three of its states, even if
    copies fail or are slower than units.
    """
    places = min(MIN_REPLICAS, max(1, len(state.staged)))
    lacking, busy = False, False
    for version in _stored_versions(state, model):
        names = model.names(version)
        enough = len(state.stored.nodes(names)) >= places
        under_way = not copied.isdisjoint(names)
        if version == model.at or under_way or enough:
            needed.update(names)
        lacking |= version == model.at and not enough
        busy |= under_way
        if enough:
            break
    return _copy(state, model) if lacking and not busy else None


def _stored_versions(state: SweepState, model: ModelState) -> list[int]:
    """Return the versions up to the current one that some node stores, newest first."""
    found = {version for version in state.stored.versions(model.trial) if version <= model.at}
    for one in model.parents:
        most = min(one.version, model.at)
        found |= {version for version in state.stored.versions(one.trial) if version <= most}
    return sorted(found, reverse=True)


def _use_newest_stored(state: SweepState, model: ModelState) -> None:
    """Let the model continue from its newest stored state, which may be on a returned node."""
    for version in range(len(model.finished_units), model.at, -1):
        if state.stored.nodes(model.names(version)):
            model.at = version
            return
    while model.at and not state.stored.nodes(model.names(model.at)):
        model.at -= 1


def _copy(state: SweepState, model: ModelState) -> CopyState | None:
    """Return an order to copy the newest state to a node without it; a retry uses another node."""
    having = state.stored.nodes(model.names(model.at))
    source, name = having[0]
    nodes = {node for node, _ in having}
    others = [node for node in state.staged if node not in nodes]
    tries = state.failed_copies.get(name, 0)
    if not others or tries >= MAX_COPY_TRIES:
        return None
    return CopyState(name, source, others[(model.trial + tries) % len(others)])


def _best(state: SweepState) -> list[Trial]:
    scored = [one for one in state.trials if one.scores and one.number not in state.deleted]
    return sorted(scored, key=lambda one: (-max(one.scores), one.number))[: state.keep]


def partition_holders(
    workers: Mapping[NodeId, int],
    partitions: int,
    replicas: int,
    before: Mapping[NodeId, set[int]],
    can_hold: Callable[[NodeId, int], bool] = lambda _node, _partition: True,
) -> dict[NodeId, set[int]]:
    """Assign partitions to nodes in proportion to their workers, with few moves.

    Cerebro fixes the place of each partition (section 3.1) and replicates it (section 5.5). Here
    nodes may join and leave. The partitions of a lost node are spread over all remaining nodes, and
    a new node gets its share from the nodes with the largest load.

    Args:
        workers: nodes with workers, and their number.
        replicas: number of nodes that get each partition; if there are fewer, all nodes get it.
        before: partitions that each node holds now.
        can_hold: False if the node could not provide the partition.

    Returns:
        Partitions of each node in `workers`. Partitions that no node can hold are left out.
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
    """Return source, target and partition of a move that evens out the loads; None without one."""
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
