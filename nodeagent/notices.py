"""Notices that this node will go away: a file that a cloud's agent writes, or the agent's TERM."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Final

from nodeagent.errors import log_errors
from nodeagent.settings import Notice
from schemas.wire.agent import MAX_NOTICE_S, NodeNoticed

LOOK_INTERVAL_S: Final = 1.0
MAX_FILE_BYTES: Final = 100


class NoticeWatch:
    """Watch for the notice file. Each appearance of the file is one notice."""

    def __init__(
        self, settings: Callable[[], Notice], home: Path, report: Callable[[NodeNoticed], None]
    ) -> None:
        self._settings = settings
        self._home = home
        self._report = report
        self._seen = False

    async def run(self) -> None:
        """Look for the file until cancelled."""
        while True:
            with log_errors("notice file"):
                self.look()
            await asyncio.sleep(LOOK_INTERVAL_S)

    def look(self) -> None:
        """Report the file if it has appeared. It may contain the seconds that are left."""
        settings = self._settings()
        path = self._home / settings.file
        if not settings.file or not path.is_file():
            self._seen = False
        elif not self._seen:
            self._seen = True
            within_s = _seconds_in(path, settings.seconds)
            self._report(NodeNoticed(within_s=within_s, reason=f"{settings.file} appeared"))


def _seconds_in(path: Path, default: float) -> float:
    try:
        with path.open("rb") as file:
            found = float(file.read(MAX_FILE_BYTES))
    except (OSError, ValueError):
        return default
    return min(max(0.0, found), MAX_NOTICE_S) if math.isfinite(found) else default
