"""Keeps the journal short: snapshots of the state in time, and nothing longer than was asked."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from collections import deque
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from controlplane.journal.retention import Retention, forget, forget_records
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.controller_settings import JournalSettings
from schemas.ids import JobId

log = structlog.get_logger("journal_keeper")
TICK_S: Final = 1.0
TAIL_S: Final = 2.0  # of handling that a restart may have to do again
RETRY_S: Final = 60.0  # after a snapshot that could not be taken
FORGET_S: Final = 30.0  # between two looks at what is too old
RECORDS_S: Final = 600.0  # between two looks at what is too much of single jobs


class JournalKeeper:
    """Has a child take a snapshot when there is much behind the last one, and old rows deleted.

    Args:
        settings: when a snapshot is taken, and what is kept.
    """

    def __init__(self, commit_loop: CommitLoop, path: Path, settings: JournalSettings) -> None:
        self._commit_loop = commit_loop
        self._path = path
        self.use(settings)
        self._loop = asyncio.get_running_loop()
        self._not_before = 0.0  # on the loop's clock: the next snapshot
        self._forget_at = self._records_at = 0.0

    def use(self, settings: JournalSettings) -> None:
        """Go by these from now on.

        Args:
            settings: when a snapshot is taken, and what is kept.
        """
        self._snapshot_inputs = settings.snapshot_inputs
        self._keep = Retention(
            inputs_s=settings.keep_inputs_s,
            events_s=settings.keep_events_s,
            jobs_s=settings.keep_jobs_s,
            records=settings.keep_records,
            used_bytes=settings.keep_bytes,
        )

    async def run(self) -> None:
        """Do so for ever; a child that runs is ended when this is cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            now = self._loop.time()
            if self._tail_is_long() and now >= self._not_before:
                await self.take_snapshot()
            if now >= self._forget_at:
                self._forget_at = now + FORGET_S
                self._commit_loop.between_commits(self._forget)
            if now >= self._records_at:
                self._records_at = now + RECORDS_S
                jobs = deque(self._commit_loop.committed.state.jobs)
                self._commit_loop.between_commits(partial(self._forget_records, jobs))

    async def take_snapshot(self) -> None:
        """Have a child replay what came since the last snapshot, and write the next one."""
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "controlplane.journal.take_snapshot", str(self._path)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            out, error = await child.communicate()
        except asyncio.CancelledError:
            child.kill()
            await child.wait()
            raise
        if child.returncode == 0 and (number := int(out or b"0")):
            self._commit_loop.snapshot_taken(number)
        else:
            self._not_before = self._loop.time() + RETRY_S
            why = error.decode(errors="replace").strip()[-2000:]
            log.error("no snapshot of the state", code=child.returncode, why=why)

    def _tail_is_long(self) -> bool:
        tail = self._commit_loop.tail
        return tail.inputs >= self._snapshot_inputs or tail.seconds >= TAIL_S

    def _forget_records(self, jobs: deque[JobId], database: sqlite3.Connection) -> None:
        """In the writer's thread, a piece at a time as well."""
        forget_records(database, jobs, self._keep)
        if jobs:
            self._commit_loop.between_commits(partial(self._forget_records, jobs))

    def _forget(self, database: sqlite3.Connection) -> None:
        """In the writer's thread; a further piece is asked for behind what waits by then."""
        if forget(database, self._keep, self._commit_loop.now()):
            self._commit_loop.between_commits(self._forget)
