"""Trials are added, granted epochs, scored, and end."""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.sweeps.epoch_metrics import score
from controlplane.sweeps.model_states import ModelState
from controlplane.sweeps.orders import Order, StateName, TrialEnded, TrialScored
from controlplane.sweeps.sweep_state import SweepState
from controlplane.sweeps.trials import Add, Decision, Stop, apply, failed, with_score


def decide(state: SweepState, decisions: Sequence[Decision]) -> list[Order]:
    """Carry out what a searcher or a user decided, as a whole."""
    found: list[Order] = []
    state.trials = apply(state.trials, decisions)
    for one in decisions:
        if isinstance(one, Add):
            model = ModelState(len(state.models), state.partitions)
            if one.parent is not None:
                whole = state.models[one.parent]
                model.visits, model.at = list(whole.visits), len(whole.visits)
                model.parents = (*whole.parents, StateName(one.parent, model.at))
                model.metrics = list(whole.metrics)
            state.models.append(model)
        elif isinstance(one, Stop):
            _void(state, one.trial)
            found.append(TrialEnded(one.trial, "stopped", one.why))
    return found


def add_score(state: SweepState, number: int, metrics: dict[str, float]) -> list[Order]:
    """An epoch of a trial is over.

    Args:
        metrics: of the epoch; without a finite one that counts, the trial fails.
    """
    value, wrong = score(state.spec, metrics)
    found: list[Order] = [TrialScored(number, state.models[number].whole_epochs, metrics)]
    if wrong:
        return [*found, *fail(state, number, wrong)]
    state.trials[number] = with_score(state.trials[number], value, state.spec.epochs)
    if state.trials[number].ended:
        found.append(TrialEnded(number, "done", f"trained {state.spec.epochs} epochs"))
    return found


def fail(state: SweepState, number: int, why: str) -> list[Order]:
    """A trial trains no further, through its own fault.

    Args:
        number: of the trial; nothing happens if it has ended.
    """
    if state.trials[number].ended:
        return []
    state.trials[number] = failed(state.trials[number])
    _void(state, number)
    return [TrialEnded(number, "failed", why)]


def _void(state: SweepState, trial: int) -> None:
    """What its unit leaves counts for nothing; the unit runs to its end: to kill costs more."""
    lease = state.lease_of(trial)
    if lease is not None:
        lease.void = True
