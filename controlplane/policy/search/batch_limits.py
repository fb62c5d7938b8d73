"""Batch limit R: the largest batch that a job may have at present (ONES section 3.3.2).

The start rule needs no formula: until a few warm-up steps are done, a job has its least slots and
no more samples than they can hold.

The paper does not say when to apply scale-up and when scale-down. `ScaleDown` lists the readings:

- `literal`: scale-down after every epoch. R never grows, because the divisor is at least 2 for
  every T > 0.
- `contended`: scale-down for jobs that ran longer than 1 / lambda while other jobs wait, otherwise
  scale-up.
- `composed`: scale-up, then scale-down: ceil(4R / ceil(sigma T + 1)). R doubles up to T = 1 /
  lambda and shrinks after 3 / lambda.
- `authors`: scale-up to four times the first batch.
- `off`: scale-up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

ScaleDown = Literal["literal", "contended", "composed", "authors", "off"]
AUTHORS_CAP: Final = 4  # multiple of the first batch, in the code published by the paper's authors


@dataclass(frozen=True, slots=True)
class LimitBounds:
    """Bounds of R, in samples per step."""

    first: int  # first batch of the job
    least: int  # lower bound of R
    most: int  # limit by the user

    def clip(self, limit: float) -> int:
        """Round `limit` up and clamp it to the bounds."""
        return max(self.least, min(math.ceil(limit), self.most))


def resumed(limit: int, bounds: LimitBounds) -> int:
    """Return half of R (Resume): the job was rejected, i.e. the next schedule leaves it waiting."""
    return bounds.clip(limit // 2)


def after_epoch(
    limit: int,
    bounds: LimitBounds,
    reading: ScaleDown,
    *,
    ran_s: float,
    arrivals_per_s: float,
    contended: bool,
) -> int:
    """Return R of a running job after an epoch, or after a report interval of a long epoch.

    Scale-up is R' = 2R; scale-down is R' = ceil(2R / ceil(sigma T + 1)) for a job "with long
    elapsed time", with sigma = lambda. `reading` decides which of them applies (see the module).

    All readings except `literal` at most halve R at once: the paper lets no batch change by more
    than a limited range.

    Args:
        limit: R, samples per step.
        ran_s: T_processed, seconds.
        arrivals_per_s: lambda, jobs per second.
    """
    divisor = math.ceil(arrivals_per_s * ran_s + 1.0)
    new: float
    match reading:
        case "literal":
            new = 2 * limit / max(2, divisor)
        case "contended":
            long = contended and arrivals_per_s * ran_s > 1.0
            new = 2 * limit / divisor if long else 2 * limit
        case "composed":
            new = min(4 * limit / divisor, 2 * limit)
        case "authors":
            new = min(2 * limit, AUTHORS_CAP * bounds.first)
        case "off":
            new = 2 * limit
    if reading in {"contended", "composed"}:
        new = max(new, limit / 2)
    return bounds.clip(new)
