"""How many examples a property gets, and how much of a load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import settings

T = TypeVar("T")
FULL = 100  # hypothesis' own number, which is that of the profile `full`


def examples(count: int) -> int:
    """`count` in the profile `full`, its part in a smaller one."""
    assert settings.default is not None
    return max(1, count * settings.default.max_examples // FULL)


def part(cases: Sequence[T]) -> Sequence[T]:
    """All of `cases` in the profile `full`, the first of them in a smaller one.

    For cases of one kind, of which the first goes red where the others do.
    """
    return cases[: examples(len(cases))]
