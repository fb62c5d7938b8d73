"""How much work a job has left, as its relatives suggest it."""

from __future__ import annotations

from collections.abc import Sequence


def remaining_samples(
    done: float, stated: float | None, finished: Sequence[float], largest: float
) -> float:
    """Samples that a job will still process.

    Mean residual life of finished relatives; before one has finished, as much as was done already
    or what the furthest relative did. In a live cluster a stated number of epochs or samples *is*
    when a job ends, so nothing is averaged into it.

    Args:
        done: Y_processed, samples.
        stated: total that the user stated, samples; None if it depends on a metric.
        finished: totals of relatives that finished, samples.
        largest: furthest that any relative has come, samples.
    """
    if stated is not None:
        return max(0.0, stated - done)
    longer = [total for total in finished if total > done]
    if longer:
        return sum(longer) / len(longer) - done
    return max(2.0 * done, largest) - done
