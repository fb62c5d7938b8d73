"""Rows for the trials of a sweep and for their epochs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from schemas.wire.client import SweepDetail, TrialInfo

DELETED: Final = "deleted"


class Best(NamedTuple):
    """Best epoch of the best trial."""

    trial: TrialInfo
    score: float  # as reported
    epoch: int  # of the score; includes a parent's epochs


def best_of(detail: SweepDetail) -> Best | None:
    """Return the trial that the controller ranks best, or None if no trial has a score.

    Args:
        detail: includes all trials.
    """
    if detail.best is None or detail.best >= len(detail.trials):
        return None
    return best_epoch(detail.trials[detail.best])


def best_epoch(trial: TrialInfo) -> Best | None:
    """Return the best epoch of a trial, or None if it has no score."""
    if trial.best_score is None:
        return None
    return Best(trial, trial.best_score, trial.best_epoch)


def ranked(detail: SweepDetail) -> list[TrialInfo]:
    """Return the trials, best first, then those without a score, then deleted ones.

    Args:
        detail: includes all trials.
    """
    sign = 1.0 if detail.spec.search.mode == "max" else -1.0

    def place(trial: TrialInfo) -> tuple[bool, float, int]:
        found = best_epoch(trial)
        score = math.inf if found is None else -sign * found.score
        return trial.state == DELETED, score, trial.number

    return sorted(detail.trials, key=place)


def trial_row(trial: TrialInfo) -> dict[str, Any]:
    """Return a trial as a flat row: values as `config.NAME`, best score, state and place."""
    found = best_epoch(trial)
    last = trial.metrics[-1] if trial.metrics else {}
    return {
        "trial": trial.number,
        "parent": trial.parent,
        **{f"config.{name}": value for name, value in trial.values.items()},
        "state": trial.state,
        "reason": trial.reason,
        "epochs": trial.epochs,
        "granted": trial.granted,
        "partition": trial.partition,
        "slot": trial.slot,
        "best": None if found is None else found.score,
        "best_epoch": None if found is None else found.epoch,
        **last,
    }


def epoch_rows(detail: SweepDetail, trials: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Return a row for every epoch of every trial; a copy's start where it left its parent.

    Args:
        detail: includes all trials.
        trials: numbers of trials; empty: all.
    """
    return [
        {
            "trial": trial.number,
            "parent": trial.parent,
            **{f"config.{name}": value for name, value in trial.values.items()},
            "epoch": trial.first_epoch + at,
            "ended": trial.ended_at[at] if at < len(trial.ended_at) else None,
            **metrics,
        }
        for trial in detail.trials
        if not trials or trial.number in trials
        for at, metrics in enumerate(trial.metrics)
    ]
