"""Who goes on to the next rung: successive halving, Hyperband and ASHA."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from controlplane.sweeps.trials import Decision, Grant, Stop, Trial, ranked


def rungs(least: int, most: int, eta: int) -> list[int]:
    """Epochs after which trials are compared, and the last epoch.

    Args:
        least: epochs of the first rung.
        most: epochs of a trial that is never stopped.
        eta: factor from rung to rung.
    """
    found: list[int] = []
    at = least
    while at < most:
        found.append(at)
        at *= eta
    return [*found, most]


def synchronous(trials: Sequence[Trial], levels: Sequence[int], eta: int) -> list[Decision]:
    """Rungs that wait for all of theirs: the best 1 / eta go on, the others end.

    Of n that came to a rung floor(n / eta) go on, at least one, in whatever order they came.

    Args:
        trials: of one bracket.
        levels: as `rungs` gives them.
        eta: one in so many goes on.
    """
    found: list[Decision] = []
    for level, following in pairwise(levels):
        here = [trial for trial in trials if trial.granted >= level]
        if any(not trial.ended and trial.epochs < level for trial in here):
            break
        ahead = sum(trial.granted > level for trial in here)
        places = max(1, len(here) // eta) - ahead
        order = [trial for trial in ranked(here, level) if trial.waits and trial.granted == level]
        found += [Grant(trial.number, following) for trial in order[: max(0, places)]]
        for trial in order[max(0, places) :]:
            why = f"not among the best {max(1, len(here) // eta)} of {len(here)} after {level}"
            found.append(Stop(trial.number, f"{why} epoch{'s' * (level != 1)}"))
        if order:
            break
    return found


def asynchronous(trials: Sequence[Trial], levels: Sequence[int], eta: int) -> list[Decision]:
    """Rungs that wait for nobody: who is in the best 1 / eta of those that came so far goes on.

    ASHA (Li et al., MLSys '20, algorithm 2), highest rung first. Paper: where nobody can be
    promoted a new configuration begins. Here all are there from the beginning, and paused ones
    cost nothing. When nobody trains and nobody is among the best, the first of the highest rung
    goes on until one is trained to the end, or leaves for that; then the others stop.

    Args:
        trials: all of them.
        levels: as `rungs` gives them.
        eta: one in so many goes on.
    """
    found: list[Decision] = []
    for level, following in reversed(list(pairwise(levels))):
        here = ranked(trials, level)
        promoted = here[: len(here) // eta]
        found += [Grant(one.number, following) for one in promoted if _waits_at(one, level)]
    if found or any(not trial.ended and not trial.waits for trial in trials):
        return found
    if not any(trial.epochs >= levels[-1] or trial.ended == "graduated" for trial in trials):
        for level, following in reversed(list(pairwise(levels))):
            waiting = [trial for trial in ranked(trials, level) if _waits_at(trial, level)]
            if waiting:
                return [Grant(waiting[0].number, following)]
    return [
        Stop(trial.number, f"not promoted after {trial.epochs} epoch{'s' * (trial.epochs != 1)}")
        for trial in trials
        if not trial.ended
    ]


def _waits_at(trial: Trial, level: int) -> bool:
    return trial.waits and trial.granted == level
