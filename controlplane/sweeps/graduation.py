"""The last trials go on as elastic jobs, once they are fewer than half the slots.

With fewer models than workers, some workers idle. A trial that graduates uses all slots that its
job is given, and is no longer bit-equal to one that was trained alone: its user has to want it.
"""

from __future__ import annotations

from controlplane.sweeps.orders import Graduate, Order, StateName
from controlplane.sweeps.sweep_state import SweepState
from controlplane.sweeps.trials import Trial, graduated, with_later_score


def graduate_last_trials(state: SweepState) -> list[Order]:
    """Let those go that are at the end of an epoch; the others end theirs first."""
    state.graduating = _last_trials(state)
    found: list[Order] = []
    for number in sorted(state.graduating):
        trial, model = state.trials[number], state.models[number]
        name = _newest(state, number)
        if not at_the_end_of_an_epoch(state, number) or name is None:
            continue
        state.trials[number] = graduated(trial)
        state.graduating.discard(number)
        state.left_with[number] = name
        digest = model.digest(name.version)
        found.append(Graduate(number, trial.values, name, digest, model.whole_epochs))
    return found


def at_the_end_of_an_epoch(state: SweepState, number: int) -> bool:
    """Whether a trial has trained whole epochs, at least one, and is at no unit."""
    model = state.models[number]
    begun = len(model.visits) % state.partitions
    return bool(model.visits) and not begun and not model.again and state.lease_of(number) is None


def score_graduate(state: SweepState, number: int, score: float) -> None:
    """A trial that graduated ended another epoch, elsewhere.

    Args:
        score: larger is better; one that is not finite counts for nothing.
    """
    trial = state.trials[number]
    if trial.ended == "graduated":
        state.trials[number] = with_later_score(trial, score)


def _last_trials(state: SweepState) -> set[int]:
    """Those that train on, if they are few and nobody can join them any more.

    Who waits for a promotion when all others may train to the end waits for nothing: no score that
    is still to come is compared with its own.
    """
    left: list[Trial] = [trial for trial in state.trials if not trial.ended and not trial.waits]
    final = all(trial.granted >= state.spec.epochs for trial in left)
    if not final or 2 * len(left) >= state.graduate_slots:
        return set()
    return {
        trial.number
        for trial in left
        if trial.number not in state.paused and _has_own_state(state, trial.number)
    }


def _has_own_state(state: SweepState, number: int) -> bool:
    """Whether it trained itself: until then its state has its parent's name."""
    model = state.models[number]
    return not model.parents or len(model.visits) > model.parents[-1].version


def _newest(state: SweepState, number: int) -> StateName | None:
    """Of its states the one after all of its visits, if a node has it."""
    model = state.models[number]
    having = state.stored.nodes([StateName(number, len(model.visits))])
    return having[0][1] if having else None
