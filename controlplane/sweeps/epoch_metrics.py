"""What the units of an epoch reported, put together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from schemas.sweeps import SearchSpec


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
