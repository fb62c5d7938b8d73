"""Reload of a daemon's settings on SIGHUP. Only changes that are possible at run time apply."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import structlog

from schemas.errors import OnesError
from schemas.host.logging import notify

S = TypeVar("S", bound=msgspec.Struct)
log = structlog.get_logger("settings")


class SettingsReload(Generic[S]):
    """Settings of a running daemon.

    `load` reads the file again. `safe` maps each field that may change to the function that
    applies the new settings. `always` is called at each reload, for files that the settings name.
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
        """Reload on each SIGHUP. This needs a running event loop."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)

    def reload(self) -> None:
        """Reload once. Changes that are invalid or need a restart are logged and not applied."""
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
        changed: list[str] = []
        refused: list[str] = []
        self.current = self._merged(self.current, fresh, "", changed, refused)
        for field in refused:
            log.warning("setting not changed: needs a restart", field=field)
        for field in changed:
            self._safe[field](self.current)
        for work in self._always:
            try:
                work(self.current)
            except OnesError as error:
                log.error("file not reloaded", field=error.field, why=str(error))  # noqa: TRY400
        log.info("settings reloaded", changed=changed, refused=refused)

    def _merged(
        self, old: Any, new: Any, prefix: str, changed: list[str], refused: list[str]
    ) -> Any:
        """Return `old` with the safe changes from `new`, and add field paths to the two lists."""
        taken = {}
        for name in old.__struct_fields__:
            before, after, field = getattr(old, name), getattr(new, name), f"{prefix}{name}"
            if isinstance(before, msgspec.Struct) and isinstance(after, msgspec.Struct):
                taken[name] = self._merged(before, after, f"{field}.", changed, refused)
            elif before != after:
                (changed if field in self._safe else refused).append(field)
                taken[name] = after if field in self._safe else before
        return msgspec.structs.replace(old, **taken)
