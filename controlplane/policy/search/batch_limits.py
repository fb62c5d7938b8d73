"""R: the largest batch that a job may have at the moment (ONES section 3.3.2).

Start needs no formula: until a few warm-up steps are done a job has its least slots, and no more
samples than those can hold.

The paper does not say when scale-up holds and when scale-down does. `ScaleDown` are its readings:

- `literal`: scale-down after every epoch. R never grows, because the divisor is at least 2 for
  every T > 0.
- `contended`: scale-down for jobs that ran longer than 1 / lambda, while others wait, and else
  scale-up.
- `composed`: one after the other, ceil(4R / ceil(sigma T + 1)), which doubles up to T = 1 / lambda
  and shrinks after 3 / lambda.
- `authors`: scale-up to four times the first batch.
- `off`: scale-up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

ScaleDown = Literal["literal", "contended", "composed", "authors", "off"]
AUTHORS_CAP: Final = 4  # times the first batch, in the code that the paper's authors published


@dataclass(frozen=True, slots=True)
class LimitBounds:
    """What R stays within, in samples per step."""

    first: int  # the batch that the job began with
    least: int  # R is never below this
    most: int  # what its user allows

    def clip(self, limit: float) -> int:
        """`limit`, rounded up and brought between the two.

        Args:
            limit: samples per step.
        """
        return max(self.least, min(math.ceil(limit), self.most))


def resumed(limit: int, bounds: LimitBounds) -> int:
    """Resume: halved when the job is rejected, i.e. waits in the next schedule as well.

    Args:
        limit: R, samples per step.
    """
    return bounds.clip(limit // 2)


def after_epoch(
    limit: int,
    bounds: LimitBounds,
    reading: ScaleDown,
    *,
    ran_s: float,
    arrivals_per_s: float,
    contended: bool,
    gradual: bool = False,
) -> int:
    """R of a running job after an epoch, or after a report interval of a long one.

    Scale-up is R' = 2R; scale-down is R' = ceil(2R / ceil(sigma T + 1)) for a job "with long
    elapsed time", with sigma = lambda; which one holds when is a reading (see above).

    None but `literal` more than halves R at once: the paper lets no batch change by more than a
    limited range.

    Args:
        limit: R, samples per step.
        ran_s: T_processed, seconds.
        arrivals_per_s: lambda, jobs per second.
        gradual: whether that holds for `literal` too, and R doubles where the divisor is 1.

    Returns:
        R', samples per step, within `bounds`.
    """
    divisor = math.ceil(arrivals_per_s * ran_s + 1.0)
    new: float
    match reading:
        case "literal":
            new = 2 * limit / max(1 if gradual else 2, divisor)
        case "contended":
            long = contended and arrivals_per_s * ran_s > 1.0
            new = 2 * limit / divisor if long else 2 * limit
        case "composed":
            new = min(4 * limit / divisor, 2 * limit)
        case "authors":
            new = min(2 * limit, AUTHORS_CAP * bounds.first)
        case "off":
            new = 2 * limit
    if gradual or reading in {"contended", "composed"}:
        new = max(new, limit / 2)
    return bounds.clip(new)
