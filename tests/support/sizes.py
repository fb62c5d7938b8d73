"""How many examples a property gets, and how much of a load."""

from __future__ import annotations

from hypothesis import settings

FULL = 100  # hypothesis' own number, which is that of the profile `full`


def examples(count: int) -> int:
    """`count` in the profile `full`, its part in a smaller one."""
    return max(1, count * settings.default.max_examples // FULL)
