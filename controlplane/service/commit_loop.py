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
    CommitsResumed,
    ControllerStarted,
    Input,
    InputSkipped,
    NodeReported,
)
from controlplane.journal.reader import Reader
from controlplane.journal.record import Entry, JournalError
from controlplane.journal.replay import replay
from controlplane.journal.writer import Writer
from schemas.errors import UnavailableError
from schemas.ids import Seconds, Term
from schemas.logging_and_watchdog import notify
from schemas.messages.feed import FeedEvent

log = structlog.get_logger("commit_loop")
Perform = Callable[[Command], None]
DEADLINE_TICK_S: Final = 0.5


@dataclass(slots=True)
class _Pending:
    """An input that was handled, and what waits for it to be durable."""

    number: int  # of the input in the journal
    at: Seconds
    event: Input
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
        self._failed: asyncio.Future[JournalError] = self._loop.create_future()
        self._writer = Writer(journal, self._committed, self._gave_up)
        self._last = self._writer.base  # number of the input that was handled last
        self.reader = Reader(journal)
        self._last_at = Seconds(0.0)
        self._stall: CommitsResumed | None = None  # to be told when it is over
        self.reactor = replay(self._history())
        self._began = max(self._last_at, time.time()) - self._loop.time()

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
            self._writer.append(Entry(at=now, input=event, feed=_feed(commands)))
        except Exception as error:
            log.exception("input skipped", input=type(event).__name__)
            self.reactor = replay(self._history())
            event = _skipped(event, error)
            commands = self.reactor.handle(event, now)
            self._writer.append(Entry(at=now, input=event, feed=_feed(commands)))
        self._last += 1
        self._pending.append(
            _Pending(self._last, now, event, commands, before_effects, after_effects)
        )

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

    def _history(self) -> Iterator[tuple[Seconds, Input]]:
        """Every input that was taken: those in the journal, then those on their way there."""
        durable = 0
        for number, at, event in self.reader.numbered_inputs():
            durable, self._last_at = number, at
            yield at, event
        for pending in self._pending:
            if pending.number > durable:
                yield pending.at, pending.event

    def _committed(self, count: int) -> None:
        self._loop.call_soon_threadsafe(self._release, self._writer.base + count)

    def _gave_up(self, error: JournalError) -> None:
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: JournalError) -> None:
        if not self._failed.done():
            log.error("the journal cannot be written", why=str(error))
            self._failed.set_result(error)

    def _release(self, durable: int) -> None:
        """Let the effects of all inputs up to `durable` out; one that fails holds up no other."""
        while self._pending and self._pending[0].number <= durable:
            pending = self._pending.popleft()
            if pending.before_effects:
                _do(pending.before_effects)
            for command in pending.commands:
                _do(partial(self._perform, command))
            if pending.after_effects:
                _do(partial(pending.after_effects, pending.commands))

    async def failure(self) -> JournalError:
        """Wait until nothing can be made durable any more.

        Returns:
            Why. What was not committed was never told of: whoever reported it will report it again.
        """
        return await asyncio.shield(self._failed)

    async def keep_deadlines(self) -> None:
        """Turn deadlines that pass into inputs, and watch for a journal without room, for ever."""
        while True:
            await asyncio.sleep(DEADLINE_TICK_S)
            self._watch_room()
            for event in self.reactor.due(self.now()):
                self.handle(event)

    def _watch_room(self) -> None:
        """Say that nothing becomes durable, and that it does again."""
        why = self._writer.stalled
        if why and self._stall is None:
            self._stall = CommitsResumed(why=why, since=self.now())
            log.warning("the journal has no room: submissions are refused", why=why)
            notify(f"STATUS=the journal cannot be written: {why}")
        elif not why and self._stall is not None:
            log.info("the journal is written again", was=self._stall.why)
            notify("STATUS=")
            self.handle(self._stall)
            self._stall = None

    def close(self) -> None:
        """Make what was taken durable, and stop."""
        self._writer.close()
        self.reader.close()


def _feed(commands: list[Command]) -> tuple[FeedEvent, ...]:
    return tuple(command.event for command in commands if isinstance(command, Announce))


def _skipped(event: Input, error: Exception) -> InputSkipped:
    reported = event if isinstance(event, NodeReported) else None
    return InputSkipped(
        what=type(event).__name__,
        error=repr(error)[:1000],
        node=reported.node if reported else None,
        boot=reported.boot if reported else None,
        seq=reported.seq if reported else 0,
    )


def _do(effect: Callable[[], None]) -> None:
    try:
        effect()
    except Exception:
        log.exception("an effect failed")
