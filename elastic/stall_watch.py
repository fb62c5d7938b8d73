"""Detection of a training thread that finishes no step, and the line of the script where it is."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

import torch

from elastic.collectives import backend_protocol, process_group
from elastic.group.order_listener import OrderListener
from schemas.wire.agent import MAX_PLACE, STALL_INTERVAL_S, STALL_S

# A thread in one of these functions waits for other ranks, or for the group after a loss.
WAITS: Final = frozenset(
    function.__code__
    for function in (
        process_group._complete,  # noqa: SLF001
        backend_protocol.wait_for,
        OrderListener.await_recovery,
    )
)
_INSTALLED: Final = tuple(
    f"{folder}{os.sep}"
    for folder in (
        str(Path(__file__).parent),
        str(Path(torch.__file__).parent),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)
_PACKAGES: Final = frozenset({"site-packages", "dist-packages"})


class Stall(NamedTuple):
    """A look at a training thread that finishes no step, in seconds."""

    idle_s: float  # since the last step; 0: the stall is over
    waits_s: float | None  # for which the thread waits for its peers; None: it does not wait
    at: str  # line of the script; empty if the thread runs no code of the script


class StallWatch:
    """Watch over one thread, which another thread asks about once a second.

    Args:
        thread: identifier of the training thread.
        clock: monotonic seconds.
        frames: current frames by thread, as `sys._current_frames` returns them.
    """

    def __init__(
        self,
        thread: int,
        clock: Callable[[], float] = time.monotonic,
        frames: Callable[[], dict[int, FrameType]] = sys._current_frames,  # noqa: SLF001
    ) -> None:
        self._thread = thread
        self._clock = clock
        self._frames = frames
        self._home: Path | None = None
        with contextlib.suppress(OSError):  # if the script's working directory was deleted
            self._home = Path.cwd()
        self._last = (0, -1)  # group and step
        self._since = clock()  # when they were first seen
        self._waits_since: float | None = None
        self._reported: tuple[bool, bool] | None = None  # waits, has waited for `STALL_S`
        self._reported_at = 0.0

    def look(self, group: int, step: int) -> Stall | None:
        """Return what to report now, or None: not yet, not again, or there is no stall.

        A stall is reported after `STALL_S`, then every `STALL_INTERVAL_S`. A change is reported at
        once: the thread begins or ends to wait, has waited for `STALL_S`, or makes a step.
        """
        now = self._clock()
        if (group, step) != self._last:
            ended, self._reported = self._reported is not None, None
            self._last, self._since, self._waits_since = (group, step), now, None
            return Stall(0.0, None, "") if ended else None
        frame = self._frames().get(self._thread)
        if not is_waiting(frame):
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = now
        idle_s = now - self._since
        waits_s = None if self._waits_since is None else now - self._waits_since
        state = (waits_s is not None, waits_s is not None and waits_s >= STALL_S)
        again = state == self._reported and now - self._reported_at < STALL_INTERVAL_S
        if idle_s < STALL_S or again:
            return None
        self._reported, self._reported_at = state, now
        return Stall(idle_s, waits_s, script_place(frame, self._home))


def is_waiting(frame: FrameType | None) -> bool:
    """Return whether the innermost functions outside of the script wait for other ranks."""
    for each in _outwards(frame):
        if each.f_code in WAITS:
            return True
        if _is_script(each):
            return False
    return False


def script_place(frame: FrameType | None, home: Path | None = None) -> str:
    """Return the innermost line of the script as FILE:LINE in FUNCTION, or an empty text.

    The file is relative to `home`, if it is inside. Code of the library, of Python and of installed
    packages is skipped.
    """
    found = next(filter(_is_script, _outwards(frame)), None)
    if found is None:
        return ""
    path, function = Path(found.f_code.co_filename), found.f_code.co_qualname
    name = path.relative_to(home) if home is not None and path.is_relative_to(home) else path.name
    inside = "" if function == "<module>" else f" in {function}"
    return f"{name}:{found.f_lineno}{inside}"[:MAX_PLACE]


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_script(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    if name.startswith(("<", *_INSTALLED)):
        return False
    return _PACKAGES.isdisjoint(Path(name).parts)
