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
    leased = {lease.trial for lease in state.leases.values()}
    copying = {name for name, _ in state.copying}
    for trial, model in zip(state.trials, state.models, strict=True):
        if trial.ended or not model.visits:
            continue
        if trial.number not in leased:
            _go_to_newest(state, model)
        copy = _keep_newest(state, model, needed)
        if copy is not None and copy.state not in copying:
            state.copying.add((copy.state, copy.target))
            found.append(copy)
    for trial in _best(state):
        model = state.models[trial.number]
        needed.update(model.names(_best_version(state, trial)))
    needed.update(state.left_with.values())
    needed.update(lease.order.state for lease in state.leases.values() if lease.order.state)
    dropped = state.stored.drop_all_but(needed)
    state.copying = {(name, node) for name, node in state.copying if name in needed}
    return [*found, *dropped]


def _keep_newest(state: SweepState, model: ModelState, needed: set[StateName]) -> CopyState | None:
    """Its newest state, and older ones while that is not yet in enough places: then a copy."""
    places = min(PLACES, max(1, len(state.staged)))
    found: CopyState | None = None
    for version in range(model.at, 0, -1):
        names = model.names(version)
        nodes = [node for node, _ in state.stored.nodes(names)]
        if not nodes:
            continue
        needed.update(names)
        if version == model.at and len(nodes) < places:
            found = _copy(state, model, nodes)
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


def _copy(state: SweepState, model: ModelState, nodes: list[NodeId]) -> CopyState | None:
    """Of its newest state, to a node that has it not, if there is any."""
    (source, name), *_ = state.stored.nodes(model.names(model.at))
    others = [node for node in state.staged if node not in nodes]
    return CopyState(name, source, others[model.trial % len(others)]) if others else None


def _best(state: SweepState) -> list[Trial]:
    """Trials of the best scores that anybody had, `keep` of them."""
    scored = [one for one in state.trials if one.scores and one.number not in state.deleted]
    return sorted(scored, key=lambda one: (-max(one.scores), one.number))[: state.keep]


def _best_version(state: SweepState, trial: Trial) -> int:
    """Visits of its state after its best epoch."""
    epochs = trial.began_at + 1 + trial.scores.index(max(trial.scores))
    return epochs * state.partitions
