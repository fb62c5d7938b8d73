"""Moments, durations and sizes as people write them."""

from __future__ import annotations

import datetime as dt

from schemas.ids import LAST

MINUTE_S = 60
HOUR_S = 3600


def moment(time_s: float) -> str:
    """Format seconds since the epoch as ISO 8601 in UTC; times outside the calendar are clamped."""
    shown = dt.datetime.fromtimestamp(min(max(0.0, time_s), LAST), dt.UTC)
    return shown.isoformat(timespec="milliseconds")


def second(time_s: float) -> str:
    """Format seconds since the epoch as ISO 8601 in UTC, without fractions."""
    return f"{moment(time_s)[:19]}Z"


def byte_count(size: int) -> str:
    """Format a number of bytes, 0 or more, with decimal units: 1 kB is 1000 B."""
    amount, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 999.5:  # noqa: PLR2004 - larger amounts round to 1000
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 10 else f"{amount:.1f} {unit}"  # noqa: PLR2004


def span(seconds: float) -> str:
    """Format a duration in seconds for people, such as `4.2s`, `5m03s` or `2h07m`."""
    whole = int(seconds)
    if whole < MINUTE_S:
        return f"{seconds:.1f}s"
    if whole < HOUR_S:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
