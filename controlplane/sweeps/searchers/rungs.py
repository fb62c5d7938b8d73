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
    cost nothing. So that small sweeps end, the best of a rung goes on when nobody else will come
    to it.

    Args:
        trials: all of them.
        levels: as `rungs` gives them.
        eta: one in so many goes on.
    """
    found: list[Decision] = []
    for at in reversed(range(len(levels) - 1)):
        level, following = levels[at], levels[at + 1]
        here = ranked(trials, level)
        complete = not any(_may_come(trial, level) for trial in trials)
        places = len(here) // eta
        if complete and here:
            places = max(places, 1)
        promoted = [trial for trial in here[:places] if trial.waits and trial.granted == level]
        found += [Grant(trial.number, following) for trial in promoted]
    if not found and all(trial.ended or trial.waits for trial in trials):
        found += [
            Stop(trial.number, f"not promoted beyond {trial.epochs} epochs")
            for trial in trials
            if not trial.ended
        ]
    return found


def _may_come(trial: Trial, level: int) -> bool:
    """Whether it may still get to the end of this rung."""
    return not trial.ended and trial.epochs < level
