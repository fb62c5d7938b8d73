"""Conversation with the node agent, off the training thread.

Reports go to a file first. The socket only carries hints that the file grew, telemetry, and the
orders of the group.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from elastic.reporting.report_file import report_file
from schemas.codec import TO_WORKER, encode
from schemas.errors import OnesError
from schemas.link import ThreadDealer
from schemas.messages.agent import ScriptReport, StepsReported
from schemas.messages.worker import Assignment, Reported, ToWorker, WorkerHello

TELEMETRY_S: Final = 1.0
Telemetry = Callable[[], StepsReported | None]


class Channel:
    """One worker's line to its agent; works on, in silence, while there is none."""

    def __init__(
        self, assignment: Assignment, folder: Path, hear: Callable[[ToWorker], None]
    ) -> None:
        """Begin to talk.

        Args:
            hear: takes what the agent says, in the channel's thread; must not wait.
        """
        self._assignment = assignment
        self._hear = hear
        self._reports = report_file(folder / "reports")
        self._telemetry: Telemetry = lambda: None
        self._stop = threading.Event()
        self._started = threading.Event()
        self._wake: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)
        self._thread.start()
        self._started.wait()

    def report(self, make: Callable[[int], ScriptReport]) -> None:
        """Write a report that nothing can lose, and hint at it.

        Args:
            make: builds the report from its index, 1-based, in the calling thread.

        Raises:
            OSError: if the disk takes nothing, and more waits than `append_file.LIMIT` bytes.
        """
        self._reports.append(make)
        self._wake()

    def tell_steps(self, telemetry: Telemetry) -> None:
        """Ask `telemetry` about once a second, from the channel's thread.

        Args:
            telemetry: gives what is to be sent; None: nothing now.
        """
        self._telemetry = telemetry

    def close(self) -> None:
        """End the conversation."""
        self._stop.set()
        self._wake()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        dealer = ThreadDealer(self._assignment.socket)
        self._wake = dealer.wake
        self._started.set()
        hinted, greeted = 0, False
        while not self._stop.is_set():
            messages, connected = dealer.poll(TELEMETRY_S)
            if connected or not greeted:
                hinted = 0
                hello = WorkerHello(pid=os.getpid(), token=self._assignment.token, **self._who())
                greeted = dealer.send(encode(hello))
            for data in messages:
                self._heard(data)
            count = self._reports.count if self._reports.flush() else hinted
            if count > hinted and dealer.send(encode(Reported(count=count, **self._who()))):
                hinted = count
            if (steps := self._telemetry()) is not None:
                dealer.send(encode(steps))
        dealer.close()

    def _heard(self, data: bytes) -> None:
        try:
            message = TO_WORKER.decode(data)
        except OnesError:
            return
        self._hear(message)

    def _who(self) -> dict[str, Any]:
        a = self._assignment
        return {"job": a.job, "version": a.version, "rank": a.rank}
