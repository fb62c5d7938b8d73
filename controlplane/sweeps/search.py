"""What a searcher asks for next, from the trials alone.

Who goes on to the next rung: successive halving, Hyperband and ASHA.

Population based training: states and values of the best are taken over by the worst.

How many epochs a search trains in all, as far as that follows from its rungs.
"""

from __future__ import annotations

import math
from bisect import bisect, bisect_left
from collections.abc import Container, Sequence
from itertools import pairwise

from controlplane.sweeps.configurations import changed, drawn, grid, stream
from controlplane.sweeps.trials import Add, Decision, Grant, Stop, Trial, ranked
from schemas.sweeps import (
    Asha,
    Grid,
    Hyperband,
    MedianStopping,
    PopulationBased,
    Promotes,
    RandomSearch,
    SearchSpec,
    SuccessiveHalving,
    brackets,
)


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


def exploit_and_explore(
    spec: SearchSpec, searcher: PopulationBased, trials: Sequence[Trial]
) -> list[Decision]:
    """At every interval the worst quarter gives way to changed copies of the best quarter.

    Jaderberg et al. 2017, section 4, truncation selection. All wait for the slowest of the
    interval, so that the result does not depend on who came first. A copy is a trial of its own
    with a parent: who became of whom is read from the ledger.

    Args:
        trials: all of them; those that joined later catch up without being compared.
    """
    alive = [trial for trial in trials if not trial.ended]
    level = max((trial.granted for trial in alive), default=0)
    following = min(level + searcher.interval_epochs, spec.epochs)
    late = [trial for trial in alive if trial.waits and trial.granted < level]
    if late:
        return [
            Grant(trial.number, min(trial.granted + searcher.interval_epochs, level))
            for trial in late
        ]
    if not alive or not all(trial.waits for trial in alive):
        return []
    order = ranked(alive, level)
    quarter = len(order) // 4
    best, worst = order[:quarter], order[len(order) - quarter :]
    found: list[Decision] = []
    for trial in worst:
        rng = stream(spec.seed, "pbt", level, trial.number)
        parent = best[rng.randrange(len(best))]
        values = changed(spec.space, parent.values, searcher.resample, rng)
        found.append(Add(values, following, parent=parent.number))
        why = f"among the worst {quarter} of {len(order)} after {level} epochs"
        found.append(Stop(trial.number, f"{why}; a changed copy of {parent.number} goes on"))
    gone = {trial.number for trial in worst}
    found += [Grant(trial.number, following) for trial in alive if trial.number not in gone]
    return found


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


def expected_epochs(spec: SearchSpec) -> int:
    """Epochs of all trials together; 0 where only what is granted so far can be said.

    Exact for successive halving and Hyperband; ASHA promotes some more, whoever comes first.
    """
    searcher = spec.searcher
    match searcher:
        case (
            SuccessiveHalving(configurations=many, min_epochs=least, eta=eta)
            | Asha(configurations=many, min_epochs=least, eta=eta)
        ):
            return _of_rungs(many, rungs(least, spec.epochs, eta), eta)
        case Hyperband(eta=eta):
            return sum(
                _of_rungs(many, rungs(least, spec.epochs, eta), eta)
                for many, least in brackets(spec.epochs, eta)
            )
        case PopulationBased(population=many):
            return many * spec.epochs
        case _:
            return 0


def _of_rungs(many: int, levels: list[int], eta: int) -> int:
    found = many * levels[0]
    for before, level in pairwise(levels):
        many = max(1, many // eta)
        found += many * (level - before)
    return found
