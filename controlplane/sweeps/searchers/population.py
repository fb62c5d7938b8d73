"""Population based training: states and values of the best are taken over by the worst."""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.sweeps.configurations import changed
from controlplane.sweeps.randomness import stream
from controlplane.sweeps.trials import Add, Decision, Grant, Stop, Trial, ranked
from schemas.sweeps import PopulationBased, SearchSpec


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
