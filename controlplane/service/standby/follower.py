"""Side of a standby: it copies the journal and the files, and claims the lease when it is free."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import structlog

from controlplane.client.connection import RequestChannel
from controlplane.journal.backup import adopt
from controlplane.journal.database import checksum, input_from
from controlplane.journal.releases import code_of, own_release
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.file_keeper import JournalKeeper
from controlplane.service.settings import JournalSettings, StandbySettings
from controlplane.service.standby import files
from controlplane.service.standby.lease import Held, LeaseError, LeaseStore, Record, claim
from schemas.codec import TO_STANDBY
from schemas.errors import OnesError, UnavailableError, UnreachableError
from schemas.host.logging import notify
from schemas.ids import Seconds, Term
from schemas.transport.sockets import Link
from schemas.wire import Message
from schemas.wire import standby as wire

log = structlog.get_logger("standby")
REPLY_S: Final = 1.0  # until a request is repeated
LIMIT_S: Final = 3.0  # until the active controller counts as absent
COPY_LIMIT_S: Final = 600.0  # for the first piece of a copy of the journal
PAUSE_S: Final = 0.5
MIRROR_S: Final = 1.0  # between two listings of changed files
WHOLE_S: Final = 60.0  # between two listings of all files
INCOMING: Final = "standby-incoming.copy"
COPYING: Final = ".copying"
M = TypeVar("M", bound=Message)


class OtherReleaseError(OnesError):
    """Raised when the active controller runs another release, whose code is at `path`."""

    def __init__(self, release: str, path: Path) -> None:
        super().__init__(f"the active controller runs release {release}")
        self.path = path


@dataclass(kw_only=True, eq=False)
class Follower:
    """Standby that becomes ready to go on with the cluster, and then claims the lease."""

    host: str
    folder: Path  # state folder
    link: Link
    server_key: bytes  # public key that all controllers share
    store: LeaseStore
    settings: StandbySettings
    journal_settings: JournalSettings
    commit_loop: CommitLoop
    _channel: RequestChannel | None = None
    _active: str = ""  # host of the active controller
    _heard_at: float = -1e9  # its last reply, monotonic
    _term: Term = Term(0)  # of the active controller
    _seen: int = 0
    _stored: int = 0
    _mirrored: bool = False
    _urgent: deque[tuple[int, str]] = field(default_factory=deque)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _fetched: set[str] = field(default_factory=set)  # since the last listing began
    _extended: set[str] = field(default_factory=set)  # output that this process has followed
    _said: dict[str, str] = field(default_factory=dict)

    async def until_elected(self) -> Held:
        """Follow the active controller until this one has claimed the lease.

        Raises:
            JournalError: if the own journal cannot be written, or belongs to another cluster.
            OtherReleaseError: if the active controller runs another release.
        """
        works = self._keep_copy(), self._fetch_urgent(), self._mirror()
        tasks: list[asyncio.Task[None]] = [asyncio.create_task(work) for work in works]
        election = asyncio.create_task(self._elect())
        try:
            await asyncio.wait([*tasks, election], return_when=asyncio.FIRST_COMPLETED)
            for work in tasks:
                if work.done():
                    work.result()
            return await election
        finally:
            for task in (*tasks, election):
                task.cancel()
            await asyncio.gather(*tasks, election, return_exceptions=True)
            if self._channel is not None:
                self._channel.close()

    # --- the lease

    async def _elect(self) -> Held:
        while True:
            try:
                held = await self.store.read()
                self._follow_host(held.record)
                record = claim(
                    held, self.host, has_inputs=self.commit_loop.last > 0,
                    is_first=self.host == self.settings.hosts[0],
                )  # fmt: skip
                if self._heard_from(held.record.holder):
                    pass  # it is alive, and will renew its lease
                elif isinstance(record, Record):
                    version = await self.store.replace(held.version, record, self.settings.lease_s)
                    if version is not None:
                        log.info("lease claimed", term=record.term, last=self.commit_loop.last)
                        return Held(record=record, version=version, expired=False)
                elif not self._active or held.expired:
                    self._say("lease", record)
            except LeaseError as error:
                self._say("lease", error.message)
            await asyncio.sleep(self.settings.lease_s / 6)

    def _heard_from(self, holder: str) -> bool:
        """True if the holder of the lease has just replied, as after a restart of the store."""
        age_s = asyncio.get_running_loop().time() - self._heard_at
        return holder == self._active and age_s < self.settings.silence_s

    def _say(self, about: str, what: str) -> None:
        """Log and report a state of the lease, the journal or the files once."""
        if what != self._said.get(about):
            self._said[about] = what
            log.info("standby", **{about: what})
            notify(f"STATUS=standby: {what}")

    def _follow_host(self, record: Record) -> None:
        if record.holder in {self._active, "", self.host}:
            return
        if self._channel is not None:
            self._channel.close()
        address = f"tcp://{record.holder}:{self.settings.port}"
        socket = self.link.connect("DEALER", address, self.server_key, prompt=True)
        self._channel, self._active = RequestChannel(socket, TO_STANDBY), record.holder
        self._news.set()

    async def _call(self, request: Message, kind: type[M], limit_s: float = LIMIT_S) -> M:
        while self._channel is None:
            await asyncio.sleep(PAUSE_S)
        reply = await self._channel.call(request, min(limit_s, REPLY_S), limit_s)
        if not isinstance(reply, kind):
            raise UnavailableError(f"{self._active} replied with {type(reply).__name__}")
        return reply

    # --- the journal

    async def _keep_copy(self) -> None:
        keeper = asyncio.create_task(self._keep_journal())
        failure = asyncio.create_task(self.commit_loop.failure())
        try:
            while not failure.done():
                try:
                    if await self._pull():
                        for task in (keeper, failure):
                            task.cancel()
                        await self._copy_journal()
                        keeper = asyncio.create_task(self._keep_journal())
                        failure = asyncio.create_task(self.commit_loop.failure())
                except UnreachableError:
                    self._say("journal", f"{self._active} does not reply")
                except UnavailableError as error:
                    self._say("journal", error.message)
                    await asyncio.sleep(PAUSE_S)
            raise failure.result()
        finally:
            keeper.cancel()
            failure.cancel()

    async def _keep_journal(self) -> None:
        path = self.commit_loop.path
        code = code_of(path, own_release())
        await JournalKeeper(self.commit_loop, path, self.journal_settings, code).run()

    async def _pull(self) -> bool:
        """Store the next inputs. Return True if a copy of the whole journal is needed."""
        loop = self.commit_loop
        request = wire.PullInputs(
            host=self.host, release=own_release(), journal=loop.journal, after=loop.last,
            crc=loop.reader.checksum_of(loop.last) or 0, term=self._term, seen=self._seen,
            files=self._stored, mirrored=self._mirrored,
        )  # fmt: skip
        reply = await self._call(request, wire.Inputs)
        if reply.term < self._term:
            raise UnavailableError(f"{self._active} has the outdated term {reply.term}")
        self._heard_at = asyncio.get_running_loop().time()
        if reply.term > self._term:
            self._term, self._seen, self._stored = reply.term, reply.files, reply.files
            self._mirrored = False
            self._urgent.clear()
        if reply.release != own_release():
            await self._use_release(reply.release)
        if reply.copy:
            return True
        loop.set_clock(reply.now)
        self._announce(reply)
        return bool(reply.rows) and reply.after == loop.last and not await self._store(reply)

    def _announce(self, reply: wire.Inputs) -> None:
        first = reply.files - len(reply.paths) + 1
        for number, path in enumerate(reply.paths, first):
            if number > self._seen:
                self._urgent.append((number, path))
        self._seen = max(self._seen, reply.files)
        self._news.set()

    async def _store(self, reply: wire.Inputs) -> bool:
        """Handle inputs and make them durable. Return False if they lead to another state here."""
        loop = self.commit_loop
        for number, row in enumerate(reply.rows, reply.after + 1):
            if checksum(number, row.at, row.body) != row.crc:
                raise UnavailableError(f"input {number} was damaged on the way")
            loop.follow(input_from(row.body), row.at, row.body)
        await loop.caught_up()
        events = loop.reactor.state.feed_seq
        if reply.last_event not in {0, events}:
            log.error("inputs lead to other events", here=events, there=reply.last_event)
            return False
        self._say("journal", f"follows {self._active}")
        return True

    async def _use_release(self, release: str) -> None:
        """Go on with the code of the active controller's release, once it is copied.

        Raises:
            OtherReleaseError: if it is.
        """
        path = code_of(self.commit_loop.path, release)
        if path is None:
            raise UnavailableError(f"waits for the code of release {release}")
        raise OtherReleaseError(release, path)

    async def _copy_journal(self) -> None:
        """Replace the own journal by a copy of the active controller's.

        Raises:
            LostInputsError: if the own journal belongs to another cluster.
        """
        self._say("journal", f"copies the journal of {self._active}")
        path, offset, total, jobs = self.folder / INCOMING, 0, 1, 0
        with path.open("wb") as file:
            while offset < total:
                request = wire.PullCopy(host=self.host, offset=offset)
                limit_s = LIMIT_S if offset else COPY_LIMIT_S
                piece = await self._call(request, wire.CopyPiece, limit_s)
                if piece.offset != offset:
                    continue
                file.write(piece.data)
                offset, total, jobs = offset + len(piece.data), piece.total, piece.jobs
            file.flush()
            os.fsync(file.fileno())
        self.commit_loop.close()
        journal = self.commit_loop.path
        adopt(path, journal, jobs)
        self.commit_loop = CommitLoop(journal)
        self._mirrored = False

    # --- files

    async def _fetch_urgent(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._urgent:
                number, path = self._urgent[0]
                try:
                    await self._fetch(path)
                except (OSError, OnesError) as error:
                    self._say("files", f"cannot copy {path}: {error}")
                    await asyncio.sleep(PAUSE_S)
                    continue
                if self._urgent and self._urgent[0] == (number, path):
                    self._urgent.popleft()
                    self._stored = number

    async def _mirror(self) -> None:
        since, whole_at, loop = Seconds(0.0), 0.0, asyncio.get_running_loop()
        while True:
            is_whole = not self._mirrored or loop.time() >= whole_at
            try:
                term = self._term
                since = await self._mirror_once(
                    Seconds(0.0) if is_whole else since, is_whole=is_whole
                )
                if is_whole:
                    whole_at = loop.time() + WHOLE_S
                    self._mirrored = term == self._term and bool(term)
                self._say("files", f"follows {self._active}")
            except (OSError, OnesError) as error:
                self._say("files", f"cannot copy files: {error}")
            await asyncio.sleep(MIRROR_S)

    async def _mirror_once(self, since: Seconds, *, is_whole: bool) -> Seconds:
        """Copy the files that changed. Return the time for the next listing."""
        self._fetched = set()
        listed, after, now = set[str](), "", Seconds(0.0)
        more = True
        while more:
            reply = await self._call(wire.PullFiles(since=since, after=after), wire.StoredFiles)
            now = now or reply.now
            for one in reply.files:
                listed.add(one.path)
                if await asyncio.to_thread(self._differs, one):
                    await self._fetch(one.path)
            more, after = reply.more, reply.files[-1].path if reply.files else ""
        if is_whole:
            for own in await asyncio.to_thread(lambda: list(files.stored_files(self.folder))):
                if own.path not in listed and own.path not in self._fetched:
                    (self.folder / own.path).unlink(missing_ok=True)
        return now

    def _differs(self, one: wire.StoredFile) -> bool:
        try:
            status = files.inside(self.folder, one.path).lstat()
        except FileNotFoundError:
            return True
        return (status.st_size, status.st_mtime_ns) != (one.size, one.mtime_ns)

    async def _fetch(self, path: str) -> None:
        """Copy a file. Output that this process has followed so far is only extended."""
        self._fetched.add(path)
        target = files.inside(self.folder, path)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        extends = path in self._extended and target.exists()
        fresh = target if extends else target.with_name(target.name + COPYING)
        offset, total, mtime_ns = fresh.stat().st_size if extends else 0, -1, 0
        with fresh.open("ab" if extends else "wb") as file:
            while total < 0 or offset < total:
                piece = await self._call(wire.PullFile(path=path, offset=offset), wire.StoredPiece)
                if piece.total < offset:  # it is gone, or was replaced
                    self._extended.discard(path)
                    total = -1
                    break
                file.write(piece.data)
                offset, total, mtime_ns = offset + len(piece.data), piece.total, piece.mtime_ns
            file.flush()
            os.fsync(file.fileno())
        if total < 0:
            fresh.unlink(missing_ok=True)
            target.unlink(missing_ok=True)
            return
        if not extends:
            fresh.rename(target)
            if path.startswith("logs/"):
                self._extended.add(path)
        os.utime(target, ns=(mtime_ns, mtime_ns))
