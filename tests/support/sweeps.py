"""Searches played without training: who comes when, and what each one scores, is up to the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from controlplane.sweeps.search import next_decisions
from controlplane.sweeps.trials import Decision, Trial, apply, with_score
from schemas.sweeps import Parameter, Searcher, SearchSpec, log_uniform

Scores = Callable[[Trial, int], float]  # of a trial after an epoch, counted from the first

LR = {"lr": log_uniform(1e-4, 1e-1)}


def search(
    searcher: Searcher, epochs: int = 9, space: dict[str, Parameter] | None = None, seed: int = 0
) -> SearchSpec:
    return SearchSpec(
        space=LR if space is None else space,
        searcher=searcher,
        epochs=epochs,
        metric="accuracy",
        seed=seed,
    )


def settled(spec: SearchSpec, trials: Sequence[Trial]) -> tuple[list[Trial], list[Decision]]:
    """The trials once the searcher has nothing more to say, and what it said."""
    now = list(trials)
    said: list[Decision] = []
    for _ in range(1000):
        decisions = next_decisions(spec, now)
        if not decisions:
            return now, said
        now = apply(now, decisions)
        said += decisions
    raise AssertionError("the searcher never comes to rest")


def played(spec: SearchSpec, scores: Scores, order: Random) -> list[Trial]:
    """The trials when all is over; who finishes an epoch next is up to `order`."""
    trials, _ = settled(spec, [])
    while training := [trial for trial in trials if not trial.ended and not trial.waits]:
        one = training[order.randrange(len(training))]
        trials[one.number] = with_score(one, scores(one, one.epochs + 1), spec.epochs)
        trials, _ = settled(spec, trials)
    return trials
