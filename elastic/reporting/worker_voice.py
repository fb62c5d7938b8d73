"""What a worker says: reports to the controller, and lines to whoever reads the job's output."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic.reporting.agent_channel import Channel
from schemas.messages.agent import JOIN, ScriptReport
from schemas.messages.worker import Assignment, ToWorker


class WorkerVoice:
    """One worker's; a report of a worker that is alone goes nowhere.

    Args:
        assignment: of the worker; None: it is alone.
        leads: whether it is the one of its group that prints.
    """

    def __init__(self, assignment: Assignment | None, leads: Callable[[], bool]) -> None:
        self._assignment = assignment
        self._leads = leads
        self.channel: Channel | None = None

    def open(self, folder: Path | None, hear: Callable[[ToWorker], None]) -> None:
        """Talk with the node's agent until the process ends.

        Args:
            folder: of the worker; None: there is no agent.
            hear: takes what the agent says, in a thread of its own; must not wait.
        """
        if self._assignment is not None and folder is not None:
            self.channel = Channel(self._assignment, folder, hear)
            atexit.register(self.channel.close)

    def report(self, kind: type[ScriptReport], **fields: Any) -> None:
        """Report something that nothing may lose.

        Args:
            fields: its own; job, version, rank and index are added.
        """
        assignment, channel = self._assignment, self.channel
        if assignment is None or channel is None:
            return
        job, version, rank = assignment.job, assignment.version, assignment.rank
        channel.report(
            lambda index: kind(job=job, version=version, rank=rank, index=index, **fields)
        )

    def say(self, text: str) -> None:
        """A line in the job's output, once for the group."""
        if self._leads():
            sys.stderr.write(f"[ones] {text}\n")
            sys.stderr.flush()

    def say_wins(self, name: str, script: Any, job: Any) -> None:
        """Say that the job file has the last word, where the script says something else.

        Args:
            script: what the script says; None: nothing.
        """
        joins = self._assignment is not None and self._assignment.kind == JOIN
        if script is not None and script != job and not joins:
            self.say(f"{name} {job} of the job file wins over the script's {script}")
