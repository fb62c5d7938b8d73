"""Metrics of an epoch within the bounds that scripts are told of, whoever wrote them down."""

from __future__ import annotations

import math
from collections.abc import Mapping

from schemas.sweeps import MAX_EPOCH_METRICS, MAX_METRIC


def bounded_metrics(given: Mapping[str, float]) -> dict[str, float]:
    """The first that may be, the finite ones of them, under names that may be."""
    finite = {name: value for name, value in given.items() if math.isfinite(value)}
    kept = list(finite.items())[:MAX_EPOCH_METRICS]
    return {printable(name[:MAX_METRIC]): value for name, value in kept}


def are_bounded(given: Mapping[str, float]) -> bool:
    """Whether there is nothing to leave out."""
    return len(given) <= MAX_EPOCH_METRICS and all(
        len(name) <= MAX_METRIC and name.isprintable() and math.isfinite(value)
        for name, value in given.items()
    )


def printable(text: str) -> str:
    """The text in one line, without what would steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)
