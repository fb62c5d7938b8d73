"""Who goes on to the next rung: successive halving, Hyperband and ASHA."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Container, Sequence
from itertools import pairwise

from controlplane.sweeps.trials import Decision, Grant, Stop, Trial, ranked
from schemas.sweeps import Promotes


def rungs(least: int, most: int, eta: int) -> list[int]:
    """Epochs after which trials are compared, and the last epoch.

    Args:
        most: epochs of a trial that is never stopped.
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


def asynchronous(
    trials: Sequence[Trial],
    levels: Sequence[int],
    eta: int,
    promotes: Promotes = "in_order",
    paused: Container[int] = (),
) -> list[Decision]:
    """Rungs that do not wait for all: who is in the best 1 / eta of those before goes on.

    ASHA (Li et al., MLSys '20, algorithm 2), highest rung first. Paper: where nobody can be
    promoted a new configuration begins. Here all are there from the beginning, and paused ones
    cost nothing. When nobody trains and nobody is among the best, the first of the highest rung
    goes on until one is trained to the end, or leaves for that; then the others stop.

    Paper: scores are looked at as they arrive (`on_arrival`), so the same search has other winners
    with other slots. `in_order` looks at them in an order of its own: at the first rung by number,
    at the next ones as they were promoted, and a score waits for those before it. Who is promoted
    then follows from the scores alone.

    Args:
        promotes: in which order scores are looked at.
        paused: numbers of trials for which nobody waits.
    """
    found: list[Decision] = []
    if promotes == "in_order":
        promoted = _promoted_in_order(trials, levels, eta, paused)
    else:
        ranks = [ranked(trials, level) for level in levels[:-1]]
        promoted = [[trial.number for trial in here[: len(here) // eta]] for here in ranks]
    for (level, following), numbers in reversed(list(zip(pairwise(levels), promoted, strict=True))):
        found += [Grant(n, following) for n in numbers if _waits_at(trials[n], level)]
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


def _promoted_in_order(
    trials: Sequence[Trial], levels: Sequence[int], eta: int, paused: Container[int]
) -> list[list[int]]:
    """For each rung but the last the numbers of who goes on, in the order of their promotions."""
    found: list[list[int]] = []
    below: list[int] = []  # who was promoted to the rung
    for level in levels[:-1]:
        came = set(below)
        late = [t.number for t in trials if t.number not in came and _reaches(t, level)]
        below = _best_of_prefixes([trials[n] for n in (*below, *late)], level, eta, paused)
        found.append(below)
    return found


def _reaches(trial: Trial, level: int) -> bool:
    """Whether it may train to the rung, and began below it."""
    return trial.began_at < level <= trial.granted


def _best_of_prefixes(
    order: Sequence[Trial], level: int, eta: int, paused: Container[int]
) -> list[int]:
    """Who is among the best 1 / eta of all up to some place, up to the first without a score."""
    ranks: list[tuple[float, int]] = []  # ascending: the best first
    found: dict[int, None] = {}
    places = 0
    for trial in order:
        score = trial.score_after(level)
        if score is None:
            if trial.ended or trial.number in paused:
                continue
            break
        at = bisect(ranks, (-score, trial.number))
        ranks.insert(at, (-score, trial.number))
        before, places = places, len(ranks) // eta
        if at < places:
            found[trial.number] = None
        elif places > before:
            found[ranks[before][1]] = None
    return list(found)


def _waits_at(trial: Trial, level: int) -> bool:
    return trial.waits and trial.granted == level
