"""Trials, decisions of a searcher, and functions that merge an epoch's metrics and score them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from schemas.sweeps import SearchSpec, Values

Ending = Literal["", "done", "stopped", "failed", "graduated"]


@dataclass(frozen=True, slots=True)
class Trial:
    """Configuration of a search, with its scores."""

    number: int  # in order of addition, from 0
    values: Values
    granted: int  # number of epochs to which the trial may train
    scores: tuple[float, ...] = ()  # after each of its own epochs; larger is better
    ended: Ending = ""  # how the trial ended; empty: it has not ended
    parent: int | None = None  # trial that provided the initial state
    start_epochs: int = 0  # epochs of the initial state

    @property
    def epochs(self) -> int:
        """Number of epochs that led to the trial's state, including the parent's epochs."""
        return self.start_epochs + len(self.scores)

    @property
    def waits(self) -> bool:
        """True if the trial has trained all granted epochs, and might train further."""
        return not self.ended and self.epochs >= self.granted

    def score_after(self, epochs: int) -> float | None:
        """Return the score after `epochs` epochs, or None if the trial has no such score."""
        at = epochs - self.start_epochs - 1
        return self.scores[at] if 0 <= at < len(self.scores) else None


@dataclass(frozen=True, slots=True)
class Add:
    """Add a trial."""

    values: Values
    epochs: int  # number of epochs to which the trial may train
    parent: int | None = None  # trial that provides the initial state; None: a new state
    start_epochs: int | None = None  # epochs of the initial state; None: the parent's scored epochs


@dataclass(frozen=True, slots=True)
class Grant:
    """Let a trial train up to a later epoch."""

    trial: int
    epochs: int  # number of epochs to which the trial may train, from its first


@dataclass(frozen=True, slots=True)
class Stop:
    """End a trial; the reason is shown to its user."""

    trial: int
    reason: str


Decision = Add | Grant | Stop


def best(trials: Iterable[Trial]) -> tuple[int, int] | None:
    """Return trial number and epoch of the best score, or None without scores.

    Among equal scores the earliest epoch is the best, then the lowest number.
    """
    found = min(
        (
            (-score, trial.start_epochs + at, trial.number)
            for trial in trials
            for at, score in enumerate(trial.scores, start=1)
        ),
        default=None,
    )
    return None if found is None else (found[2], found[1])


def ranked(trials: Sequence[Trial], epochs: int) -> list[Trial]:
    """Return the trials with a score after `epochs` epochs, best first; lower numbers win ties."""
    scored = [(trial.score_after(epochs), trial) for trial in trials]
    known = [(score, trial) for score, trial in scored if score is not None]
    return [trial for _, trial in sorted(known, key=lambda one: (-one[0], one[1].number))]


def apply(trials: Sequence[Trial], decisions: Iterable[Decision]) -> list[Trial]:
    """Return the trials after these decisions."""
    after = list(trials)
    for one in decisions:
        match one:
            case Add(values, epochs, parent, began_at):
                if began_at is None:
                    began_at = 0 if parent is None else after[parent].epochs
                new = Trial(len(after), values, epochs, parent=parent, start_epochs=began_at)
                after.append(new)
            case Grant(number, epochs):
                after[number] = replace(after[number], granted=epochs)
            case Stop(number, _):
                after[number] = replace(after[number], ended="stopped")
    return after


def with_score(trial: Trial, score: float, last_epoch: int) -> Trial:
    """Return the trial after another epoch: failed without a finite score, done at `last_epoch`."""
    if not math.isfinite(score):
        return replace(trial, ended="failed")
    after = replace(trial, scores=(*trial.scores, score))
    return replace(after, ended="done") if after.epochs >= last_epoch else after


def merged(parts: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """Return the mean of each metric, weighted by samples, over the units that report it."""
    names = dict.fromkeys(name for metrics, _ in parts for name in metrics)
    return {
        name: _mean([(metrics[name], samples) for metrics, samples in parts if name in metrics])
        for name in names
    }


def _mean(having: Sequence[tuple[float, int]]) -> float:
    """Return the weighted mean without overflow, or NaN for no samples or opposite infinities."""
    weight = sum(samples for _, samples in having)
    if not weight:
        return math.nan
    try:
        return math.fsum(value * samples for value, samples in having) / weight
    except OverflowError:
        return sum(value * (samples / weight) for value, samples in having)
    except ValueError:
        return math.nan


def score(spec: SearchSpec, metrics: Mapping[str, float]) -> tuple[float, str]:
    """Return the score of an epoch (larger is better), and a problem text if it is not finite.

    In `metrics`, metrics of the evaluation take precedence over metrics of the training.
    """
    value = metrics.get(spec.metric)
    if value is None:
        known = ", ".join(sorted(metrics)) or "nothing"
        problem = f"no unit reported metric {spec.metric!r} (reported: {known})"
        return math.nan, f"{problem}; return it from eval_fn"
    if not math.isfinite(value):
        return math.nan, f"metric {spec.metric} is {value}, not a finite number"
    return (value if spec.mode == "max" else -value), ""
