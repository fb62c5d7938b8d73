"""How long a coroutine held the loop, without the time for which it waited."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopTime:
    """Counts seconds of the loop.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.busy_s = 0.0  # so far

    @coroutine
    def of(self, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """What `work` gives, awaited in its place.

        Args:
            work: not begun yet.
        """
        resume: Callable[[], Any] = partial(work.send, None)
        while True:
            began = self._clock()
            try:
                awaited = resume()
            except StopIteration as ended:
                result: T = ended.value
                return result
            finally:
                self.busy_s += self._clock() - began
            try:
                resume = partial(work.send, (yield awaited))
            except BaseException as error:  # noqa: BLE001 - a cancellation is its to handle
                resume = partial(work.throw, error)
