"""What a worker takes of its host, as it reports it, if that can be."""

from __future__ import annotations

import math
from typing import Final

from schemas.messages.agent import StepsReported

MOST_CORES: Final = 65_536.0
MOST_BYTES_PER_S: Final = 1e13


def believable_cores(steps: StepsReported) -> float | None:
    """Mean cores of a worker; None: not reported, or no number of cores."""
    return _within(steps.cpu_cores, MOST_CORES)


def believable_bytes(steps: StepsReported) -> float | None:
    """Bytes per second that a worker sends; None: not reported, or no such number."""
    return _within(steps.sent_bytes_per_s, MOST_BYTES_PER_S)


def unbelievable_usage(steps: StepsReported) -> str:
    """What is reported and dropped, in words; empty: nothing."""
    said = []
    if steps.cpu_cores is not None and believable_cores(steps) is None:
        said.append(f"cpu_cores {steps.cpu_cores:g} is not 0 to {MOST_CORES:g}")
    if steps.sent_bytes_per_s is not None and believable_bytes(steps) is None:
        said.append(f"sent_bytes_per_s {steps.sent_bytes_per_s:g} is not 0 to {MOST_BYTES_PER_S:g}")
    return "; ".join(said)


def _within(value: float | None, most: float) -> float | None:
    return value if value is not None and math.isfinite(value) and 0.0 <= value <= most else None
