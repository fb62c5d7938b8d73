"""Which states are kept, and where: a second place before the first is given up.

Which node holds which partitions of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from controlplane.sweeps.orders import CopyState, Order, StateName
from controlplane.sweeps.states import ModelState
from controlplane.sweeps.sweep_state import SweepState
from controlplane.sweeps.trials import Trial
from schemas.ids import NodeId

PLACES = 2  # nodes that have a state before the one before it is dropped
COPY_TRIES = 3  # of one state; then the next state is copied


def keep_states(state: SweepState) -> list[Order]:
    """Continue from the newest states, copy those with one replica, drop the others."""
    needed: set[StateName] = set()
    found: list[Order] = []
    leased = {lease.trial for lease in state.leases.values()}
    copied = {name for name, _ in state.copying}
    for trial, model in zip(state.trials, state.models, strict=True):
        if trial.ended or not model.visits:
            continue
        if trial.number not in leased:
            _go_to_newest(state, model)
        copy = _keep_newest(state, model, needed, copied)
        if copy is not None and copy.state not in copied:
            copied.add(copy.state)
            state.copying.add((copy.state, copy.target))
            found.append(copy)
    for trial in _best(state):
        model = state.models[trial.number]
        needed.update(model.names(_best_version(state, trial)))
    needed.update(state.left_with.values())
    needed.update(lease.order.state for lease in state.leases.values() if lease.order.state)
    dropped = state.stored.drop_all_but(needed)
    state.copying = {(name, node) for name, node in state.copying if name in needed}
    state.failed_copies = {name: n for name, n in state.failed_copies.items() if name in needed}
    return [*found, *dropped]


def _keep_newest(
    state: SweepState, model: ModelState, needed: set[StateName], copied: set[StateName]
) -> CopyState | None:
    """Its newest state, that which is copied, and the newest that is in enough places.

    One copy of a trial is under way at a time: where copies are slower than units, or fail, nodes
    keep three of its states and no more.
    """
    places = min(PLACES, max(1, len(state.staged)))
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
    """Of its states up to the present one those that a node has, the newest first."""
    found = {version for version in state.stored.versions(model.trial) if version <= model.at}
    for one in model.parents:
        most = min(one.version, model.at)
        found |= {version for version in state.stored.versions(one.trial) if version <= most}
    return sorted(found, reverse=True)


def _go_to_newest(state: SweepState, model: ModelState) -> None:
    """The newest state that a node has: a node that came back may have one that others lost."""
    for version in range(len(model.visits), model.at, -1):
        if state.stored.nodes(model.names(version)):
            model.at = version
            return
    while model.at and not state.stored.nodes(model.names(model.at)):
        model.at -= 1


def _copy(state: SweepState, model: ModelState) -> CopyState | None:
    """Of its newest state, to a node that has it not; another one after each failure."""
    having = state.stored.nodes(model.names(model.at))
    source, name = having[0]
    nodes = {node for node, _ in having}
    others = [node for node in state.staged if node not in nodes]
    tries = state.failed_copies.get(name, 0)
    if not others or tries >= COPY_TRIES:
        return None
    return CopyState(name, source, others[(model.trial + tries) % len(others)])


def _best(state: SweepState) -> list[Trial]:
    """Trials of the best scores that anybody had, `keep` of them."""
    scored = [one for one in state.trials if one.scores and one.number not in state.deleted]
    return sorted(scored, key=lambda one: (-max(one.scores), one.number))[: state.keep]


def _best_version(state: SweepState, trial: Trial) -> int:
    """Visits of its state after its best epoch."""
    epochs = trial.began_at + 1 + trial.scores.index(max(trial.scores))
    return epochs * state.partitions


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
