"""Checks that the options of several policies share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from schemas.errors import SettingsError

LEAST_ROUND_S: Final = 0.1  # between rounds


def refuse_below(options: Any, least: Mapping[str, float]) -> None:
    """Refuse numbers that are below their least or not finite.

    Raises:
        SettingsError: with the name of the first such option.
    """
    for name, low in least.items():
        value = getattr(options, name)
        if not math.isfinite(value):
            refuse(name, f"{value} is not finite", "give a number")
        if value < low:
            refuse(name, f"{value} is below {low}", "raise it")


def refuse_above(options: Any, most: Mapping[str, float]) -> None:
    """Refuse numbers that are above their most.

    Raises:
        SettingsError: with the name of the first such option.
    """
    for name, high in most.items():
        value = getattr(options, name)
        if value > high:
            refuse(name, f"{value} is above {high}", "lower it")


def refuse(name: str, what: str, remedy: str) -> None:
    """Refuse the value of an option.

    Raises:
        SettingsError: always.
    """
    field = f"policy.options.{name}"
    raise SettingsError(f"{field}: {what}", remedy, field)
