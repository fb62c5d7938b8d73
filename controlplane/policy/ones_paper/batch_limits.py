"""R: the largest batch that a job may have at the moment (ONES section 3.3.2).

Start needs no formula: until a few warm-up steps are done a job has its least slots, and no more
samples than those can hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from controlplane.policy.ones_paper.options import ScaleDown

AUTHORS_CAP: Final = 4  # times the first batch, in the code that the authors published


@dataclass(frozen=True, slots=True)
class Bounds:
    """What R stays within, in samples per step."""

    first: int  # the batch that the job began with
    least: int  # R is never below this
    most: int  # what its user allows

    def clip(self, limit: float) -> int:
        """`limit`, rounded up and brought between the two."""
        return max(self.least, min(math.ceil(limit), self.most))


def resumed(limit: int, bounds: Bounds) -> int:
    """Resume: halved when the job is rejected, i.e. waits in the next schedule as well."""
    return bounds.clip(limit // 2)


def after_epoch(
    limit: int,
    bounds: Bounds,
    reading: ScaleDown,
    *,
    ran_s: float,
    arrivals_per_s: float,
    contended: bool,
) -> int:
    """R of a running job after an epoch.

    Scale-up is R' = 2R; scale-down is R' = ceil(2R / ceil(sigma T + 1)) for a job "with long
    elapsed time", with sigma = lambda. The paper does not say which one holds when.

    Args:
        limit: R, samples per step.
        bounds: of R.
        reading: `literal` is scale-down after every epoch: R never grows, because the divisor is
            at least 2 for every T > 0. `contended` is scale-down for jobs that ran longer than
            1 / lambda, while others wait, and else scale-up. `composed` is one after the other,
            ceil(4R / ceil(sigma T + 1)), which doubles up to T = 1 / lambda and shrinks after
            3 / lambda. Neither more than halves R at once: the paper lets no batch change by more
            than a limited range. `authors` is scale-up to four times the first batch; `off` is
            scale-up.
        ran_s: T_processed, seconds.
        arrivals_per_s: lambda.
        contended: whether a job waits.
    """
    divisor = math.ceil(arrivals_per_s * ran_s + 1.0)
    match reading:
        case "literal":
            new = 2 * limit / max(2, divisor)
        case "contended":
            long = contended and arrivals_per_s * ran_s > 1.0
            new = max(2 * limit / divisor, limit / 2) if long else 2 * limit
        case "composed":
            new = max(limit / 2, min(4 * limit / divisor, 2 * limit))
        case "authors":
            new = min(2 * limit, AUTHORS_CAP * bounds.first)
        case "off":
            new = 2 * limit
    return bounds.clip(new)
