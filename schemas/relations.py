"""Relations of a job to time, as texts of a job file."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

from schemas.errors import BadFieldError
from schemas.ids import Seconds

_DELAY: Final = re.compile(r"\+([0-9]{1,6}(?:\.[0-9]{1,3})?)([smhd])")
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
NOT_BEFORE_FORM: Final = "write 2026-12-01T08:00Z or +2h (s, m, h or d after the submission)"


def start_time(text: str, now: Seconds) -> Seconds:
    """Return the earliest start that `not_before` states, for a job that is submitted at `now`.

    Raises:
        BadFieldError: if the text is neither a time with its zone nor a delay.
    """
    if delay := _DELAY.fullmatch(text):
        return Seconds(now + float(delay[1]) * _UNITS[delay[2]])
    try:
        stated = datetime.fromisoformat(text)
    except ValueError:
        what = f"not_before: {text[:40]!r} is not a time"
        raise BadFieldError(what, NOT_BEFORE_FORM, "not_before") from None
    if stated.tzinfo is None:
        what = f"not_before: {text[:40]!r} has no time zone"
        raise BadFieldError(what, "append Z for UTC, or an offset such as +02:00", "not_before")
    try:
        return Seconds(stated.timestamp())
    except (OverflowError, ValueError):
        what = f"not_before: {text[:40]!r} is out of range"
        raise BadFieldError(what, NOT_BEFORE_FORM, "not_before") from None
