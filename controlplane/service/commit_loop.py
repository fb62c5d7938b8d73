"""One turn: handle an input, make it durable, and only then let its effects out."""

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

from controlplane.core.commands import Announce, AskForPlan, Command
from controlplane.core.commit import difference
from controlplane.core.events import (
    ControllerStarted,
    Input,
    InputSkipped,
    NodeReported,
    PlanProposed,
)
from controlplane.core.model.job import HOLDING
from controlplane.journal.reader import Reader
from controlplane.journal.record import Entry
from controlplane.journal.replay import replay
from controlplane.journal.writer import Writer
from controlplane.policy.api import ClusterView, Plan, PlanTaken, Reason, SearchStats
from controlplane.service.planner.search_planner import Planner
from schemas.errors import UnavailableError
from schemas.ids import JobId, Seconds, Term

log = structlog.get_logger("commit_loop")
Perform = Callable[[Command], None]
DEADLINE_TICK_S: Final = 0.5


@dataclass(slots=True)
class _Pending:
    commands: list[Command]
    before: Callable[[], None] | None
    after: Callable[[list[Command]], None] | None


class CommitLoop:
    """Owns the reactor and its journal.

    Inputs are handled at once, in order; their commands wait until the journal has them
    (commit before effect), also in order. Several inputs share one fdatasync.
    """

    def __init__(self, journal: Path, perform: Perform) -> None:
        self._path = journal
        self.planner: Planner | None = None
        self._perform = perform
        self._loop = asyncio.get_running_loop()
        self._pending: deque[_Pending] = deque()
        self._released = 0
        self._planning = False
        self._wake: asyncio.TimerHandle | None = None
        self.reasons: dict[JobId, Reason] = {}  # the latest plan's, for jobs that wait
        self._life = 0  # of the writer
        self._writer = Writer(journal, partial(self._committed, self._life))
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
        """Enter the history as a new incarnation."""
        term = Term(self.reactor.state.term + 1)
        self.take(ControllerStarted(term=term, release=release))
        return term

    def take(
        self,
        event: Input,
        before: Callable[[], None] | None = None,
        after: Callable[[list[Command]], None] | None = None,
    ) -> None:
        """Handle `event`; run `before`, its commands and `after` once it is durable."""
        now = self.now()
        try:
            commands = self.reactor.handle(event, now)
        except Exception as error:
            log.exception("input skipped", input=type(event).__name__)
            event, commands = self._skip(event, error)
        feed = tuple(command.event for command in commands if isinstance(command, Announce))
        self._pending.append(_Pending(commands, before, after))
        self._writer.append(Entry(at=now, input=event, feed=feed))

    def take_checked(self, event: Input, after: Callable[[list[Command]], None]) -> None:
        """The same for a client's request, refused while nothing can become durable.

        Raises:
            UnavailableError: and nothing was changed.
        """
        if self.stalled:
            raise UnavailableError(
                f"the controller cannot write its journal ({self.stalled})",
                "free space there and submit again; running jobs go on",
            )
        self.take(event, after=after)

    def _skip(self, event: Input, error: Exception) -> tuple[Input, list[Command]]:
        """Rebuild the state as it was before `event`, and pass over `event` for good."""
        if self.stalled:
            raise error  # the state before cannot be read back; the next incarnation can
        self._writer.close()
        self._release(self._life, self._released + len(self._pending))
        self.reader.close()
        self._life, self._released = self._life + 1, 0
        self._writer = Writer(self._path, partial(self._committed, self._life))
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

    def _committed(self, life: int, count: int) -> None:
        self._loop.call_soon_threadsafe(self._release, life, count)

    def _release(self, life: int, count: int) -> None:
        while life == self._life and self._released < count and self._pending:
            self._released += 1
            pending = self._pending.popleft()
            if pending.before:
                pending.before()
            for command in pending.commands:
                if isinstance(command, AskForPlan):
                    self._ask()
                else:
                    self._perform(command)
            if pending.after:
                pending.after(pending.commands)

    def _ask(self) -> None:
        if not self._planning:
            self._planning = True
            self._loop.call_soon(self.plan)

    def plan(self) -> None:
        """Ask whoever plans; the answer comes through `propose`."""
        self._planning = False
        if self.planner is not None:
            self.planner.ask()

    def look(self) -> tuple[ClusterView, Seconds]:
        """What a policy may see, and the time."""
        return self.reactor.view(), self.now()

    def propose(self, plan: Plan, stats: SearchStats | None) -> None:
        """Take a plan, if it changes anything; only its changes enter the history."""
        now, state = self.now(), self.reactor.state
        self.reasons = plan.reasons
        if plan.wake_at is not None:
            if self._wake:
                self._wake.cancel()
            self._wake = self._loop.call_later(max(0.05, plan.wake_at - now), self._ask)
        changes = difference(plan, state, now)
        if not changes.local_batch:
            return
        self.take(PlanProposed(plan=changes, stats=stats))
        if self.planner is not None:
            left = [name for name in state.active if state.jobs[name].phase not in HOLDING]
            self.planner.observe(PlanTaken(waiting=tuple(left)), now)

    async def keep_deadlines(self) -> None:
        """Turn deadlines that pass into inputs, for ever."""
        while True:
            await asyncio.sleep(DEADLINE_TICK_S)
            for event in self.reactor.due(self.now()):
                self.take(event)

    def close(self) -> None:
        """Make what was taken durable, and stop."""
        self._writer.close()
        self.reader.close()
