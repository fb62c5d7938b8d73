"""What a searcher asks for next, from the trials alone."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Container, Sequence

from controlplane.sweeps.configurations import drawn, grid
from controlplane.sweeps.searchers.population import exploit_and_explore
from controlplane.sweeps.searchers.rungs import asynchronous, rungs, synchronous
from controlplane.sweeps.trials import Add, Decision, Stop, Trial
from schemas.hyperband import brackets
from schemas.sweeps import (
    Asha,
    Grid,
    Hyperband,
    MedianStopping,
    PopulationBased,
    RandomSearch,
    SearchSpec,
    SuccessiveHalving,
)


def next_decisions(
    spec: SearchSpec, trials: Sequence[Trial], paused: Container[int] = ()
) -> list[Decision]:
    """What the search wants now; nothing while it waits for trials, or is over.

    A function of its arguments: whoever has the same trials decides the same, after a restart too.
    One answer is carried out as a whole.

    Args:
        trials: in order of their numbers; those that users added may be among them.
        paused: numbers of those that do not train at the moment.
    """
    if not trials:
        return first_trials(spec)
    searcher = spec.searcher
    match searcher:
        case Grid() | RandomSearch():
            return []
        case SuccessiveHalving(min_epochs=least, eta=eta):
            return synchronous(trials, rungs(least, spec.epochs, eta), eta)
        case Asha(min_epochs=least, eta=eta, promotes=promotes):
            levels = rungs(least, spec.epochs, eta)
            return asynchronous(trials, levels, eta, promotes, paused)
        case Hyperband(eta=eta):
            return _brackets(trials, spec.epochs, eta)
        case MedianStopping():
            return _below_the_median(trials, searcher)
        case PopulationBased():
            return exploit_and_explore(spec, searcher, trials)


def first_trials(spec: SearchSpec) -> list[Decision]:
    """What the search begins with."""
    searcher = spec.searcher
    if isinstance(searcher, Grid):
        return [Add(values, spec.epochs) for values in grid(spec.space)]
    epochs: list[int]
    match searcher:
        case RandomSearch(configurations=many) | MedianStopping(configurations=many):
            epochs = [spec.epochs] * many
        case (
            SuccessiveHalving(configurations=many, min_epochs=least)
            | Asha(configurations=many, min_epochs=least)
        ):
            epochs = [least] * many
        case PopulationBased(population=many, interval_epochs=interval):
            epochs = [interval] * many
        case Hyperband(eta=eta):
            sizes = brackets(spec.epochs, eta)
            epochs = [least for many, least in sizes for _ in range(many)]
    return [
        Add(drawn(spec.space, spec.seed, number), granted) for number, granted in enumerate(epochs)
    ]


def epochs_of_new(spec: SearchSpec, begun: int) -> int:
    """Epochs that a trial may train to which a user adds.

    Args:
        begun: epochs that the state has which it begins with.

    Returns:
        Its first rung; of Hyperband, whose brackets are full, and of searchers without rungs the
        last epoch.
    """
    match spec.searcher:
        case SuccessiveHalving(min_epochs=least, eta=eta) | Asha(min_epochs=least, eta=eta):
            levels = rungs(least, spec.epochs, eta)
            return next((level for level in levels if level > begun), spec.epochs)
        case PopulationBased(interval_epochs=interval):
            return min(spec.epochs, max(interval, begun + 1))
        case _:
            return spec.epochs


def _brackets(trials: Sequence[Trial], most: int, eta: int) -> list[Decision]:
    found: list[Decision] = []
    begin = 0
    sizes = brackets(most, eta)
    for at, (many, least) in enumerate(sizes):
        end = begin + many if at < len(sizes) - 1 else len(trials)  # who joined later: to the end
        found += synchronous(trials[begin:end], rungs(least, most, eta), eta)
        begin = end
    return found


def _below_the_median(trials: Sequence[Trial], searcher: MedianStopping) -> list[Decision]:
    """Stop whose best is worse than the median of the others' running means (section 3.2.2)."""
    found: list[Decision] = []
    means: dict[int, list[float]] = {}  # by epochs, ascending, of all that have come as far
    for trial in trials:
        came = trial.epochs
        if trial.ended or came < searcher.grace_epochs or not trial.scores:
            continue
        if came not in means:
            means[came] = sorted(_mean(one, came) for one in trials if len(one.scores) >= came)
        others = list(means[came])
        if len(trial.scores) >= came:
            del others[bisect_left(others, _mean(trial, came))]
        if len(others) >= searcher.min_others and max(trial.scores) < _median(others):
            why = f"its best is below the median of {len(others)} others after {came}"
            found.append(Stop(trial.number, f"{why} epoch{'s' * (came != 1)}"))
    return found


def _mean(trial: Trial, epochs: int) -> float:
    scores = trial.scores[:epochs]
    try:
        return math.fsum(scores) / epochs
    except OverflowError:
        return sum(score / epochs for score in scores)


def _median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return ordered[middle - 1] / 2 + ordered[middle] / 2
