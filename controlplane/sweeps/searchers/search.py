"""What a searcher asks for next, from the trials alone."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from controlplane.sweeps.configurations import drawn, grid
from controlplane.sweeps.searchers.population import exploit_and_explore
from controlplane.sweeps.searchers.rungs import asynchronous, rungs, synchronous
from controlplane.sweeps.trials import Add, Decision, Stop, Trial
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


def next_decisions(spec: SearchSpec, trials: Sequence[Trial]) -> list[Decision]:
    """What the search wants now; nothing while it waits for trials, or is over.

    A function of its arguments: whoever has the same trials decides the same, after a restart too.
    One answer is carried out as a whole.

    Args:
        spec: checked.
        trials: in order of their numbers; those that users added may be among them.
    """
    if not trials:
        return first_trials(spec)
    searcher = spec.searcher
    match searcher:
        case Grid() | RandomSearch():
            return []
        case SuccessiveHalving(min_epochs=least, eta=eta):
            return synchronous(trials, rungs(least, spec.epochs, eta), eta)
        case Asha(min_epochs=least, eta=eta):
            return asynchronous(trials, rungs(least, spec.epochs, eta), eta)
        case Hyperband(eta=eta):
            return _brackets(trials, spec.epochs, eta)
        case MedianStopping():
            return _below_the_median(trials, searcher)
        case PopulationBased():
            return exploit_and_explore(spec, searcher, trials)


def first_trials(spec: SearchSpec) -> list[Decision]:
    """What the search begins with.

    Args:
        spec: checked.
    """
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


def brackets(most: int, eta: int) -> list[tuple[int, int]]:
    """Hyperband's brackets: how many trials, and their first rung in epochs.

    Li et al., JMLR '18, algorithm 1, with R = `most`: s from floor(log_eta R) down to 0,
    n = ceil((s_max + 1) eta^s / (s + 1)), r = R eta^-s.

    Args:
        most: epochs of a trial that is never stopped.
        eta: factor from rung to rung.
    """
    top = 0
    while eta ** (top + 1) <= most:
        top += 1
    return [(-(-(top + 1) * eta**s // (s + 1)), max(1, most // eta**s)) for s in range(top, -1, -1)]


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
    for trial in trials:
        if trial.ended or trial.epochs < searcher.grace_epochs or not trial.scores:
            continue
        others = [
            fmean(other.scores[: trial.epochs])
            for other in trials
            if other.number != trial.number and len(other.scores) >= trial.epochs
        ]
        if len(others) >= searcher.min_others and max(trial.scores) < median(others):
            why = f"its best is below the median of {len(others)} others after {trial.epochs}"
            found.append(Stop(trial.number, f"{why} epoch{'s' * (trial.epochs != 1)}"))
    return found
