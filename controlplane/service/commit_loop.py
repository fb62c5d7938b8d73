"""The commit loop: handle an input, make it durable, and only then let its effects out."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from controlplane.core.commands import Announce, Command
from controlplane.core.inputs import (
    ControllerStarted,
    Input,
    InputSkipped,
    NodeReported,
)
from controlplane.journal.reader import Reader
from controlplane.journal.record import Entry
from controlplane.journal.replay import replay
from controlplane.journal.writer import Writer
from schemas.errors import UnavailableError
from schemas.ids import Seconds, Term

log = structlog.get_logger("commit_loop")
Perform = Callable[[Command], None]
DEADLINE_TICK_S: Final = 0.5


@dataclass(slots=True)
class _Pending:
    commands: list[Command]
    before_effects: Callable[[], None] | None
    after_effects: Callable[[list[Command]], None] | None


class CommitLoop:
    """Owns the reactor and its journal.

    Inputs are handled at once, in order; their commands wait until the journal has them
    (commit before effect), also in order. Several inputs share one fdatasync.

    Args:
        journal: its file; the state is replayed from it, and it is made if there is none.
        perform: lets one command out.

    Raises:
        JournalError: if the journal cannot be used.
    """

    def __init__(self, journal: Path, perform: Perform) -> None:
        self._path = journal
        self._perform = perform
        self._loop = asyncio.get_running_loop()
        self._pending: deque[_Pending] = deque()
        self._released = 0
        self._writer_number = 0  # a writer that was replaced is not listened to
        self._writer = Writer(journal, partial(self._committed, self._writer_number))
        self.reader = Reader(journal)
        last = [Seconds(0.0)]

        def timed() -> Iterator[tuple[Seconds, Input]]:
            for at, event in self.reader.inputs():
                last[0] = at
                yield at, event

        self.reactor = replay(timed())
        self._began = max(last[0], time.time()) - self._loop.time()

    @property
    def stalled(self) -> str:
        """Why nothing becomes durable at the moment; empty when all is well."""
        return self._writer.stalled

    def now(self) -> Seconds:
        """Seconds since the epoch; a clock that is set while we run does not move it."""
        return Seconds(self._began + self._loop.time())

    def begin(self, release: str) -> Term:
        """Enter the history as a new incarnation.

        Args:
            release: of this program.

        Returns:
            The term: one more than that of the incarnation before.
        """
        term = Term(self.reactor.state.term + 1)
        self.handle(ControllerStarted(term=term, release=release))
        return term

    def handle(
        self,
        event: Input,
        before_effects: Callable[[], None] | None = None,
        after_effects: Callable[[list[Command]], None] | None = None,
    ) -> None:
        """Handle `event` now, and let its commands out once it is durable.

        An input that the core cannot handle is replaced by `InputSkipped`.

        Args:
            event: the input, taken at the present time.
            before_effects: called when it is durable, before its commands are performed.
            after_effects: called with its commands when they have been performed.
        """
        now = self.now()
        try:
            commands = self.reactor.handle(event, now)
        except Exception as error:
            log.exception("input skipped", input=type(event).__name__)
            event, commands = self._skip(event, error)
        feed = tuple(command.event for command in commands if isinstance(command, Announce))
        self._pending.append(_Pending(commands, before_effects, after_effects))
        self._writer.append(Entry(at=now, input=event, feed=feed))

    def handle_unless_stalled(
        self, event: Input, after_effects: Callable[[list[Command]], None]
    ) -> None:
        """The same for a client's request, refused while nothing can become durable.

        Args:
            event: the input.
            after_effects: called with its commands when they have been performed.

        Raises:
            UnavailableError: and nothing was changed.
        """
        if self.stalled:
            raise UnavailableError(
                f"the controller cannot write its journal ({self.stalled})",
                "free space there and submit again; running jobs go on",
            )
        self.handle(event, after_effects=after_effects)

    def _skip(self, event: Input, error: Exception) -> tuple[Input, list[Command]]:
        """Rebuild the state as it was before `event`, and pass over `event` for good."""
        if self.stalled:
            raise error  # the state before cannot be read back; the next incarnation can
        self._writer.close()
        self._release(self._writer_number, self._released + len(self._pending))
        self.reader.close()
        self._writer_number, self._released = self._writer_number + 1, 0
        self._writer = Writer(self._path, partial(self._committed, self._writer_number))
        self.reader = Reader(self._path)
        self.reactor = replay(self.reader.inputs())
        reported = event if isinstance(event, NodeReported) else None
        skipped = InputSkipped(
            what=type(event).__name__,
            error=repr(error)[:1000],
            node=reported.node if reported else None,
            boot=reported.boot if reported else None,
            seq=reported.seq if reported else 0,
        )
        return skipped, self.reactor.handle(skipped, self.now())

    def _committed(self, number: int, count: int) -> None:
        self._loop.call_soon_threadsafe(self._release, number, count)

    def _release(self, number: int, count: int) -> None:
        while number == self._writer_number and self._released < count and self._pending:
            self._released += 1
            pending = self._pending.popleft()
            if pending.before_effects:
                pending.before_effects()
            for command in pending.commands:
                self._perform(command)
            if pending.after_effects:
                pending.after_effects(pending.commands)

    async def keep_deadlines(self) -> None:
        """Turn deadlines that pass into inputs, for ever."""
        while True:
            await asyncio.sleep(DEADLINE_TICK_S)
            for event in self.reactor.due(self.now()):
                self.handle(event)

    def close(self) -> None:
        """Make what was taken durable, and stop."""
        self._writer.close()
        self.reader.close()
