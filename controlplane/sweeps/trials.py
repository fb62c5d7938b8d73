"""What a searcher knows of configurations, and what it may ask for.

What the units of an epoch reported, put together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from schemas.sweeps import SearchSpec, Values

Ending = Literal["", "done", "stopped", "failed", "graduated"]


@dataclass(frozen=True, slots=True)
class Trial:
    """One configuration and how it fared."""

    number: int  # in the order of adding, from 0
    values: Values
    granted: int  # epochs that it may train to
    scores: tuple[float, ...] = ()  # after each epoch that it trained; larger is better
    ended: Ending = ""  # why it trains no further; empty: it may
    parent: int | None = None  # whose state it began with
    began_at: int = 0  # epochs that this state had

    @property
    def epochs(self) -> int:
        """That its state has been through, those of its parent too."""
        return self.began_at + len(self.scores)

    @property
    def waits(self) -> bool:
        """Whether it has trained as far as it may, and might train further."""
        return not self.ended and self.epochs >= self.granted

    def score_after(self, epochs: int) -> float | None:
        """Its score after so many epochs; None if it has none."""
        at = epochs - self.began_at - 1
        return self.scores[at] if 0 <= at < len(self.scores) else None


@dataclass(frozen=True, slots=True)
class Add:
    """Try a new configuration."""

    values: Values
    epochs: int  # that it may train to
    parent: int | None = None  # trial whose state it begins with, as that is now; None: afresh
    began_at: int | None = None  # epochs that this state had; None: those the parent has scores of


@dataclass(frozen=True, slots=True)
class Grant:
    """Let a trial train on."""

    trial: int
    epochs: int  # that it may train to, counted from the first


@dataclass(frozen=True, slots=True)
class Stop:
    """End a trial; its user reads why."""

    trial: int
    why: str


Decision = Add | Grant | Stop


def best(trials: Iterable[Trial]) -> tuple[int, int] | None:
    """The number of the best trial and the epoch after which it was so; None: nobody has a score.

    Args:
        trials: of one sweep; among equals the earliest epoch, then the first trial wins.
    """
    found = min(
        (
            (-score, trial.began_at + at, trial.number)
            for trial in trials
            for at, score in enumerate(trial.scores, start=1)
        ),
        default=None,
    )
    return None if found is None else (found[2], found[1])


def ranked(trials: Sequence[Trial], epochs: int) -> list[Trial]:
    """Those that have a score after so many epochs, the best first; among equals in order.

    Args:
        epochs: from 1.
    """
    scored = [(trial.score_after(epochs), trial) for trial in trials]
    known = [(score, trial) for score, trial in scored if score is not None]
    return [trial for _, trial in sorted(known, key=lambda one: (-one[0], one[1].number))]


def apply(trials: Sequence[Trial], decisions: Iterable[Decision]) -> list[Trial]:
    """The trials after these decisions.

    Args:
        trials: in order of their numbers.
    """
    after = list(trials)
    for one in decisions:
        match one:
            case Add(values, epochs, parent, began_at):
                if began_at is None:
                    began_at = 0 if parent is None else after[parent].epochs
                new = Trial(len(after), values, epochs, parent=parent, began_at=began_at)
                after.append(new)
            case Grant(number, epochs):
                after[number] = _changed(after[number], granted=epochs)
            case Stop(number, _):
                after[number] = _changed(after[number], ended="stopped")
    return after


def with_score(trial: Trial, score: float, last_epoch: int) -> Trial:
    """The trial after one more epoch.

    Args:
        score: larger is better; NaN or infinite: it failed.
    """
    if not math.isfinite(score):
        return _changed(trial, ended="failed")
    after = _changed(trial, scores=(*trial.scores, score))
    return _changed(after, ended="done") if after.epochs >= last_epoch else after


def failed(trial: Trial) -> Trial:
    """The trial after it failed."""
    return _changed(trial, ended="failed")


def graduated(trial: Trial) -> Trial:
    """The trial after it went on as a job of its own."""
    return _changed(trial, ended="graduated")


def with_later_score(trial: Trial, score: float) -> Trial:
    """A trial that graduated, after one more epoch.

    Args:
        score: larger is better; one that is not finite is left out.
    """
    return _changed(trial, scores=(*trial.scores, score)) if math.isfinite(score) else trial


def _changed(
    trial: Trial,
    granted: int | None = None,
    scores: tuple[float, ...] | None = None,
    ended: Ending | None = None,
) -> Trial:
    return Trial(
        number=trial.number,
        values=trial.values,
        granted=trial.granted if granted is None else granted,
        scores=trial.scores if scores is None else scores,
        ended=trial.ended if ended is None else ended,
        parent=trial.parent,
        began_at=trial.began_at,
    )


def merged(parts: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """Metrics over all partitions, each weighted by its samples.

    Args:
        parts: metrics of units, and the samples that they count for; a metric that some do not
            have is the mean of the others.
    """
    names = dict.fromkeys(name for metrics, _ in parts for name in metrics)
    found: dict[str, float] = {}
    for name in names:
        having = [(metrics[name], samples) for metrics, samples in parts if name in metrics]
        found[name] = _mean(having)
    return found


def _mean(having: Sequence[tuple[float, int]]) -> float:
    """NaN of nothing, and of infinities of both signs; values may be as large as there are."""
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
    """How good an epoch was, larger is better, and what is wrong if it is not finite.

    Args:
        spec: which metric counts, and which way.
        metrics: of the epoch; those of the evaluation go before those of training.
    """
    value = metrics.get(spec.metric)
    if value is None:
        known = ", ".join(sorted(metrics)) or "nothing"
        return math.nan, f"no unit reported {spec.metric!r}, only {known}: return it from eval_fn"
    if not math.isfinite(value):
        return math.nan, f"{spec.metric} is {value}"
    return (value if spec.mode == "max" else -value), ""
