"""Start of a controller that shares a lease: it is a standby until it has claimed the lease."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from controlplane.journal.backup import begin_anew
from controlplane.journal.database import JournalError
from controlplane.journal.releases import child_environment, keep_own_code
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.settings import ControllerSettings, StandbySettings
from controlplane.service.standby.active import ActiveSide
from controlplane.service.standby.follower import Follower, OtherReleaseError
from controlplane.service.standby.lease import Held, LeaseStore
from controlplane.service.standby.lease_stores import open_store
from schemas.errors import OnesError
from schemas.host.logging import Audit, extended_start, notify, watchdog
from schemas.ids import Term
from schemas.transport.keys import load_keys
from schemas.transport.sockets import Link, Socket

log = structlog.get_logger("standby")
EXTENSION_US: Final = 60_000_000  # start timeout of systemd, renewed while the journal is read
FOLLOWED: Final = "ONES_FOLLOWED_RELEASE"  # set while a standby runs the code of another release


@dataclass(frozen=True)
class Elected:
    """Controller that has claimed the lease, with its journal."""

    host: str
    settings: StandbySettings
    store: LeaseStore
    held: Held
    commit_loop: CommitLoop

    @property
    def term(self) -> Term:
        """Least term with which the controller begins."""
        return self.held.record.term

    def active_side(self, socket: Socket, folder: Path, audit: Audit) -> ActiveSide:
        """Return the part that keeps the lease and serves standbys over `socket`."""
        return ActiveSide(
            host=self.host, hosts=self.settings.hosts, socket=socket, store=self.store,
            held=self.held,
            lease_s=self.settings.lease_s, silence_s=self.settings.silence_s,
            commit_loop=self.commit_loop, folder=folder, audit=audit,
        )  # fmt: skip


async def elect(settings: ControllerSettings, home: Path, stop: asyncio.Event) -> Elected | None:
    """Be a standby until the lease is claimed, or `stop` is set.

    Raises:
        SettingsError: if the keys or the lease cannot be used.
        JournalError: if the own journal cannot be used, although it may have the only inputs.
        OtherReleaseError: if the standby must go on with the code of another release.
    """
    ours, folder = settings.standby, home / settings.state
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    keep_own_code(folder / "journal.sqlite")
    keys = load_keys(home / settings.keys.server)
    store = open_store(ours.lease, ours.cluster, home)
    link = Link(keys)
    with extended_start(EXTENSION_US):
        journal = await _open_journal(folder / "journal.sqlite", settings.listen.host, store)
    follower = Follower(
        host=settings.listen.host, folder=folder, link=link, server_key=keys.public, store=store,
        settings=ours, journal_settings=settings.journal, commit_loop=journal,
    )  # fmt: skip
    notify("READY=1")
    log.info("standby ready", last=follower.commit_loop.last)
    election = asyncio.create_task(follower.until_elected())
    stopped, feeding = asyncio.create_task(stop.wait()), asyncio.create_task(watchdog())
    held: Held | None = None
    try:
        await asyncio.wait({election, stopped}, return_when=asyncio.FIRST_COMPLETED)
        held = election.result() if election.done() else None
    finally:
        for task in (election, stopped, feeding):
            task.cancel()
        await asyncio.gather(election, stopped, feeding, return_exceptions=True)
        link.close()
        if held is None:
            follower.commit_loop.close()
            await store.close()
    if held is None:
        return None
    if FOLLOWED in os.environ:  # the journal is complete; the installed release goes on
        follower.commit_loop.close()
        restart()
    return Elected(settings.listen.host, ours, store, held, follower.commit_loop)


async def _open_journal(journal: Path, host: str, store: LeaseStore) -> CommitLoop:
    """Open the own journal. If it is unusable but not needed, begin with an empty one."""
    try:
        return CommitLoop(journal)
    except JournalError as error:
        record = (await store.read()).record
        if not record.complete or host in record.complete:
            raise
        log.warning("own journal is unusable, copying the active one", why=error.message)
        begin_anew(journal)
        return CommitLoop(journal)


def restart(error: OnesError | None = None) -> None:
    """Replace this process by a new one of the same command, which is a standby at first.

    After an `OtherReleaseError`, the new process runs the code of that release.
    """
    environment = dict(os.environ)
    if isinstance(error, OtherReleaseError):
        environment |= child_environment(error.path) | {FOLLOWED: str(error.path)}
    elif followed := environment.pop(FOLLOWED, ""):
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path != followed)
    command = [sys.executable, "-P", "-m", "controlplane.service", *sys.argv[1:]]
    os.execve(sys.executable, command, environment)  # noqa: S606 - own command
