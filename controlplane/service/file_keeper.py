"""Files of the past go by age and size: output of ended jobs, archives that nobody needs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from controlplane.core.state import State
from controlplane.service.archive_senders import beyond_share
from controlplane.service.controller_settings import Store
from controlplane.service.logs.log_store import LogStore
from controlplane.service.workdir_snapshots import SnapshotStore
from schemas.ids import JobId, Seconds
from schemas.retention import FileSeen, outdated

log = structlog.get_logger("file_keeper")
FIRST_S: Final = 60.0  # after the start
PART: Final = ".part"  # of an upload that is not complete
LOOK_S: Final = 300.0
MUCH: Final = 1 << 62
YOUNG_S: Final = 3600.0  # what changed since may be asked for any moment


def seen_in(folder: Path) -> list[FileSeen]:
    """What a folder has; what disappears meanwhile is left out.

    Raises:
        OSError: if it cannot be read.
    """
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            found.append(FileSeen(entry.name, status.st_size, status.st_mtime))
    return found


class FileKeeper:
    """Looks at the folders from time to time, in a thread; deletes in the loop, a file at a time.

    Args:
        state: the core's committed state now.
    """

    def __init__(
        self,
        state: Callable[[], State],
        logs: LogStore,
        archives: SnapshotStore,
        settings: Store,
    ) -> None:
        self._state = state
        self._logs = logs
        self._archives = archives
        self._settings = settings

    def use(self, settings: Store) -> None:
        """Keep as much as this from the next look on."""
        self._settings = settings

    async def run(self) -> None:
        """Do so for ever."""
        await asyncio.sleep(FIRST_S)
        while True:
            try:
                await self.tidy(Seconds(time.time()))
            except OSError as error:
                log.warning("files that are too old could not be deleted", why=str(error))
            await asyncio.sleep(LOOK_S)

    async def tidy(self, now: Seconds) -> None:
        """Delete what is too old or too much.

        Args:
            now: seconds since the epoch.

        Raises:
            OSError: if a folder cannot be read, or a file not be deleted.
        """
        settings = self._settings
        output = await asyncio.to_thread(seen_in, self._logs.folder)
        mine = [file for seen in output if (file := self._of_ended_job(seen)) is not None]
        for file in outdated(mine, settings.keep_logs_s, settings.keep_logs_bytes, now):
            self._logs.forget(file.name)
            await asyncio.sleep(0)
        archives = await asyncio.to_thread(seen_in, self._archives.folder)
        for file in archives:
            if file.name.endswith(PART) and now - file.at > settings.keep_uploads_s:
                self._archives.forget(file.name)
        used = {self._state().jobs[name].snapshot for name in self._state().active}
        mine = [one for one in archives if one.name not in used and now - one.at > YOUNG_S]
        old = {file.name for file in outdated(mine, settings.keep_archives_s, MUCH, now)}
        senders = await asyncio.to_thread(self._archives.senders.all)
        left = [file for file in mine if file.name not in old]
        much = beyond_share(left, settings.keep_archives_bytes, senders)
        for name in (*old, *(file.name for file in much)):
            self._archives.forget(name)
            await asyncio.sleep(0)

    def _of_ended_job(self, seen: FileSeen) -> FileSeen | None:
        """A file of output, with the time of its job's end; None: the job goes on."""
        job = self._state().jobs.get(JobId(seen.name.rpartition(".")[0]))
        if job is None:
            return seen
        return seen._replace(at=max(seen.at, job.accounting.since)) if job.ended else None
