"""Tasks that run for as long as their daemon does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import structlog

log = structlog.get_logger("tasks")
PAUSE_S: Final = 1.0


async def supervised(
    name: str,
    work: Callable[[], Coroutine[Any, Any, None]],
    is_fatal: Callable[[], bool] = lambda: False,
) -> None:
    """Run `work` until it returns; log a failure, and start `work` again after a second.

    Args:
        name: names the task in the log.
        is_fatal: called after a failure; if it returns True, the failure ends the daemon.
    """
    while True:
        try:
            return await work()
        except Exception:
            if is_fatal():
                raise
            log.exception("task failed, starting it again", task=name)
        await asyncio.sleep(PAUSE_S)
