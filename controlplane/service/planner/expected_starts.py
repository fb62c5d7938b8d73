"""When a waiting job is expected to start, from now on: plans say it by the clock."""

from __future__ import annotations

from typing import Final

import msgspec

from controlplane.policy.api import Reason, StartForecast
from schemas.ids import Seconds

MINUTE_S: Final = 60.0
HOUR_S: Final = 3600.0
MANY: Final = 10.0  # minutes or hours, from which no decimal is said


def with_start(reason: Reason, start: StartForecast, now: Seconds) -> Reason:
    """Why a job waits, and for how long that is expected to last.

    Args:
        now: seconds since the epoch; what is past by then is expected at any moment.

    Returns:
        The reason with `start_s`, `start_earliest_s` and `start_latest_s` among its numbers,
        seconds from `now` on; four of five starts shall lie between the last two.
    """
    middle, low, high = (max(0.0, at - now) for at in (start.at, start.earliest, start.latest))
    numbers = {"start_s": middle, "start_earliest_s": low, "start_latest_s": high}
    if high <= 0.0:
        words = "expected to start at any moment"
    else:
        words = f"expected to start in {_about(middle)} (80%: {_about(low)} to {_about(high)})"
    return msgspec.structs.replace(
        reason, text=f"{reason.text}; {words}", numbers={**reason.numbers, **numbers}
    )


def _about(seconds: float) -> str:
    if seconds < MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < HOUR_S:
        return _rounded(seconds / MINUTE_S, "min")
    return _rounded(seconds / HOUR_S, "h")


def _rounded(value: float, unit: str) -> str:
    return f"{value:.0f} {unit}" if value >= MANY else f"{value:.1f} {unit}"
