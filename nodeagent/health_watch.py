"""Looks whether this node can start workers, mends what it can, and says what it cannot."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import structlog

from nodeagent.folder_checks import Place
from schemas.errors import OnesError

log = structlog.get_logger("health")
LOOK_S: Final = 2.0
SHARED_LOOKS: Final = 10  # so many looks for each at a folder that all nodes share
ANSWER_S: Final = 20.0  # a file system that takes longer hangs


@dataclass(slots=True)
class _Look:
    """The one look at a place that is under way, and what the last one found."""

    place: Place
    every: int  # looks of the watch
    found: str = ""
    began: float | None = None
    ended: asyncio.Event | None = None


class HealthWatch:
    """Folders and the workers' socket, looked at again and again.

    Args:
        shared: those that all nodes use, which are looked at less often.
        listen: binds the socket again; raises an `OnesError` or `OSError` if it cannot.
        changed: takes what keeps the node from starting workers, whenever that is different.
    """

    def __init__(
        self,
        *,
        places: Sequence[Place],
        shared: Sequence[Place],
        socket: Path,
        listen: Callable[[], None],
        changed: Callable[[tuple[str, ...]], None],
    ) -> None:
        self._looks = [_Look(place, 1) for place in places]
        self._looks += [_Look(place, SHARED_LOOKS) for place in shared]
        self._socket = socket
        self._identity = _identity(socket)
        self._listen = listen
        self._changed = changed
        self._count = 0
        self.problems: tuple[str, ...] = ()

    def reserve(self, reserve_bytes: int) -> None:
        """Call a disk full at another limit from now on.

        Args:
            reserve_bytes: of room; that of sockets needs none.
        """
        for look in self._looks:
            if not look.place.own:
                look.place = replace(look.place, reserve_bytes=reserve_bytes)

    async def run(self) -> None:
        """Look, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look(everything=False)

    async def look(self, *, everything: bool = True) -> None:
        """Look once, and tell if something is different.

        Args:
            everything: also at what is looked at less often.
        """
        loop = asyncio.get_running_loop()
        due = [
            look for look in self._looks if everything or not self._count % look.every or look.found
        ]
        self._count += 1
        for look in due:
            if look.began is None:
                self._begin(look, loop)
        waits = [asyncio.ensure_future(look.ended.wait()) for look in due if look.ended]
        if waits:
            _, late = await asyncio.wait(waits, timeout=LOOK_S)
            for wait in late:
                wait.cancel()
        for look in due:
            if look.began is not None and loop.time() - look.began > ANSWER_S:
                look.found = look.place.silence
        found = {look.place.setting: look.found for look in reversed(self._looks) if look.found}
        self._take([*reversed(found.values()), self._mend_socket()])

    def _begin(self, look: _Look, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread of its own: a file system that hangs must hold up nothing else."""
        ended = look.ended = asyncio.Event()
        look.began = loop.time()

        def end(found: str) -> None:
            look.found, look.began = found, None
            ended.set()

        def work() -> None:
            found = look.place.problem(full=bool(look.found))
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(end, found)

        threading.Thread(target=work, name=f"look at {look.place.path}", daemon=True).start()

    def _mend_socket(self) -> str:
        """Listen anew if somebody deleted the socket, or put another in its place."""
        if self._identity is not None and _identity(self._socket) == self._identity:
            return ""
        try:
            self._listen()
        except (OnesError, OSError) as error:
            return f"run {self._socket}: workers cannot connect: {error}"
        self._identity = _identity(self._socket)
        log.warning("the workers' socket was gone, and is bound again", path=str(self._socket))
        return ""

    def _take(self, found: Sequence[str]) -> None:
        problems = tuple(dict.fromkeys(filter(None, found)))
        if problems == self.problems:
            return
        self.problems = problems
        if problems:
            log.error("this node cannot start workers", problems=problems)
        else:
            log.info("this node can start workers again")
        self._changed(problems)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116 - of what the name means now
    except OSError:
        return None
    return status.st_dev, status.st_ino
