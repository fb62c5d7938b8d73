"""How fast a job goes, how far it is, and when it is done."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from elastic.training_errors import MissingMetricError
from schemas.jobs import StopRule

WINDOW_S: Final = 2.0
LEAST_S: Final = 0.5  # of a first window that is not complete


class StopState(msgspec.Struct, kw_only=True):
    """What a stop rule has to remember between epochs; part of every checkpoint."""

    in_a_row: int = 0  # epochs at or above `at_least`
    best: float | None = None
    since_best: int = 0  # epochs without an increase


def stop_reason(
    rule: StopRule, state: StopState, epoch: int, samples: int, metrics: Mapping[str, float]
) -> str:
    """Take in a finished epoch; why the job is done, or nothing.

    Args:
        rule: what the user asked for.
        state: updated in place.
        epoch: finished, 1-based.
        samples: done since the job began.
        metrics: what the script reported for this epoch.

    Raises:
        MissingMetricError: if the rule's metric was not reported.
    """
    if rule.metric is not None:
        reason = _metric_reason(rule, state, metrics)
        if reason:
            return reason
    if rule.epochs is not None and epoch >= rule.epochs:
        return f"all {rule.epochs} epochs are done"
    if rule.samples is not None and samples >= rule.samples:
        return f"all {rule.samples} samples are done"
    return ""


def _metric_reason(rule: StopRule, state: StopState, metrics: Mapping[str, float]) -> str:
    metric = rule.metric or ""
    if metric not in metrics:
        raise MissingMetricError(metric, tuple(metrics))
    value = metrics[metric]
    if rule.at_least is not None:
        state.in_a_row = state.in_a_row + 1 if value >= rule.at_least else 0
        if state.in_a_row >= rule.consecutive:
            often = f" for {rule.consecutive} epochs in a row" if rule.consecutive > 1 else ""
            return f"{metric} {value:.4g} is at least {rule.at_least:g}{often}"
        return ""
    grew = not math.isnan(value) and (state.best is None or value > state.best)
    state.best = value if grew else state.best
    state.since_best = 0 if grew else state.since_best + 1
    if rule.plateau is not None and state.since_best >= rule.plateau:
        return f"{metric} has not grown for {rule.plateau} epochs, best {state.best}"
    return ""


class Speed:
    """Samples per second, over a short window and over the epoch; time comes in from outside."""

    def __init__(self, now: float) -> None:
        self._epoch_began = now
        self._epoch_samples = 0
        self._mark, self._marked_samples = now, 0
        self._recent = 0.0

    def add(self, samples: int, now: float) -> None:
        """A step over `samples` ended at `now` (seconds, any origin)."""
        self._epoch_samples += samples
        self._marked_samples += samples
        elapsed = now - self._mark
        if elapsed >= WINDOW_S:
            self._recent = self._marked_samples / elapsed
            self._mark, self._marked_samples = now, 0

    def regroup(self, now: float) -> None:
        """Another group goes on: what was measured before tells nothing of it."""
        self._mark, self._marked_samples, self._recent = now, 0, 0.0

    def recent(self, now: float) -> float:
        """Samples per second of late, in the present group; 0.0 when it has only just begun."""
        if self._recent:
            return self._recent
        elapsed = now - self._mark
        return self._marked_samples / elapsed if elapsed >= LEAST_S else 0.0

    def of_epoch(self, now: float) -> tuple[float, float]:
        """Samples per second over the epoch so far, and its seconds."""
        seconds = max(now - self._epoch_began, 1e-9)
        return self._epoch_samples / seconds, seconds

    def begin_epoch(self, now: float) -> None:
        """The next epoch begins."""
        self._epoch_began, self._epoch_samples = now, 0
