"""A sweep as rows: its trials, and every epoch of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from schemas.wire.client import SweepDetail, TrialInfo

DELETED: Final = "deleted"


class Best(NamedTuple):
    """The best epoch of the best trial."""

    trial: TrialInfo
    score: float  # as it was reported
    epoch: int  # after which it was so; a parent's epochs count


def best_of(detail: SweepDetail) -> Best | None:
    """The best trial of a sweep, as the controller says; None: nobody has a score.

    Args:
        detail: with all trials.
    """
    if detail.best is None or detail.best >= len(detail.trials):
        return None
    return best_epoch(detail.trials[detail.best])


def best_epoch(trial: TrialInfo) -> Best | None:
    """The best epoch of one trial; None: it has no score."""
    if trial.best_score is None:
        return None
    return Best(trial, trial.best_score, trial.best_epoch)


def ranked(detail: SweepDetail) -> list[TrialInfo]:
    """Trials, the best first; those without a score after them, then deleted ones.

    Args:
        detail: with all trials.
    """
    sign = 1.0 if detail.spec.search.mode == "max" else -1.0

    def place(trial: TrialInfo) -> tuple[bool, float, int]:
        found = best_epoch(trial)
        score = math.inf if found is None else -sign * found.score
        return trial.state == DELETED, score, trial.number

    return sorted(detail.trials, key=place)


def trial_row(trial: TrialInfo) -> dict[str, Any]:
    """A trial, flat: its values as `config.NAME`, its best score, and where it is."""
    found = best_epoch(trial)
    last = trial.metrics[-1] if trial.metrics else {}
    return {
        "trial": trial.number,
        "parent": trial.parent,
        **{f"config.{name}": value for name, value in trial.values.items()},
        "state": trial.state,
        "why": trial.why,
        "epochs": trial.epochs,
        "granted": trial.granted,
        "partition": trial.partition,
        "slot": trial.slot,
        "best": None if found is None else found.score,
        "best_epoch": None if found is None else found.epoch,
        **last,
    }


def epoch_rows(detail: SweepDetail, trials: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Every epoch of every trial, flat; a copy's begin where its parent was left.

    Args:
        detail: with all trials.
        trials: only these; none: all.
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
