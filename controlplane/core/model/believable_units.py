"""Reports of units and epochs within what can be: users' code runs where they come from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from schemas.epoch_metrics import are_bounded, bounded_metrics, printable
from schemas.messages.agent import AgentEvent, EpochReported, UnitBegun, UnitEnded

LONGEST_S: Final = 1e8  # three years
MOST_SAMPLES: Final = 2**40
MOST_BYTES: Final = 2**50
METRICS: Final = 100  # of a unit
NAME_CHARACTERS: Final = 100  # of a metric
DIGEST_CHARACTERS: Final = 64


def believable_begin(event: UnitBegun) -> UnitBegun:
    """The report with its numbers within bounds."""
    return msgspec.structs.replace(
        event,
        samples=_within(event.samples, MOST_SAMPLES),
        waited_s=_seconds(event.waited_s),
        staged_s=_seconds(event.staged_s),
    )


def believable_end(event: UnitEnded) -> UnitEnded:
    """The report with its numbers within bounds, and no more metrics than anybody reads.

    Args:
        event: as it came. Metrics may be NaN or infinite: their trial fails for it.
    """
    return msgspec.structs.replace(
        event,
        metrics=_metrics(event.metrics),
        samples=_within(event.samples, MOST_SAMPLES),
        seconds=_seconds(event.seconds),
        scores=_metrics(event.scores),
        digest=printable(event.digest[:DIGEST_CHARACTERS]),
        size=_within(event.size, MOST_BYTES),
    )


def believable_report(event: AgentEvent) -> AgentEvent:
    """The report with no more metrics of an epoch than a script may give, and finite ones only.

    Before it is an input: those of older journals stay as they are.

    Args:
        event: as it came; it is itself where there is nothing to leave out.
    """
    if not isinstance(event, EpochReported) or are_bounded(event.metrics):
        return event
    return msgspec.structs.replace(event, metrics=bounded_metrics(event.metrics))


def _within(number: int, most: int) -> int:
    return max(0, min(number, most))


def _seconds(given: float) -> float:
    return max(0.0, min(given, LONGEST_S)) if not math.isnan(given) else 0.0


def _metrics(given: Mapping[str, float]) -> dict[str, float]:
    return {printable(n[:NAME_CHARACTERS]): v for n, v in list(given.items())[:METRICS]}
