"""What sizes are worth: V = weight (x c)^0.8, and what stalls, moves and waiting make of it."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from controlplane.policy.ones.options import OnesOptions
from controlplane.policy.ones.size_table import SizeTable
from controlplane.prediction.array_types import FloatArray

# Without any price of a change (this, and `change_margin`) jobs take 16% longer on average
# (docs/evolution.md, "Each term"); the three numbers are those of the prototype, never tuned alone.
STALL_WEIGHT: Final = 2.5
STALL_FROM_S, STALL_TO_S = 10.0, 900.0
LEAST_SHARE: Final = 0.05  # of its value, that a change leaves of a job at worst: it stays above 0
UNKNOWN_S: Final = 60.0  # remaining time when nobody can tell any job's: all weigh the same
LEAST_GAIN: Final = 1e-9  # divisor where a size has no goodput


def remaining_s(samples: float | None, one_speed: float, *, known: bool) -> float:
    """T1: seconds that `samples` still take on one slot; nan if nobody can say.

    Args:
        samples: that are left; None: unknown.
        one_speed: goodput of the best batch on one slot, samples per second.
        known: whether that is in seconds.
    """
    if samples is None or not known or one_speed <= 0:
        return math.nan
    return samples / one_speed


def kept_share(
    table: SizeTable, one_s: float, stall_s: float, margin: float, now_slots: int
) -> FloatArray:
    """C: what is left of a job's value after the change to each size; 1 without a change.

    1 - 2.5 stall / clamp(T(n), 10 s, 900 s), less a margin, so that nothing is moved for nothing.

    Args:
        one_s: T1, seconds that are left on one slot.
        stall_s: what the change costs, seconds.
        margin: least share that a change takes away.
        now_slots: its present size; 0: it waits.

    Returns:
        Shape (L,), in [`LEAST_SHARE`, 1].
    """
    left_s = one_s / np.maximum(table.gains, LEAST_GAIN)
    share = stall_share(left_s, stall_s, margin)
    return np.where(table.sizes == now_slots, 1.0, share)


def stall_share(left_s: FloatArray, stall_s: float, margin: float) -> FloatArray:
    """What is left of a value after a stall, with so many seconds to go; shape of `left_s`.

    Args:
        left_s: seconds to go, any shape.
        stall_s: seconds.
        margin: least share that a change takes away.
    """
    lost = STALL_WEIGHT * stall_s / np.clip(left_s, STALL_FROM_S, STALL_TO_S)
    return np.asarray(np.maximum(1.0 - np.maximum(lost, margin), LEAST_SHARE))


def left_after(left_s: float, stall_s: float, margin: float) -> float:
    """`stall_share` of one number.

    Args:
        left_s: seconds to go.
        stall_s: seconds.
        margin: least share that a change takes away.
    """
    lost = STALL_WEIGHT * stall_s / min(max(left_s, STALL_FROM_S), STALL_TO_S)
    return max(1.0 - max(lost, margin), LEAST_SHARE)


def values(gains: FloatArray, weight: FloatArray, options: OnesOptions) -> FloatArray:
    """V(n) = weight (x(n) c(n))^0.8, for gains x c: what each size is worth.

    Paper: minimise the sum over *running* jobs of T c (eq. 3, 8), which rewards leaving jobs out.
    Here: maximise a sum over all jobs, in which waiting is worth nothing. Two exponents, one on
    length (in `weight`), one on speed-up.

    Args:
        gains: x(n) c(n), shape (J, 1 + L).
        weight: shape (J, 1).

    Returns:
        V, shape of `gains`.
    """
    return np.asarray(weight * np.power(gains, options.speedup_exponent))


def weights(
    remaining: FloatArray,
    gains: FloatArray,
    waited: FloatArray,
    ran: FloatArray,
    options: OnesOptions,
) -> FloatArray:
    """(T1 + patience)^-0.55 for each job, times its response ratio^2; short ones weigh more.

    Unknown lengths count as half the median of the known ones. The patience is 300 s where jobs
    last hours, and never more than a quarter of their mean, so that seconds are told from minutes
    where jobs last minutes.

    The response ratio 1 + waited / (ran + T + patience), with T at the least size that a job may
    have, grows without bound while it waits, so that none starves behind a stream of short ones.

    Args:
        remaining: T1, shape (J,), seconds on one slot; nan where nobody can say.
        gains: x, shape (J,), of the least size of each job.
        waited: shape (J,), seconds without slots since the submission.
        ran: shape (J,), seconds with slots.
    """
    known = remaining[np.isfinite(remaining)]
    usual = float(np.median(known)) / 2.0 if len(known) else UNKNOWN_S
    length = np.where(np.isfinite(remaining), remaining, usual)
    patience = min(options.patience_s, float(np.mean(length)) / 4.0) if len(length) else 0.0
    short = np.power(np.maximum(length + patience, 1.0), -options.size_exponent)
    service = ran + length / np.maximum(gains, LEAST_GAIN) + patience
    response = 1.0 + waited / np.maximum(service, 1.0)
    return np.asarray(short * np.power(response, options.ageing))
