"""Numbers that a policy is told, within what can be: users and their scripts say them."""

from __future__ import annotations

import math
from typing import Any, Final, TypeVar

import msgspec

MOST: Final = 2**53  # of anything that is counted; beyond, neighbours are one number
LARGEST: Final = 1e15  # of anything that is measured

Told = TypeVar("Told", bound=msgspec.Struct)


def bounded(told: Told) -> Told:
    """What a policy is told, without numbers that no array or sum of it could hold.

    Args:
        told: of a job, or of something that happened.

    Returns:
        The same object where nothing is beyond its bound. NaN is left out where a field may be, and
        0 elsewhere.
    """
    changes: dict[str, Any] = {}
    for name in told.__struct_fields__:
        value = getattr(told, name)
        kind = type(value)
        if kind is int:
            if not -MOST <= value <= MOST:
                changes[name] = MOST if value > 0 else -MOST
        elif kind is float and not -LARGEST <= value <= LARGEST:
            changes[name] = _near(told, name, value)
    return msgspec.structs.replace(told, **changes) if changes else told


def _near(told: msgspec.Struct, name: str, value: float) -> float | None:
    if math.isnan(value):
        default = dict(
            zip(told.__struct_fields__[::-1], told.__struct_defaults__[::-1], strict=False)
        )
        return None if default.get(name, 0.0) is None else 0.0
    return math.copysign(LARGEST, value)
