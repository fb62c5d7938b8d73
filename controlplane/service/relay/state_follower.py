"""State of the core in the relay process, made from the acknowledged inputs in the journal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from controlplane.core.commands import Announce
from controlplane.core.model.job import Job
from controlplane.core.state import State
from controlplane.journal.reader import Reader
from controlplane.journal.replay import recover
from schemas.errors import UnavailableError, UnknownJobError
from schemas.ids import JobId, Seconds

log = structlog.get_logger("relay")


class StateFollower:
    """Second reactor on the same inputs. `changed` is called with each job that an input changed.

    The state is never ahead of what the controller has acknowledged.

    Raises:
        JournalError: if the journal cannot be used.
    """

    def __init__(self, journal: Path, last: int, changed: Callable[[JobId], None]) -> None:
        self._changed = changed
        self._reader = Reader(
            journal,
            damaged=lambda row: log.error(
                "row of a job's records is damaged, omitting it", row=row
            ),
        )
        found = recover(self._reader, most=last)
        self._reactor, self.last = found.reactor, found.last
        self.records = self._reader.records
        self._loop = asyncio.get_running_loop()
        self._clock_offset = max(found.at, time.time()) - self._loop.time()
        self._failed: asyncio.Future[Exception] = self._loop.create_future()

    @property
    def state(self) -> State:
        """The state after the last followed input."""
        return self._reactor.state

    def job(self, name: JobId) -> Job:
        """Return a job from the state, or from the journal if it has left the state.

        Raises:
            UnknownJobError: if there is no such job, or the job is no longer kept.
        """
        found = self.state.jobs.get(name) or self._reader.ended.get(name)
        if found is None:
            raise UnknownJobError(name)
        return found

    def now(self) -> Seconds:
        """Return the time in seconds since 1970. Changes of the system clock have no effect."""
        return Seconds(self._clock_offset + self._loop.time())

    def follow(self, last: int) -> None:
        """Handle all inputs up to number `last`.

        Raises:
            UnavailableError: if that is not possible, now or earlier.
        """
        if self._failed.done():
            raise _unreadable()
        if last <= self.last:
            return
        try:
            for number, at, event in self._reader.numbered_inputs(self.last, last):
                for command in self._reactor.handle(event, at):
                    if isinstance(command, Announce) and command.event.job:
                        self._changed(command.event.job)
                self.last = number
        except Exception as error:
            self._failed.set_result(error)
            raise _unreadable() from error

    async def failure(self) -> Exception:
        """Wait until the journal cannot be followed any more, and return the error."""
        return await asyncio.shield(self._failed)

    def close(self) -> None:
        """Close the journal."""
        self._reader.close()


def _unreadable() -> UnavailableError:
    return UnavailableError("the log relay cannot read the journal", "try again")
