"""Log lines, readiness notification, watchdog and audit of the daemons."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import structlog

LAG_LIMIT_S: Final = 2.0  # an event loop with a longer delay is not responsive


class LogLines:
    """Writer of log lines that never raises, even if its descriptor is full, closed or slow.

    A full disk, a closed terminal or an unread pipe causes lost lines, but does not end the
    process. `lost` returns a line about the number of lost lines, which is written before the next
    line.
    """

    def __init__(self, fd: int, lost: Callable[[int], str]) -> None:
        self._fd = fd
        self._lost = lost
        self._incomplete = False  # True if the last line was only written in part
        self._lock = threading.Lock()
        self.missing = 0  # number of lost lines since the last written one

    def msg(self, line: str) -> None:
        """Write a line, or record it as lost. Characters that UTF-8 cannot encode are escaped."""
        with self._lock:
            if self.missing and not self._written(self._lost(self.missing)):
                self.missing += 1
                return
            self.missing = 0
            if not self._written(line):
                self.missing = 1

    debug = info = warning = warn = error = exception = critical = fatal = log = failure = msg

    def _written(self, line: str) -> bool:
        text = f"\n{line}\n" if self._incomplete else f"{line}\n"
        left = memoryview(text.encode(errors="backslashreplace"))
        try:
            while left:
                left = left[os.write(self._fd, left) :]
                self._incomplete = bool(left)
        except OSError:
            return False
        return True


def configure_logging(fd: int = 2) -> None:
    """Log coloured text if the descriptor is a terminal, otherwise JSON."""
    readable = os.isatty(fd) and "JOURNAL_STREAM" not in os.environ
    lines = LogLines(fd, _lost)  # all loggers of the process share it
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    render: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer()]
        if readable
        else [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[structlog.processors.add_log_level, stamp, *render],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=lambda *_: lines,
    )


def _lost(lines: int) -> str:
    return json.dumps({"event": "log lines lost", "lines": lines, "level": "warning"})


def notify(state: str) -> None:
    """Send a state such as `READY=1` to systemd (sd_notify(3)). Log a failure.

    Do nothing unless systemd has set NOTIFY_SOCKET.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    name = "\0" + address[1:] if address.startswith("@") else address
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    try:
        with socket.socket(socket.AF_UNIX, kind) as channel:
            channel.connect(name)
            channel.sendall(state.encode())
    except OSError as error:
        structlog.get_logger("systemd").warning(
            "systemd could not be notified", state=state, why=str(error)
        )


@contextlib.contextmanager
def extended_start(extension_us: int) -> Iterator[None]:
    """Extend systemd's start timeout repeatedly during the block, which may block the thread.

    `extension_us` is the length of one extension in microseconds.
    """
    done = threading.Event()

    def extend() -> None:
        notify(f"EXTEND_TIMEOUT_USEC={extension_us}")
        while not done.wait(extension_us / 4e6):
            notify(f"EXTEND_TIMEOUT_USEC={extension_us}")

    thread = threading.Thread(target=extend, name="start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


async def watchdog() -> None:
    """Notify systemd's watchdog four times per interval, while the event loop is responsive.

    Nothing else is checked, because a restart would not repair other problems such as a full disk.
    """
    interval_s = int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6 / 4
    if not interval_s:
        return
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        if loop.time() - due < LAG_LIMIT_S:
            notify("WATCHDOG=1")


class Audit:
    """Audit log of refused and privileged actions. Refusals are limited per peer and in total.

    A flood from one peer neither hides the lines of another peer nor fills the disk. At most
    `limit_per_s` refusals are logged per second, and at most `of_one_per_s` of one peer. The number
    of suppressed refusals is logged, too.
    """

    def __init__(
        self,
        limit_per_s: int = 20,
        clock: Callable[[], float] = time.monotonic,
        *,
        of_one_per_s: int = 5,
    ) -> None:
        self._clock = clock
        self._log = structlog.get_logger("audit")
        self._limit, self._of_one = limit_per_s, of_one_per_s
        self._second = 0
        self._logged: Counter[str] = Counter()  # number of lines in this second, by peer
        self._dropped = 0

    def refused(self, what: str, why: str, *, peer: str = "", **detail: str) -> None:
        """Log an action that was dropped or denied.

        `what` is meant for programs, and `why` is an explanation for people. `peer` is the
        owner of the key, or the address of an unknown peer.
        """
        self._begin_second()
        if self._logged.total() >= self._limit or (peer and self._logged[peer] >= self._of_one):
            self._dropped += 1
            return
        self._logged[peer] += 1
        fields = {"peer": peer[:200], **detail} if peer else detail
        self._log.warning("audit", what=what, why=why[:500], **fields)

    def done(self, what: str, by: str, **detail: str) -> None:
        """Log the use of a privileged right. Such lines are never suppressed."""
        self._log.info("audit", what=what, by=by, **{f"of_{k}": v for k, v in detail.items()})

    async def log_suppressed(self) -> None:
        """Log the number of suppressed lines each second, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            self._begin_second()

    def _begin_second(self) -> None:
        second = int(self._clock())
        if second == self._second:
            return
        if self._dropped:
            self._log.warning("audit", what="suppressed", lines=self._dropped)
        self._second, self._dropped = second, 0
        self._logged.clear()
