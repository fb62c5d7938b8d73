"""Which states are kept, and where: a second place before the first is given up."""

from __future__ import annotations

from controlplane.sweeps.model_states import ModelState
from controlplane.sweeps.orders import CopyState, Order, StateName
from controlplane.sweeps.sweep_state import SweepState
from controlplane.sweeps.trials import Trial
from schemas.ids import NodeId

PLACES = 2  # nodes that have a state before the one before it is dropped


def keep_states(state: SweepState) -> list[Order]:
    """Go on from the newest states that there are, copy those that are in one place, drop others.

    Args:
        state: of the sweep.
    """
    needed: set[StateName] = set()
    found: list[Order] = []
    for trial in state.trials:
        if not trial.ended:
            found += _keep_newest(state, state.models[trial.number], needed)
    for trial in _best(state):
        model = state.models[trial.number]
        needed.update(model.names(_best_version(state, trial)))
    needed.update(state.left_with.values())
    needed.update(lease.order.state for lease in state.leases.values() if lease.order.state)
    dropped = state.stored.drop_all_but(needed)
    state.copying = {(name, node) for name, node in state.copying if name in needed}
    return [*found, *dropped]


def _keep_newest(state: SweepState, model: ModelState, needed: set[StateName]) -> list[CopyState]:
    """Its newest state, and older ones while that is not yet in enough places."""
    if state.lease_of(model.trial) is None:
        _go_to_newest(state, model)
    places = min(PLACES, max(1, len(state.staged)))
    found: list[CopyState] = []
    for version in range(model.at, 0, -1):
        names = model.names(version)
        nodes = [node for node, _ in state.stored.nodes(names)]
        if not nodes:
            continue
        needed.update(names)
        if version == model.at:
            found = _copy(state, model, nodes, places)
        if len(nodes) >= places:
            break
    return found


def _go_to_newest(state: SweepState, model: ModelState) -> None:
    """The newest state that a node has: a node that came back may have one that others lost."""
    for version in range(len(model.visits), model.at, -1):
        if state.stored.nodes(model.names(version)):
            model.at = version
            return
    while model.at and not state.stored.nodes(model.names(model.at)):
        model.at -= 1


def _copy(
    state: SweepState, model: ModelState, nodes: list[NodeId], places: int
) -> list[CopyState]:
    (source, name), *_ = state.stored.nodes(model.names(model.at))
    under_way = any(one == name for one, _ in state.copying)
    others = [node for node in state.staged if node not in nodes]
    if under_way or len(nodes) >= places or not others:
        return []
    target = others[model.trial % len(others)]
    state.copying.add((name, target))
    return [CopyState(name, source, target)]


def _best(state: SweepState) -> list[Trial]:
    """Trials of the best scores that anybody had, `keep` of them."""
    scored = [one for one in state.trials if one.scores and one.number not in state.deleted]
    return sorted(scored, key=lambda one: (-max(one.scores), one.number))[: state.keep]


def _best_version(state: SweepState, trial: Trial) -> int:
    """Visits of its state after its best epoch."""
    epochs = trial.began_at + 1 + trial.scores.index(max(trial.scores))
    return epochs * state.partitions
