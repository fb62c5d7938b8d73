"""Until when a reply may be held back."""

from __future__ import annotations

import asyncio
import math
from typing import Final

from schemas.errors import BadFieldError

MAX_WAIT_S: Final = 30.0


def deadline_of(wait_s: float) -> float:
    """When a request that may wait has to be answered.

    Args:
        wait_s: seconds that it asked for; `MAX_WAIT_S` at most, none if it is negative.

    Returns:
        Seconds of the running loop's clock.

    Raises:
        BadFieldError: if it is no number, which would never be over.
    """
    if math.isnan(wait_s):
        raise BadFieldError("wait_s: nan is no time", "give seconds, 0 or more", "wait_s")
    return asyncio.get_running_loop().time() + min(wait_s, MAX_WAIT_S)
