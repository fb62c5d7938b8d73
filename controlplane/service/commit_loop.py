"""Commit loop that handles each input, makes it durable, and only then executes its commands."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from controlplane.core.commands import Announce, Command
from controlplane.core.history import Record
from controlplane.core.inputs import (
    CommitsResumed,
    ControllerStarted,
    Input,
    InputSkipped,
    NodeReported,
)
from controlplane.core.model.job import Job
from controlplane.core.reactor import Reactor
from controlplane.journal.database import Entry, JournalError
from controlplane.journal.reader import Reader
from controlplane.journal.records import JobRecords
from controlplane.journal.replay import recover
from controlplane.journal.snapshots import copy_of
from controlplane.journal.take_snapshot import save_state
from controlplane.journal.writer import Task, Writer
from schemas.errors import UnavailableError, UnknownJobError
from schemas.host.logging import notify
from schemas.ids import JobId, Seconds, Term

log = structlog.get_logger("commit_loop")
Perform = Callable[[Command], None]
Recorded = Callable[[Record], None]
DEADLINE_TICK_S: Final = 0.5


@dataclass(slots=True)
class _Pending:
    """An input that was handled but is not durable yet, with its commands."""

    number: int  # position in the journal
    at: Seconds
    event: Input
    commands: list[Command]
    before_effects: Callable[[], None] | None
    after_effects: Callable[[list[Command]], None] | None


class Tail(NamedTuple):
    """Inputs after the last snapshot of the state. A restart must handle them again."""

    inputs: int
    seconds: float  # time that handling them took


class CommitLoop:
    """Owner of the reactor and its journal.

    Inputs are handled at once, in order. Their commands wait, in the same order, until the inputs
    are in the journal (commit before effect). Several inputs share one fdatasync.

    `reactor` is ahead of the journal and is used for decisions. `committed` handles each input once
    the input is durable, just before its commands are executed. Everything that leaves the
    controller is read from `committed`.

    The state is restored from the last snapshot and all later inputs. `recorded` is called with
    each record of a durable input, before its commands are executed.
    """

    def __init__(
        self,
        journal: Path,
        perform: Perform = lambda _: None,
        recorded: Recorded = lambda _: None,
    ) -> None:
        self.path = journal
        self._perform = perform
        self._recorded = recorded
        # Standbys: how many of the durable inputs may be acknowledged, and why not all of them.
        self.replicated: Callable[[int], int] = lambda durable: durable
        self.held_up: Callable[[], str] = lambda: ""
        self.on_durable: Callable[[], None] = lambda: None
        # Called with the number of the last acknowledged input, before the effects of this input.
        self.on_acknowledged: Callable[[int], None] = lambda _: None
        self._loop = asyncio.get_running_loop()
        self._pending: deque[_Pending] = deque()
        self._catching_up: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._failed: asyncio.Future[JournalError] = self._loop.create_future()
        self._writer = Writer(journal, self._committed, self._writer_failed)
        self.reader = Reader(
            journal,
            damaged=lambda row: log.error(
                "row of a job's records is damaged, omitting it", row=row
            ),
        )
        self._stall: CommitsResumed | None = None  # announced once the journal is writable
        found = recover(
            self.reader,
            lambda reason: log.error(
                "snapshot of the state is unusable, skipping it", reason=reason
            ),
        )
        self.reactor, self.committed = found.reactor, copy_of(found.reactor)
        # Numbers of the last handled, durable and acknowledged inputs.
        self.last = self.durable = self.acknowledged = found.last
        self._last_at = found.at
        self._begun = asyncio.Event()
        self._longest_commit_s = 0.0
        self._torn = False  # True while an input is being handled
        self.tail = Tail(found.last - found.snapshot, found.took_s)
        self._clock_offset = max(self._last_at, time.time()) - self._loop.time()

    def use(self, perform: Perform, recorded: Recorded) -> None:
        """Call these functions with each command, and each record, from now on."""
        self._perform, self._recorded = perform, recorded

    @property
    def journal(self) -> str:
        """Id of the journal."""
        return self._writer.journal_id

    @property
    def records(self) -> JobRecords:
        """Durable records of all jobs."""
        return self.reader.records

    def job(self, name: JobId) -> Job:
        """Return a durable job from the state, or from the journal if it has left the state.

        Raises:
            UnknownJobError: if there is no such job, or the job is no longer kept.
        """
        found = self.committed.state.jobs.get(name) or self.reader.ended.get(name)
        if found is None:
            raise UnknownJobError(name)
        return found

    @property
    def stalled(self) -> str:
        """Reason why no input can be acknowledged at the moment, or "" if inputs can."""
        return self._writer.stalled or self.held_up()

    def now(self) -> Seconds:
        """Return the time in seconds since 1970. Changes of the system clock have no effect."""
        return Seconds(self._clock_offset + self._loop.time())

    def set_clock(self, now: Seconds) -> None:
        """Let the time go on from `now`, the time of the active controller."""
        self._clock_offset = max(self._last_at, now) - self._loop.time()

    def begin(self, release: str, least: int = 0) -> Term:
        """Start a new term and return it.

        The term is higher than that of the last run. It is also higher than terms that the journal
        does not contain because the journal was restored from a backup, and at least `least`.
        """
        next_term = max(self.reactor.state.term + 1, least)
        floor = self.reader.term_floor()
        term = Term(max(next_term, floor))
        self.handle(
            ControllerStarted(
                term=term,
                release=release,
                journal=self._writer.journal_id,
                jobs=self._writer.jobs_floor,
                restored=floor > next_term,
            ),
            after_effects=lambda _: self._begun.set(),
        )
        return term

    async def begun(self) -> None:
        """Wait until the start of the term is durable, however long the journal is stalled."""
        await self._begun.wait()

    def handle(
        self,
        event: Input,
        before_effects: Callable[[], None] | None = None,
        after_effects: Callable[[list[Command]], None] | None = None,
    ) -> None:
        """Handle `event` now, and execute its commands once it is durable.

        An input that the core cannot handle is replaced by `InputSkipped`.

        `before_effects` is called when the input is durable, before its commands are executed.
        `after_effects` is called after their execution.
        """
        now, began = self.now(), time.perf_counter()
        self._torn = True
        try:
            commands = self.reactor.handle(event, now)
            self._append(event, now, commands)
        except Exception as error:
            log.exception("input skipped", input=type(event).__name__)
            self.reactor = self._before()
            event = _skipped(event, error)
            commands = self.reactor.handle(event, now)
            self._append(event, now, commands)
        number = self.last + 1
        self._handled(_Pending(number, now, event, commands, before_effects, after_effects), began)

    def follow(self, event: Input, at: Seconds, body: bytes) -> None:
        """Handle an input as the active controller did at `at`, and execute none of its commands.

        The journal gets `body`, the input as the active controller encoded it.

        Raises:
            CoreError: or another exception, if this controller handles it differently.
        """
        began = time.perf_counter()
        self._torn = True
        self._append(event, at, self.reactor.handle(event, at), body)
        self._handled(_Pending(self.last + 1, at, event, [], None, None), began)

    def _handled(self, pending: _Pending, began: float) -> None:
        self._torn = False
        self.last, self._last_at = pending.number, pending.at
        self.tail = Tail(self.tail.inputs + 1, self.tail.seconds + time.perf_counter() - began)
        self._pending.append(pending)

    def _append(
        self, event: Input, now: Seconds, commands: list[Command], body: bytes = b""
    ) -> None:
        feed = tuple(command.event for command in commands if isinstance(command, Announce))
        records = tuple(self.reactor.records)
        jobs = self.reactor.state.jobs_accepted
        self._writer.append(
            Entry(at=now, input=event, feed=feed, records=records, jobs=jobs, body=body)
        )

    async def caught_up(self) -> None:
        """Wait until all inputs handled so far are durable and their commands executed."""
        if self._pending:
            self.refuse_while_stalled()
            done: asyncio.Future[None] = self._loop.create_future()
            self._catching_up.append((self.last, done))
            await done

    def refuse_while_stalled(self) -> None:
        """Refuse a change while the journal cannot be written."""
        if why := self.held_up():
            raise UnavailableError(why, "try again later; running jobs continue")
        if self.stalled:
            raise UnavailableError(
                f"the controller cannot write its journal ({self.stalled})",
                "free space there and submit again; running jobs continue",
            )

    def between_commits(self, work: Task) -> None:
        """Run short work on the journal's database, in the writer thread between commits."""
        self._writer.between_commits(work)

    def snapshot_taken(self, number: int) -> None:
        """Record that the journal has a snapshot after input `number`, where a restart begins."""
        inputs = max(0, self.last - number)
        share = inputs / self.tail.inputs if self.tail.inputs else 0.0
        self.tail = Tail(inputs, self.tail.seconds * share)

    def _before(self) -> Reactor:
        """Return the reactor as it was before the current input.

        It is a copy of `committed` that replays exactly the inputs that were handled but are not
        durable yet.
        """
        reactor = copy_of(self.committed)
        for pending in self._pending:
            reactor.handle(pending.event, pending.at)
        return reactor

    def _committed(self, count: int) -> None:
        self._loop.call_soon_threadsafe(self._committed_through, self._writer.base + count)

    def _writer_failed(self, error: JournalError) -> None:
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: JournalError) -> None:
        if not self._failed.done():
            log.error("journal failed permanently", why=str(error))
            self._failed.set_result(error)

    def _committed_through(self, durable: int) -> None:
        self.durable = durable
        self.on_durable()
        self.release()

    def release(self) -> None:
        """Execute the commands of all acknowledged inputs, even if some commands fail."""
        through = self.replicated(self.durable)
        if through > self.acknowledged:
            self.acknowledged = through
            _run_effect(partial(self.on_acknowledged, through))
        while self._pending and self._pending[0].number <= through:
            pending = self._pending.popleft()
            self._longest_commit_s = max(self._longest_commit_s, self.now() - pending.at)
            self.committed.handle(pending.event, pending.at)
            for record in self.committed.records:
                _run_effect(partial(self._recorded, record))
            if pending.before_effects:
                _run_effect(pending.before_effects)
            for command in pending.commands:
                _run_effect(partial(self._perform, command))
            if pending.after_effects:
                _run_effect(partial(pending.after_effects, pending.commands))
        while self._catching_up and self._catching_up[0][0] <= through:
            _, done = self._catching_up.popleft()
            if not done.done():
                done.set_result(None)

    def journal_bytes(self) -> int:
        """Return the size of the journal with its write-ahead log."""
        log = self.path.with_name(f"{self.path.name}-wal")
        return sum(path.stat().st_size for path in (self.path, log) if path.exists())

    def longest_commit_s(self) -> float:
        """Return the longest wait of an input for its commit since the last call."""
        longest, self._longest_commit_s = self._longest_commit_s, 0.0
        return longest

    @property
    def is_torn(self) -> bool:
        """True if an input was handled only in part, so that the state must not be used."""
        return self._torn

    async def failure(self) -> JournalError:
        """Wait until the journal has failed permanently, and return the error.

        Uncommitted inputs have had no outside effect, so agents and clients will repeat them.
        """
        return await asyncio.shield(self._failed)

    async def keep_deadlines(
        self, due: Callable[[Reactor, Seconds], list[Input]] = Reactor.due
    ) -> None:
        """Handle the inputs that `due` returns, and report a stalled journal, until cancelled."""
        while True:
            await asyncio.sleep(DEADLINE_TICK_S)
            self._watch_writer()
            for event in due(self.reactor, self.now()):
                self.handle(event)

    def _watch_writer(self) -> None:
        """Announce when the journal becomes unwritable, and when it is writable again."""
        why = self.stalled
        if why and self._stall is None:
            self._stall = CommitsResumed(reason=why, since=self.now())
            log.warning("journal cannot be written, refusing submissions", why=why)
            notify(f"STATUS=the journal cannot be written: {why}")
        elif not why and self._stall is not None:
            log.info("journal is writable again", was=self._stall.reason)
            notify("STATUS=")
            self.handle(self._stall)
            self._stall = None

    def close(self) -> None:
        """Make all handled inputs durable, save a snapshot of the state, and stop."""
        self._writer.close()
        self.reader.close()
        if self.tail.inputs and not self._torn and self._writer.durable == self.last:
            try:
                save_state(self.path, self.reactor, self.last, self._last_at)
            except JournalError as error:
                log.warning("snapshot of the state failed", why=str(error))


def _skipped(event: Input, error: Exception) -> InputSkipped:
    reported = event if isinstance(event, NodeReported) else None
    return InputSkipped(
        what=type(event).__name__,
        error=repr(error)[:1000],
        node=reported.node if reported else None,
        boot=reported.boot if reported else None,
        seq=reported.seq if reported else 0,
    )


def _run_effect(effect: Callable[[], None]) -> None:
    try:
        effect()
    except Exception:
        log.exception("command failed")
