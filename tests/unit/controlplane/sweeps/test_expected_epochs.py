"""How much a search trains in all is known before it begins, where its rungs say so."""

from __future__ import annotations

import pytest

from controlplane.sweeps.configurations import stream
from controlplane.sweeps.search import expected_epochs
from schemas.sweeps import (
    Asha,
    Hyperband,
    PopulationBased,
    RandomSearch,
    Searcher,
    SuccessiveHalving,
)
from tests.support.sweeps import played, search


@pytest.mark.parametrize("searcher", [SuccessiveHalving(11, eta=2), Hyperband(eta=3)])
def test_rungs_that_wait_for_all_train_exactly_that(searcher: Searcher) -> None:
    spec = search(searcher, 9)

    trials = played(spec, lambda trial, epoch: trial.number + 0.01 * epoch, stream(3))

    assert sum(len(trial.scores) for trial in trials) == expected_epochs(spec)


def test_asha_trains_at_least_that_much() -> None:
    spec = search(Asha(24, eta=3), 9)

    trials = played(spec, lambda trial, epoch: trial.number + 0.01 * epoch, stream(3))

    assert expected_epochs(spec) <= sum(len(trial.scores) for trial in trials)


def test_of_a_population_all_train_to_the_end_and_of_a_random_search_grants_say_it() -> None:
    assert expected_epochs(search(PopulationBased(4), 6)) == 24
    assert expected_epochs(search(RandomSearch(4), 6)) == 0
