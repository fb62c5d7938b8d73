"""What controller and agent owe their host: log lines, readiness, and a watchdog that means it.

Where log lines go: a file descriptor that may be full, gone or slow, and never raises.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import structlog


class LogLines:
    """Writes each line at once, and counts those that nobody takes.

    A disk that is full, a terminal that is gone and a pipe that nobody reads lose lines; they end
    no process. As soon as lines are taken again, how many were lost is said first.
    """

    def __init__(self, fd: int, lost: Callable[[int], str]) -> None:
        """Begin with nothing lost.

        Args:
            lost: the line that says how many are missing, without its end.
        """
        self._fd = fd
        self._lost = lost
        self._torn = False  # the last line is there in part
        self._lock = threading.Lock()
        self.missing = 0  # lines, since the last one that was taken

    def msg(self, line: str) -> None:
        """Write `line`, or count it.

        Args:
            line: without its end; what UTF-8 cannot say is escaped.
        """
        with self._lock:
            if self.missing and not self._written(self._lost(self.missing)):
                self.missing += 1
                return
            self.missing = 0
            if not self._written(line):
                self.missing = 1

    debug = info = warning = warn = error = exception = critical = fatal = log = failure = msg

    def _written(self, line: str) -> bool:
        text = f"\n{line}\n" if self._torn else f"{line}\n"
        left = memoryview(text.encode(errors="backslashreplace"))
        try:
            while left:
                left = left[os.write(self._fd, left) :]
                self._torn = bool(left)
        except OSError:
            return False
        return True


class LogLinesFactory:
    """What structlog asks for a logger: all loggers of a process share one `LogLines`."""

    def __init__(self, lines: LogLines) -> None:
        """Hand out `lines`."""
        self._lines = lines

    def __call__(self, *_names: Any) -> LogLines:
        """The logger, whatever its name."""
        return self._lines


LAG_LIMIT_S: Final = 2.0  # a loop that is later than this is not healthy


def configure_logging(fd: int = 2) -> None:
    """Log lines as JSON under systemd or into a file, as coloured text on a terminal.

    No line can end the process: those that cannot be written are counted, and the count is the
    next line that can.
    """
    readable = os.isatty(fd) and "JOURNAL_STREAM" not in os.environ
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    render: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer()]
        if readable
        else [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[structlog.processors.add_log_level, stamp, *render],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=LogLinesFactory(LogLines(fd, _lost)),
    )


def _lost(lines: int) -> str:
    said = {"event": "log lines lost", "lines": lines, "level": "warning"}
    return json.dumps(said)


def notify(state: str) -> None:
    """Tell systemd, as sd_notify(3) describes; nothing happens without it.

    Args:
        state: newline-separated assignments, such as `READY=1`.

    A socket that does not take it is a line in the log.
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
        structlog.get_logger("systemd").warning("systemd was not told", state=state, why=str(error))


async def watchdog() -> None:
    """Feed systemd's watchdog while the loop is prompt, four times in systemd's interval.

    Nothing else is asked: a full disk, say, is not mended by a restart.
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
    """Log lines about what was refused, bounded for each peer and in all; and of what was done.

    No line is lost for a flood of another peer, and no flood fills the disk: how many lines were
    left out is a line of its own.
    """

    def __init__(
        self,
        limit_per_s: int = 20,
        clock: Callable[[], float] = time.monotonic,
        *,
        of_one_per_s: int = 5,
    ) -> None:
        """Begin to count.

        Args:
            limit_per_s: lines that are written in one second at most; the others are counted.
            clock: seconds that only grow; one for all who refuse, or seconds would begin anew.
            of_one_per_s: lines about one peer among them.
        """
        self._clock = clock
        self._log = structlog.get_logger("audit")
        self._limit, self._of_one = limit_per_s, of_one_per_s
        self._second = 0
        self._said: Counter[str] = Counter()  # lines of this second, by peer
        self._dropped = 0

    def refused(self, what: str, why: str, *, peer: str = "", **detail: str) -> None:
        """One thing that was dropped or denied.

        Args:
            what: what was refused, a word for machines.
            why: for people; cut to 500 characters.
            peer: who did it: the owner of a key, or a stranger's address.
        """
        self._begin_second()
        if self._said.total() >= self._limit or (peer and self._said[peer] >= self._of_one):
            self._dropped += 1
            return
        self._said[peer] += 1
        said = {"peer": peer[:200], **detail} if peer else detail
        self._log.warning("audit", what=what, why=why[:500], **said)

    def done(self, what: str, by: str, **detail: str) -> None:
        """Somebody used a right that is not everybody's; such a line is never left out."""
        self._log.info("audit", what=what, by=by, **{f"of_{k}": v for k, v in detail.items()})

    async def tell_what_was_left_out(self) -> None:
        """Say so also when nothing more is refused, for ever."""
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
        self._said.clear()
