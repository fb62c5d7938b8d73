"""A loop whose time passes when it is told so: for what counts and waits, and is no task."""

from __future__ import annotations

from collections.abc import Callable


class Clock:
    """What such code asks of a loop: the time, and to be called back."""

    def __init__(self) -> None:
        self.now = 100.0
        self._calls: list[tuple[float, Clock.Call]] = []

    class Call:
        def __init__(self, call: Callable[[], None]) -> None:
            self.run: Callable[[], None] | None = call

        def cancel(self) -> None:
            self.run = None

    def later(self, wait_s: float, call: Callable[[], None]) -> Call:
        made = Clock.Call(call)
        self._calls.append((self.now + wait_s, made))
        return made

    def turn(self) -> None:
        """Everything that is due by now, once."""
        due = [made for at, made in self._calls if at <= self.now + 1e-9]
        self._calls = [(at, made) for at, made in self._calls if at > self.now + 1e-9]
        for made in due:
            if made.run is not None:
                made.run()

    def run(self, seconds: float = 0.0) -> None:
        """Turn after turn, until nothing is due within so many seconds."""
        end = self.now + seconds
        while waiting := [at for at, made in self._calls if made.run is not None and at <= end]:
            self.now = max(self.now, min(waiting))
            self.turn()
        self.now = end
