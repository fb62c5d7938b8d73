"""Side of the active controller: it keeps the lease and serves its standbys."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from controlplane.journal.backup import copy_database
from controlplane.journal.database import JournalError
from controlplane.journal.mark import read_mark
from controlplane.journal.releases import own_release
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.standby import files
from controlplane.service.standby.lease import Held, LeaseError, LeaseStore, Record
from controlplane.service.standby.quorum import Quorum
from schemas.codec import FROM_STANDBY, encode
from schemas.errors import OnesError
from schemas.host.logging import Audit, notify
from schemas.ids import Seconds
from schemas.transport.sockets import Incoming, Socket
from schemas.wire import Message
from schemas.wire import standby as wire

log = structlog.get_logger("standby")
CONTROLLER: Final = "controller"  # role of the owner of the server's key
PAGE_BYTES: Final = 1 << 20
POLL_S: Final = 0.3  # after which a pull without news is answered
TICK_S: Final = 0.1
MAX_URGENT: Final = 10_000  # urgent files that are remembered for standbys that lack them
COPY: Final = "standby-{}.copy"  # file in the state folder


class LeaseLostError(OnesError):
    """Raised when another controller has claimed the lease. This one becomes a standby."""

    code = "lease_lost"


@dataclass(slots=True)
class _Poll:
    incoming: Incoming
    pull: wire.PullInputs
    until: float  # monotonic


@dataclass(kw_only=True, eq=False)
class ActiveSide:
    """Holder of the lease. Inputs are acknowledged once all required hosts have them."""

    host: str
    hosts: tuple[str, ...]  # of all controllers
    socket: Socket
    store: LeaseStore
    held: Held  # record with this controller as its holder
    lease_s: float
    silence_s: float
    commit_loop: CommitLoop
    folder: Path  # state folder
    audit: Audit
    problem: str = ""  # why the lease cannot be changed at the moment
    _polls: dict[str, _Poll] = field(default_factory=dict)
    _urgent: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_URGENT))
    _stored: asyncio.Condition = field(default_factory=asyncio.Condition)
    _copies: dict[str, asyncio.Task[int]] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Make the commit loop wait for the required hosts."""
        self.quorum = Quorum(self.host, self.silence_s, self.commit_loop.last)
        self.lost: asyncio.Future[LeaseLostError] = asyncio.get_running_loop().create_future()
        self._files = 0  # number of the last urgent file
        self._wake = asyncio.Event()
        self.commit_loop.on_durable = self._answer_polls
        self.commit_loop.replicated = self.quorum.through
        self.commit_loop.held_up = self._held_up

    @property
    def works(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Tasks that run until cancelled, by name."""
        return {"lease": self.keep_lease, "standbys": self.serve, "pulls": self.watch_polls}

    # --- what the rest of the controller calls

    def announce(self, path: Path) -> None:
        """Let standbys copy a file at once that was just written or replaced."""
        self._files += 1
        self._urgent.append(str(path.relative_to(self.folder)))
        self._answer_polls()

    def announce_before(self, path: Path) -> None:
        """Announce a small file that all later inputs need, so that they wait for its copies."""
        self.announce(path)
        self.quorum.before.append((self.commit_loop.last, self._files))

    async def files_stored(self) -> None:
        """Wait until all required hosts have the files that were announced so far."""
        number = self._files
        async with self._stored:
            await self._stored.wait_for(lambda: self.quorum.has_files(number))

    def missing_inputs(self) -> dict[str, int]:
        """Return how many inputs each standby has not stored, as far as this controller knows."""
        stored = {host: one.after for host, one in self.quorum.standbys.items()}
        durable = self.commit_loop.durable
        return {host: durable - stored.get(host, 0) for host in self.hosts if host != self.host}

    def _held_up(self) -> str:
        """Return why inputs are not acknowledged at the moment, or ""."""
        silent = self.quorum.silent(asyncio.get_running_loop().time()) if self.problem else []
        if not silent:
            return ""
        return (
            f"standby {silent[0]} does not reply, and the lease cannot be changed: {self.problem}"
        )

    # --- the lease

    async def keep_lease(self) -> None:
        """Renew the lease, and record the hosts that have everything, until the lease is lost."""
        loop = asyncio.get_running_loop()
        renew_at = 0.0
        while not self.lost.done():
            wanted = self.quorum.wanted(self.commit_loop.durable, loop.time())
            if wanted != self.quorum.listed or loop.time() >= renew_at:
                renew_at = loop.time() + self.lease_s / 3
                try:
                    await self._record(wanted)
                except LeaseError as error:
                    self._note_problem(error.message)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TICK_S)
            self._wake.clear()

    async def _record(self, wanted: frozenset[str]) -> None:
        """Replace the record of the lease by one that lists `wanted`.

        Raises:
            LeaseError: if the store does not reply. Then the record may have been replaced.
        """
        record = Record(
            holder=self.host, term=self.held.record.term, complete=tuple(sorted(wanted))
        )
        before = self.quorum.listed
        self.quorum.listed = before | wanted
        version = await self.store.replace(self.held.version, record, self.lease_s)
        if version is None:
            found = await self.store.read()
            own = found.record
            if found.version and (own.holder, own.term) != (self.host, record.term):
                self._lose(f"{own.holder or 'nobody'} holds the lease, term {own.term}")
                return
            if own.successor not in {"", self.host}:
                self.held = found
                self._lose(f"{own.successor} is to take over")
                return
            self.held = Held(record=record, version=found.version, expired=False)
            self.quorum.listed |= frozenset(own.complete)
            self._wake.set()
            return
        self.held = Held(record=record, version=version, expired=False)
        if wanted != before:
            log.info("hosts with all inputs", hosts=sorted(wanted))
            notify(f"STATUS=active, standbys: {', '.join(sorted(wanted - {self.host})) or 'none'}")
        self.quorum.listed = wanted
        self._note_problem("")
        await self._advance()

    def _lose(self, why: str) -> None:
        if not self.lost.done():
            log.warning("lease lost, becoming a standby", why=why)
            self.lost.set_result(LeaseLostError(why))

    def _note_problem(self, why: str) -> None:
        if bool(why) != bool(self.problem):
            if why:
                log.warning("lease cannot be renewed", why=why)
            else:
                log.info("lease is renewed again")
        self.problem = why

    async def release(self) -> None:
        """Let a standby claim the lease at once. The caller has stopped all work."""
        record = msgspec.structs.replace(self.held.record, holder="")
        with contextlib.suppress(LeaseError):
            await self.store.replace(self.held.version, record, self.lease_s)
        await self.store.close()

    # --- requests of standbys

    async def serve(self) -> None:
        """Reply to standbys until cancelled."""
        async for incoming in self.socket:
            try:
                self._receive(incoming)
            except OnesError as error:
                self.audit.refused("standby", str(error), peer=str(incoming.identity))

    def _receive(self, incoming: Incoming) -> None:
        if incoming.identity is None or incoming.identity.role != CONTROLLER:
            self.audit.refused("standby", "not a controller", peer=str(incoming.identity))
            return
        request = FROM_STANDBY.decode(incoming.frames[-1])
        if isinstance(request, wire.PullInputs | wire.PullCopy) and request.host not in self.hosts:
            why = f"{request.host!r:.100} is not in standby.hosts"
            self.audit.refused("standby", why, peer=str(incoming.identity))
            return
        if isinstance(request, wire.PullInputs):
            self._pulled(incoming, request)
            return
        task = asyncio.create_task(self._answer(incoming, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _pulled(self, incoming: Incoming, pull: wire.PullInputs) -> None:
        loop = asyncio.get_running_loop()
        same = pull.term == self.held.record.term and pull.journal == self._journal
        if self._needs_copy(pull):
            same = False
        if same and pull.release == own_release():
            self.quorum.heard(
                pull.host,
                after=pull.after, files=pull.files, mirrored=pull.mirrored, now=loop.time(),
            )  # fmt: skip
            task = asyncio.create_task(self._advance())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._polls[pull.host] = _Poll(incoming, pull, loop.time() + POLL_S)
        self._answer_polls()

    async def _advance(self) -> None:
        """Acknowledge what all required hosts have."""
        self.commit_loop.release()
        async with self._stored:
            self._stored.notify_all()
        if self.quorum.wanted(self.commit_loop.durable, asyncio.get_running_loop().time()) != (
            self.quorum.listed
        ):
            self._wake.set()

    async def watch_polls(self) -> None:
        """Answer pulls without news in time, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self._answer_polls()

    def _answer_polls(self) -> None:
        now = asyncio.get_running_loop().time()
        for host, poll in list(self._polls.items()):
            reply = self._inputs(poll.pull)
            if reply.rows or reply.copy or reply.paths or now >= poll.until:
                del self._polls[host]
                self._send(poll.incoming, reply)

    @property
    def _journal(self) -> str:
        return self.commit_loop.journal

    def _needs_copy(self, pull: wire.PullInputs) -> bool:
        """True if the standby's journal is not a beginning of this one, or ends too early."""
        reader = self.commit_loop.reader
        first, last = reader.first_and_last()
        if pull.journal != self._journal or pull.after > last:
            return True
        if pull.after == 0:
            return first > 1
        return reader.checksum_of(pull.after) != pull.crc

    def _inputs(self, pull: wire.PullInputs) -> wire.Inputs:
        reader, term = self.commit_loop.reader, self.held.record.term
        seen = pull.seen if pull.term == term else self._files
        reply = wire.Inputs(
            term=term, release=own_release(), now=self.commit_loop.now(), after=pull.after,
            copy=self._needs_copy(pull), files=self._files,
            paths=tuple(self._urgent)[seen - self._files :] if seen < self._files else (),
        )  # fmt: skip
        if reply.copy:
            return reply
        rows, size = [], 0
        try:
            for _, at, body, crc in reader.input_rows(pull.after):
                rows.append(wire.InputRow(at=Seconds(at), body=body, crc=crc))
                size += len(body)
                if size > PAGE_BYTES:
                    break
            last_event = reader.last_event()
            complete = reader.first_and_last()[1] in {0, pull.after + len(rows)}
        except JournalError as error:
            log.error("inputs cannot be sent to a standby", why=str(error))  # noqa: TRY400
            return reply
        fields = {"rows": tuple(rows), "last_event": last_event if complete else 0}
        return wire.Inputs(
            **{name: getattr(reply, name) for name in reply.__struct_fields__} | fields
        )

    async def _answer(self, incoming: Incoming, request: wire.FromStandby) -> None:
        try:
            match request:
                case wire.PullCopy():
                    reply: Message = await self._copy_piece(request)
                case wire.PullFiles():
                    reply = await asyncio.to_thread(files.changed, self.folder, request)
                case wire.PullFile():
                    reply = await asyncio.to_thread(files.piece, self.folder, request)
                case _:
                    return
        except (OSError, OnesError) as error:
            log.warning("request of a standby failed", why=str(error))
            return
        self._send(incoming, reply)

    async def _copy_piece(self, request: wire.PullCopy) -> wire.CopyPiece:
        path = self.folder / COPY.format(request.host)
        running = self._copies.get(request.host)
        if running is None:
            running = asyncio.create_task(asyncio.to_thread(self._copy, path))
            self._copies[request.host] = running
        try:
            jobs = await asyncio.shield(running)
        except OnesError:
            self._copies.pop(request.host, None)
            raise
        data, total = await asyncio.to_thread(files.read_piece, path, request.offset)
        if request.offset + len(data) >= total:
            path.unlink(missing_ok=True)
            self._copies.pop(request.host, None)
        return wire.CopyPiece(offset=request.offset, total=total, jobs=jobs, data=data)

    def _copy(self, path: Path) -> int:
        """Copy the journal, and return the number of accepted jobs."""
        journal = self.commit_loop.path
        copy_database(journal, path)
        mark = read_mark(journal)
        return mark.jobs if mark else 0

    def _send(self, incoming: Incoming, reply: Message) -> None:
        self.socket.send(*incoming.frames[:-1], encode(reply))
