"""Long computations that an event loop does a few milliseconds at a time.

Such a computation is a generator. It yields wherever it may pause, and returns its result.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Turns = Generator[None, None, T]


def at_once(work: Turns[T]) -> T:
    """Return the result of a computation, without a pause."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
