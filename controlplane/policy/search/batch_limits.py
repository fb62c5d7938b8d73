"""R: the largest batch that a job may have at the moment (ONES section 3.3.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ScaleDown = Literal["off", "literal", "contended", "composed"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a job's limit stays within, in samples per step."""

    first: int  # the batch that the job began with
    most: int  # what its user allows

    def clip(self, limit: int) -> int:
        """`limit`, brought between the two."""
        return max(self.first, min(limit, self.most))


def scaled_up(limit: int, bounds: Bounds) -> int:
    """Scale-up: R' = 2R after each epoch, or each report interval of a long one."""
    return bounds.clip(2 * limit)


def resumed(limit: int, bounds: Bounds) -> int:
    """Resume: halved each time that a plan leaves the job waiting, not below its first batch."""
    return bounds.clip(limit // 2)


def after_epoch(
    limit: int,
    bounds: Bounds,
    ran_s: float,
    arrivals_per_s: float,
    reading: ScaleDown,
    *,
    contended: bool,
) -> int:
    """R after an epoch of a job that has run for `ran_s`.

    Paper: R' = ceil(2R / ceil(sigma T + 1)) with sigma = lambda, and R' = 2R, without saying when
    which. `literal` takes the first always (it never grows: the divisor is at least 2); `contended`
    takes it only while others wait and the job has run longer than 1 / lambda; `composed` takes
    ceil(4R / ceil(sigma T + 1)); `off` only doubles. None changes R by more than 2x at once.
    """
    divisor = math.ceil(arrivals_per_s * ran_s + 1.0)
    doubled = scaled_up(limit, bounds)
    match reading:
        case "off":
            new = doubled
        case "literal":
            new = math.ceil(2 * limit / divisor)
        case "composed":
            new = math.ceil(4 * limit / divisor)
        case "contended":
            long = contended and arrivals_per_s * ran_s > 1.0
            new = math.ceil(2 * limit / divisor) if long else doubled
    return bounds.clip(max(math.ceil(limit / 2), min(new, doubled)))
