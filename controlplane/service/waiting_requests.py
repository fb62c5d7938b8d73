"""Requests that wait for something to happen: they end with the key of whoever asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from controlplane.service.role_permissions import REVOKED
from schemas.errors import DeniedError
from schemas.link import Incoming


class WaitingRequests:
    """Those of one port, each in a task of its own."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[object], Incoming] = {}

    @contextlib.contextmanager
    def held(self, incoming: Incoming, wait_s: float) -> Iterator[None]:
        """The running task answers a request, and may wait with that.

        Args:
            incoming: what was said, and with which key.
            wait_s: for how long; a request that does not wait is never ended half done.

        Raises:
            DeniedError: if the key was taken away meanwhile.
        """
        task = asyncio.current_task()
        if task is None or not wait_s > 0.0:
            yield
            return
        self._tasks[task] = incoming
        try:
            yield
        except asyncio.CancelledError:
            if task in self._tasks:  # it was not `end_revoked`
                raise
            task.uncancel()
            raise DeniedError(*REVOKED) from None
        finally:
            self._tasks.pop(task, None)

    def end_revoked(self) -> None:
        """Those whose keys are not authorised any more are answered now."""
        for task, incoming in list(self._tasks.items()):
            if incoming.revoked:
                del self._tasks[task]
                task.cancel()
