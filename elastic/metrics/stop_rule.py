"""When a job is done."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from elastic.training_errors import MissingMetricError
from schemas.jobs import StopRule


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
        state: updated in place.
        epoch: finished, 1-based.
        metrics: what the script reported for this epoch.

    Raises:
        MissingMetricError: if the rule's metric was not reported.
    """
    if rule.metric is not None:
        reason = _metric_reason(rule, state, metrics)
        if reason:
            return reason
    if rule.epochs is not None and epoch >= rule.epochs:
        return f"all {rule.epochs} epochs are done" if rule.epochs > 1 else "its epoch is done"
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


def describe_rule(rule: StopRule) -> str:
    """What a rule says, in the words of a job file.

    Args:
        rule: its fields that are None are left out, and so is a `consecutive` that says
            nothing.
    """
    fields = {k: v for k, v in msgspec.to_builtins(rule).items() if v is not None}
    if rule.metric is None or rule.consecutive == 1:
        fields.pop("consecutive", None)
    return ", ".join(f"{key} {value}" for key, value in fields.items())
