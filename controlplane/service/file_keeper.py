"""Retention of files and of the journal.

`OutputKeeper` deletes output of ended jobs, and `ArchiveKeeper` unneeded archives, by age and size.
`JournalKeeper` takes snapshots of the state regularly and deletes old rows of the journal.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from controlplane.core.state import State
from controlplane.journal.releases import SNAPSHOT_MODULE, child_command, child_environment
from controlplane.journal.retention import Retention, forget, forget_records
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.relay.log_store import LogStore
from controlplane.service.settings import JournalSettings, Store
from controlplane.service.uploads import SnapshotStore, excess_archives
from schemas.host.files import AgedFile, expired_files
from schemas.ids import JobId, Seconds

log = structlog.get_logger("file_keeper")
FIRST_RUN_S: Final = 60.0  # seconds after the start
UPLOAD_SUFFIX: Final = ".part"  # suffix of unfinished uploads
INTERVAL_S: Final = 300.0
UNLIMITED: Final = 1 << 62
GRACE_S: Final = 3600.0  # a job could still need a file that was used more recently


def files_in(folder: Path) -> list[AgedFile]:
    """Return the files of a folder. Skip files that are deleted during the scan."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            found.append(AgedFile(entry.name, status.st_size, status.st_mtime))
    return found


async def tidy_repeatedly(tidy: Callable[[Seconds], Awaitable[None]]) -> None:
    """Call `tidy` with the time, periodically until cancelled."""
    await asyncio.sleep(FIRST_RUN_S)
    while True:
        try:
            await tidy(Seconds(time.time()))
        except OSError as error:
            log.warning("deleting old files failed", why=str(error))
        await asyncio.sleep(INTERVAL_S)


@dataclass(eq=False)
class OutputKeeper:
    """Keeper of the output of ended jobs. It scans in a thread, and deletes folders one by one."""

    state: Callable[[], State]
    logs: LogStore
    settings: Store  # the next scan uses these bounds

    async def tidy(self, now: Seconds) -> None:
        """Delete output that exceeds its age or size bounds."""
        settings = self.settings
        output = await asyncio.to_thread(self.logs.usage)
        candidates = [file for seen in output if (file := self._of_ended_job(seen)) is not None]
        for file in expired_files(candidates, settings.keep_logs_s, settings.keep_logs_bytes, now):
            self.logs.forget(file.name)
            await asyncio.sleep(0)

    def _of_ended_job(self, seen: AgedFile) -> AgedFile | None:
        """Return an output file with the job's end time, or None if the job has not ended."""
        job = self.state().jobs.get(JobId(seen.name.rpartition(".")[0]))
        if job is None:
            return seen
        return seen._replace(at=max(seen.at, job.accounting.since)) if job.ended else None


@dataclass(eq=False)
class ArchiveKeeper:
    """Keeper of archives. It scans in a thread, and deletes files one by one."""

    state: Callable[[], State]
    archives: SnapshotStore
    settings: Store  # the next scan uses these bounds

    async def tidy(self, now: Seconds) -> None:
        """Delete archives and unfinished uploads that exceed their age or size bounds."""
        settings = self.settings
        archives = await asyncio.to_thread(files_in, self.archives.folder)
        for file in archives:
            if file.name.endswith(UPLOAD_SUFFIX) and now - file.at > settings.keep_uploads_s:
                self.archives.forget(file.name)
        used = {self.state().jobs[name].snapshot for name in self.state().active}
        candidates = [one for one in archives if one.name not in used and now - one.at > GRACE_S]
        old = {
            file.name
            for file in expired_files(candidates, settings.keep_archives_s, UNLIMITED, now)
        }
        senders = await asyncio.to_thread(self.archives.senders.all)
        left = [file for file in candidates if file.name not in old]
        much = excess_archives(left, settings.keep_archives_bytes, senders)
        for name in (*old, *(file.name for file in much)):
            self.archives.forget(name)
            await asyncio.sleep(0)


journal_log = structlog.get_logger("journal_keeper")
TICK_S: Final = 1.0
TAIL_S: Final = 2.0  # handling time that a restart would have to repeat
RETRY_S: Final = 60.0  # after a failed snapshot
FORGET_S: Final = 30.0  # between deletions of old rows
RECORDS_S: Final = 600.0  # between deletions of excess records of jobs


class JournalKeeper:
    """Keeper that deletes old rows, and starts a child to take a snapshot after many inputs.

    The child runs `code`, a zip file, or the installed code if `code` is None.
    """

    def __init__(
        self,
        commit_loop: CommitLoop,
        path: Path,
        settings: JournalSettings,
        code: Path | None = None,
    ) -> None:
        self._commit_loop = commit_loop
        self._path = path
        self._code = code
        self.use(settings)
        self._loop = asyncio.get_running_loop()
        newest = commit_loop.reader.snapshots()
        self.snapshot_at = newest[0].at if newest else None  # time of the newest; None: none
        self._snapshot_input = newest[0].input if newest else 0  # number of its last input
        self.failures = 0  # of snapshots
        self._not_before = 0.0  # event loop time of the next snapshot, at the earliest
        self._forget_at = self._records_at = 0.0

    def use(self, settings: JournalSettings) -> None:
        """Apply these settings from now on."""
        self._snapshot_inputs = settings.snapshot_inputs
        self._keep = Retention(
            inputs_s=settings.keep_inputs_s,
            events_s=settings.keep_events_s,
            jobs_s=settings.keep_jobs_s,
            records=settings.keep_records,
            used_bytes=settings.keep_bytes,
        )

    async def run(self) -> None:
        """Maintain the journal until cancelled. Cancelling kills a running child."""
        while True:
            await asyncio.sleep(TICK_S)
            now = self._loop.time()
            if self._is_snapshot_due() and now >= self._not_before:
                await self.take_snapshot()
            if now >= self._forget_at:
                self._forget_at = now + FORGET_S
                self._commit_loop.between_commits(self._forget)
            if now >= self._records_at:
                self._records_at = now + RECORDS_S
                jobs = deque(self._commit_loop.committed.state.jobs)
                self._commit_loop.between_commits(partial(self._forget_records, jobs))

    async def take_snapshot(self) -> None:
        """Run a child that replays the inputs since the last snapshot and writes the next one."""
        child = await asyncio.create_subprocess_exec(
            *child_command(SNAPSHOT_MODULE, str(self._path)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=child_environment(self._code),
        )
        try:
            out, error = await child.communicate()
        except asyncio.CancelledError:
            child.kill()
            await child.wait()
            raise
        if child.returncode == 0 and (number := int(out or b"0")):
            self._commit_loop.snapshot_taken(number)
            self.snapshot_at = self._commit_loop.now()
            self._snapshot_input = number
        else:
            self._not_before = self._loop.time() + RETRY_S
            self.failures += 1
            why = error.decode(errors="replace").strip()[-2000:]
            journal_log.error("snapshot of the state failed", code=child.returncode, why=why)

    def _is_snapshot_due(self) -> bool:
        """True if a restart would repeat much, and the last snapshot is wholly acknowledged.

        So the relay can start from at least one of the two snapshots that are kept.
        """
        tail = self._commit_loop.tail
        if self._commit_loop.acknowledged < self._snapshot_input:
            return False
        return tail.inputs >= self._snapshot_inputs or tail.seconds >= TAIL_S

    def _forget_records(self, jobs: deque[JobId], database: sqlite3.Connection) -> None:
        """Delete excess records of some jobs in the writer thread, and schedule the other jobs."""
        forget_records(database, jobs, self._keep)
        if jobs:
            self._commit_loop.between_commits(partial(self._forget_records, jobs))

    def _forget(self, database: sqlite3.Connection) -> None:
        """Delete some old rows in the writer thread. If more are left, schedule another call."""
        if forget(database, self._keep, self._commit_loop.now()):
            self._commit_loop.between_commits(self._forget)
