"""SIGHUP: a settings file is read again, and what may change while a daemon runs is taken over."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec
import structlog

from schemas.errors import OnesError
from schemas.logging_and_watchdog import notify
from schemas.toml_settings import reloaded

log = structlog.get_logger("settings")
S = TypeVar("S", bound=msgspec.Struct)


class SettingsReload(Generic[S]):
    """The settings of a running daemon.

    Args:
        load: reads the file again; raises a `SettingsError` if it is wrong.
        safe: fields that may change, each with what makes it so; given the new settings.
        always: done at each reload, as for files that the settings name.
    """

    def __init__(
        self,
        current: S,
        load: Callable[[], S],
        safe: Mapping[str, Callable[[S], None]],
        always: Sequence[Callable[[S], None]] = (),
    ) -> None:
        self.current = current
        self._load = load
        self._safe = safe
        self._always = always

    def listen(self) -> None:
        """Reload whenever SIGHUP comes; for the running loop."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)

    def reload(self) -> None:
        """Once. What is refused, or wrong, is a line in the log, and stays as it was."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        notify(f"RELOADING=1\nMONOTONIC_USEC={now_us}")
        try:
            fresh = self._load()
        except OnesError as error:
            log.error("settings not reloaded: nothing was changed", why=str(error))  # noqa: TRY400
        else:
            self._take(fresh)
        notify("READY=1")

    def _take(self, fresh: S) -> None:
        done = reloaded(self.current, fresh, self._safe)
        self.current = done.settings
        for field in done.refused:
            log.warning("setting not changed: it needs a restart", field=field)
        for field in done.changed:
            self._safe[field](done.settings)
        for work in self._always:
            try:
                work(done.settings)
            except OnesError as error:
                log.error("not reloaded", field=error.field, why=str(error))  # noqa: TRY400
        log.info("settings reloaded", changed=list(done.changed), refused=list(done.refused))
