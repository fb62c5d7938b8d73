"""How many epochs a search trains in all, as far as that follows from its rungs."""

from __future__ import annotations

from itertools import pairwise

from controlplane.sweeps.searchers.rungs import rungs
from schemas.hyperband import brackets
from schemas.sweeps import Asha, Hyperband, PopulationBased, SearchSpec, SuccessiveHalving


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
