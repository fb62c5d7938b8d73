"""Search algorithms as pure functions of the trials: rungs, population based training, medians.

A rung is a number of epochs after which successive halving, Hyperband and ASHA compare trials.
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
    """Return the epochs of all rungs: `least` times powers of `eta` below `most`, then `most`."""
    found: list[int] = []
    at = least
    while at < most:
        found.append(at)
        at *= eta
    return [*found, most]


def synchronous(trials: Sequence[Trial], levels: Sequence[int], eta: int) -> list[Decision]:
    """Promote the best 1 / eta of each complete rung, and stop the other trials of the rung.

    Of n trials floor(n / eta) are promoted, at least one. The order of arrival has no influence.
    """
    found: list[Decision] = []
    for level, following in pairwise(levels):
        at_rung = [trial for trial in trials if trial.granted >= level]
        if any(not trial.ended and trial.epochs < level for trial in at_rung):
            break
        best = max(1, len(at_rung) // eta)
        places = max(0, best - sum(trial.granted > level for trial in at_rung))
        order = [trial for trial in ranked(at_rung, level) if _waits_at(trial, level)]
        found += [Grant(trial.number, following) for trial in order[:places]]
        reason = f"not among the best {best} of {len(at_rung)} after {_epochs(level)}"
        found += [Stop(trial.number, reason) for trial in order[places:]]
        if order:
            break
    return found


def asynchronous(
    trials: Sequence[Trial],
    levels: Sequence[int],
    eta: int,
    promotes: Promotes,
    paused: Container[int],
) -> list[Decision]:
    """Promote trials among the best 1 / eta of a rung without waiting for the whole rung.

    ASHA (Li et al., MLSys '20, algorithm 2), from the highest rung down. Paper: if no trial can be
    promoted, a new configuration begins. Here all configurations exist from the start. If no trial
    trains and none is among the best, the best waiting trial of the highest rung is promoted. Once
    a trial has trained to the end or graduates, the other trials stop.

    Paper: scores are compared as they arrive (`on_arrival`). Here `in_order` compares scores by
    number in the first rung and by order of promotion in later rungs, so promotions depend on the
    scores alone. Trials in `paused` are skipped if they have no score.
    """
    found: list[Decision] = []
    if promotes == "in_order":
        promoted = _promoted_in_order(trials, levels, eta, paused)
    else:
        ranks = [ranked(trials, level) for level in levels[:-1]]
        promoted = [[trial.number for trial in at_rung[: len(at_rung) // eta]] for at_rung in ranks]
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
        Stop(trial.number, f"not promoted after {_epochs(trial.epochs)}")
        for trial in trials
        if not trial.ended
    ]


def _promoted_in_order(
    trials: Sequence[Trial], levels: Sequence[int], eta: int, paused: Container[int]
) -> list[list[int]]:
    """Return the numbers of promoted trials for each rung but the last, in order of promotion."""
    found: list[list[int]] = []
    below: list[int] = []  # numbers of trials that were promoted to the rung
    for level in levels[:-1]:
        came = set(below)
        late = [t.number for t in trials if t.number not in came and _reaches(t, level)]
        below = _best_of_prefixes([trials[n] for n in (*below, *late)], level, eta, paused)
        found.append(below)
    return found


def _reaches(trial: Trial, level: int) -> bool:
    return trial.start_epochs < level <= trial.granted


def _best_of_prefixes(
    order: Sequence[Trial], level: int, eta: int, paused: Container[int]
) -> list[int]:
    """Return the trial numbers that are among the best 1 / eta of some prefix of `order`.

    A trial without a score is skipped if it has ended or is paused. Prefixes stop before the first
    other trial without a score.
    """
    ranks: list[tuple[float, int]] = []  # ascending: best first
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


def _epochs(count: int) -> str:
    return f"{count} epoch{'s' * (count != 1)}"


def exploit_and_explore(
    spec: SearchSpec, searcher: PopulationBased, trials: Sequence[Trial]
) -> list[Decision]:
    """Replace the worst quarter by mutated copies of the best quarter, at every interval.

    Truncation selection (Jaderberg et al. 2017, section 4). All trials wait for the slowest one in
    the interval, so the order of arrival has no influence. A copy is a new trial with a parent.
    Trials that joined later catch up without being compared.
    """
    alive = [trial for trial in trials if not trial.ended]
    level = max((trial.granted for trial in alive), default=0)
    following = min(level + searcher.interval_epochs, spec.epochs)
    late = [trial for trial in alive if trial.waits and trial.granted < level]
    if late:
        ends = [min(trial.granted + searcher.interval_epochs, level) for trial in late]
        return [Grant(trial.number, end) for trial, end in zip(late, ends, strict=True)]
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
        place = f"among the worst {quarter} of {len(order)} after {level} epochs"
        reason = f"{place}; replaced by a changed copy of trial {parent.number}"
        found.append(Stop(trial.number, reason))
    gone = {trial.number for trial in worst}
    found += [Grant(trial.number, following) for trial in alive if trial.number not in gone]
    return found


def next_decisions(
    spec: SearchSpec, trials: Sequence[Trial], paused: Container[int] = ()
) -> list[Decision]:
    """Return the decisions of the search; the list is empty while it waits for trials or is over.

    The result depends on the arguments alone. The caller must carry out all decisions. `paused` has
    the numbers of trials that do not train at the moment.
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
            return _hyperband(trials, spec.epochs, eta)
        case MedianStopping():
            return _median_stopping(trials, searcher)
        case PopulationBased():
            return exploit_and_explore(spec, searcher, trials)


def first_trials(spec: SearchSpec) -> list[Decision]:
    """Return the initial trials of a search."""
    searcher = spec.searcher
    if isinstance(searcher, Grid):
        return [Add(values, spec.epochs) for values in grid(spec.space)]
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
    draws = (drawn(spec.space, spec.seed, number) for number in range(len(epochs)))
    return [Add(values, granted) for values, granted in zip(draws, epochs, strict=True)]


def epochs_of_new(spec: SearchSpec, begun: int) -> int:
    """Return the epochs granted to a trial that a user adds with the state after `begun` epochs.

    With rungs, the result is the first rung above `begun`. In population based training, it is the
    larger of the interval and `begun` + 1. Otherwise it is the last epoch.
    """
    match spec.searcher:
        case SuccessiveHalving(min_epochs=least, eta=eta) | Asha(min_epochs=least, eta=eta):
            levels = rungs(least, spec.epochs, eta)
            return next((level for level in levels if level > begun), spec.epochs)
        case PopulationBased(interval_epochs=interval):
            return min(spec.epochs, max(interval, begun + 1))
        case _:
            return spec.epochs


def _hyperband(trials: Sequence[Trial], most: int, eta: int) -> list[Decision]:
    found: list[Decision] = []
    begin = 0
    sizes = brackets(most, eta)
    for at, (many, least) in enumerate(sizes):
        end = begin + many if at < len(sizes) - 1 else len(trials)  # added trials join the last
        found += synchronous(trials[begin:end], rungs(least, most, eta), eta)
        begin = end
    return found


def _median_stopping(trials: Sequence[Trial], searcher: MedianStopping) -> list[Decision]:
    """Stop a trial if its best score is below the median of the other trials' means.

    Golovin et al., KDD '17, section 3.2.2.
    """
    found: list[Decision] = []
    means: dict[int, list[float]] = {}  # epochs -> means of all trials that reached them, ascending
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
            reason = f"best score is below the median of {len(others)} other trials"
            found.append(Stop(trial.number, f"{reason} after {_epochs(came)}"))
    return found


def _mean(trial: Trial, epochs: int) -> float:
    scores = trial.scores[:epochs]
    try:
        return math.fsum(scores) / epochs
    except OverflowError:
        return sum(score / epochs for score in scores)


def _median(ordered: Sequence[float]) -> float:
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return low if low == high else low / 2 + high / 2


def expected_epochs(spec: SearchSpec) -> int:
    """Return the expected total epochs of all trials, or 0 if unknown; a lower bound for ASHA."""
    searcher = spec.searcher
    match searcher:
        case (
            SuccessiveHalving(configurations=many, min_epochs=least, eta=eta)
            | Asha(configurations=many, min_epochs=least, eta=eta)
        ):
            return _rung_epochs(many, rungs(least, spec.epochs, eta), eta)
        case Hyperband(eta=eta):
            return sum(
                _rung_epochs(many, rungs(least, spec.epochs, eta), eta)
                for many, least in brackets(spec.epochs, eta)
            )
        case PopulationBased(population=many):
            return many * spec.epochs
        case _:
            return 0


def _rung_epochs(many: int, levels: list[int], eta: int) -> int:
    found = many * levels[0]
    for before, level in pairwise(levels):
        many = max(1, many // eta)
        found += many * (level - before)
    return found
