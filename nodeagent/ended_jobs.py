"""Clean-up of files that ended jobs left on a node. They are marked, then deleted by age and size.

A mark is a file `.ended/JOB` next to the job's folder, so that the mark survives crashes and is
visible on every node that shares the folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Container, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog

from nodeagent.folders import NodeFolders
from nodeagent.job_folders import MARK
from nodeagent.owned_files import bytes_below, remove_tree
from nodeagent.settings import AgentSettings
from nodeagent.states import JOB
from schemas.host.files import AgedFile, expired_files
from schemas.ids import JobId, stated_number

log = structlog.get_logger("ended_jobs")
leftovers_log = structlog.get_logger("leftovers")
MARKS: Final = ".ended"
MIN_AGE_FOR_SIZE_S: Final = 3600.0  # younger folders are deleted by age only, not by size
MAX_UNMARKED: Final = 2000  # jobs that a hello reports
MIN_UNREPORTED_AGE_S: Final = 7 * 86400.0  # age of a folder whose job's end was not reported
FIRST_CHECK_S: Final = 60.0  # after the start; by then the controller has named the active jobs
FIND_TIMEOUT_S: Final = 2.0
MAX_INTERVAL_S: Final = 600.0  # longest interval
MIN_INTERVAL_S: Final = 10.0
MIN_STATES_AGE_S: Final = 3600.0  # for sweep states, because graduated trials start from them


class KeepLimits(NamedTuple):
    """Limits of the kept files of ended jobs."""

    seconds: float  # after a job's end
    bytes: int  # of all folders together


@dataclass(frozen=True, slots=True)
class Leftovers:
    """A folder that contains one folder for each job."""

    root: Path
    shared: bool = False  # True: used by other nodes too, so this node does not know all jobs in it
    marker_file: str = ""  # only a folder with this file belongs to a job; empty: every folder does

    def note(self, job: JobId, *, ended: bool) -> None:
        """Mark a job as ended, unless it is marked already. If `ended` is False, remove the mark.

        A job without a folder here gets no mark.

        Raises:
            OSError: if the disk cannot store the mark.
        """
        path = self.root / MARKS / job
        if not ended:
            path.unlink(missing_ok=True)
        elif (self.root / job).is_dir():
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.touch(exist_ok=False)

    def delete(
        self, keep: KeepLimits, busy: Container[str], now: float, sizes: dict[str, AgedFile]
    ) -> list[str]:
        """Delete folders of jobs that ended too long ago. Then delete the oldest to limit the size.

        Jobs in `busy` are kept. `sizes` caches sizes from earlier calls. Return the jobs whose
        folders were deleted, oldest first.

        Raises:
            OSError: if the folder cannot be read.
        """
        found: dict[str, AgedFile] = {}
        for name, at in self._ended(busy, now):
            known = sizes.get(name)
            if known is None or known.at != at:
                known = AgedFile(name, bytes_below(self.root / name), at)
            found[name] = known
        sizes.clear()
        sizes.update(found)
        least_s = min(MIN_AGE_FOR_SIZE_S, keep.seconds)
        may_go = [one for one in found.values() if now - one.at > least_s]
        gone = expired_files(may_go, keep.seconds, keep.bytes, now)
        for one in gone:
            folder = self.root / one.name
            remove_tree(folder)
            if folder.exists():
                leftovers_log.warning("folder of an ended job not deleted", folder=str(folder))
            else:
                (self.root / MARKS / one.name).unlink(missing_ok=True)
                del sizes[one.name]
        return [one.name for one in gone]

    def unmarked(self) -> list[JobId]:
        """Return the most recently changed jobs that have a folder and no mark here."""
        found: list[tuple[float, JobId]] = []
        with contextlib.suppress(OSError):
            marks = dict(_marks(self.root / MARKS))
            with os.scandir(self.root) as entries:
                found.extend(
                    (at, JobId(entry.name))
                    for entry in entries
                    if entry.name not in marks and (at := self._changed(entry)) is not None
                )
        return [job for _, job in sorted(found, reverse=True)[:MAX_UNMARKED]]

    def marked(self) -> list[JobId]:
        """Return the jobs with a mark here. If the marks cannot be read, return none."""
        with contextlib.suppress(OSError):
            return [JobId(name) for name, _ in _marks(self.root / MARKS)]
        return []

    def _ended(self, busy: Container[str], now: float) -> Iterator[tuple[str, float]]:
        marks = dict(_marks(self.root / MARKS))
        with os.scandir(self.root) as entries:
            for entry in entries:
                at = marks.pop(entry.name, None)
                if at is None:
                    at = self._changed(entry)
                    at = at if at is not None and now - at > MIN_UNREPORTED_AGE_S else None
                if at is None or not entry.is_dir(follow_symlinks=False):
                    continue
                if entry.name not in busy:
                    yield entry.name, at
        for name in marks:
            (self.root / MARKS / name).unlink(missing_ok=True)

    def _changed(self, entry: os.DirEntry[str]) -> float | None:
        if self.shared or not JOB.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
            return None
        if self.marker_file and not Path(entry.path, self.marker_file).exists():
            return None
        return entry.stat(follow_symlinks=False).st_mtime


def _names(root: Path) -> list[str]:
    """Return the names of the files in a folder; none if the folder cannot be read."""
    with contextlib.suppress(OSError):
        return [path.name for path in root.iterdir()]
    return []


def _marks(folder: Path) -> Iterator[tuple[str, float]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                yield entry.name, entry.stat(follow_symlinks=False).st_mtime


class EndedJobs:
    """Working directories, sweep states and checkpoints of ended jobs. Each kind has its limits."""

    def __init__(
        self,
        folders: NodeFolders,
        settings: Callable[[], AgentSettings],
        busy: Callable[[], set[JobId]],
    ) -> None:
        def work() -> KeepLimits:
            return KeepLimits(settings().keep_work_s, settings().keep_work_bytes)

        def states() -> KeepLimits:
            return work()._replace(seconds=max(settings().keep_work_s, MIN_STATES_AGE_S))

        def checkpoints() -> KeepLimits:
            return KeepLimits(settings().keep_checkpoints_s, settings().keep_checkpoints_bytes)

        self._busy = busy
        self.highest = 0  # highest number of a job that had files here, ended or not
        self._roots = (folders.work, folders.all_states)  # `checkpoints` may have other folders
        self._found: set[JobId] = set()  # jobs found at the start, without a delta since then
        self._own = (Leftovers(folders.work, marker_file=MARK), Leftovers(folders.all_states))
        self._keepers = (
            Keeper(self._own[0], work, busy),
            Keeper(self._own[1], states, busy),
            Keeper(Leftovers(folders.checkpoints, shared=True), checkpoints, busy),
        )

    async def find(self) -> list[JobId]:
        """Look for folders of jobs, and return the ended sweeps. On a slow disk, return none."""
        with contextlib.suppress(TimeoutError):
            found, ended = await asyncio.wait_for(asyncio.to_thread(self._look), FIND_TIMEOUT_S)
            self._found = set(found)
            return ended
        return []

    def _look(self) -> tuple[list[JobId], list[JobId]]:
        names = [name for root in self._roots for name in _names(root)]
        self.highest = max(map(stated_number, names), default=0)
        return [job for area in self._own for job in area.unmarked()], self._own[1].marked()

    @property
    def unended(self) -> tuple[JobId, ...]:
        """The jobs that have files here but no record of their end. A hello reports them."""
        return tuple(sorted(self._found | self._busy()))

    def note(self, job: JobId, *, ended: bool) -> None:
        """Record that a job has ended for good, or that it starts."""
        self._found.discard(job)
        self.highest = max(self.highest, stated_number(job))
        for keeper in self._keepers:
            keeper.note(job, ended=ended)

    def tasks(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """Return the tasks that keep the folders within their limits until cancelled."""
        return [keeper.run for keeper in self._keepers]


class Keeper:
    """Task that keeps one folder within its limits. Its file operations run in a thread."""

    def __init__(
        self, area: Leftovers, keep: Callable[[], KeepLimits], busy: Callable[[], set[JobId]]
    ) -> None:
        self._area = area
        self._keep = keep
        self._busy = busy
        self._noted: dict[JobId, bool] = {}
        self._wake = asyncio.Event()
        self._sizes: dict[str, AgedFile] = {}

    def note(self, job: JobId, *, ended: bool) -> None:
        """See `EndedJobs.note`."""
        self._noted.pop(job, None)
        self._noted[job] = ended
        self._wake.set()

    async def run(self) -> None:
        """Mark and delete until cancelled."""
        loop = asyncio.get_running_loop()
        look_at = loop.time() + FIRST_CHECK_S
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), look_at - loop.time())
            self._wake.clear()
            keep = self._keep()
            if (due := loop.time() >= look_at) or not keep.seconds:
                look_at = loop.time() + min(MAX_INTERVAL_S, max(keep.seconds, MIN_INTERVAL_S))
            await self.turn(keep, look=due or not keep.seconds)

    async def turn(self, keep: KeepLimits, *, look: bool) -> None:
        """Write pending marks, and keep failed ones for later. With `look`, also delete folders."""
        noted, self._noted = self._noted, {}
        left = await asyncio.to_thread(self._mark, noted)
        self._noted = {**left, **self._noted}
        if look:
            await asyncio.to_thread(self._delete, keep, self._busy())

    def _mark(self, noted: dict[JobId, bool]) -> dict[JobId, bool]:
        left = dict(noted)
        try:
            for job, ended in noted.items():
                self._area.note(job, ended=ended)
                del left[job]
        except OSError as error:
            log.warning("ends of jobs not recorded", ended=noted, why=str(error))
        return left

    def _delete(self, keep: KeepLimits, busy: set[JobId]) -> None:
        try:
            gone = self._area.delete(keep, busy, time.time(), self._sizes)
        except FileNotFoundError:  # the folder was never used
            return
        except OSError as error:
            log.warning("folders of ended jobs not deleted", why=str(error))
            return
        if gone:
            log.info("folders of ended jobs deleted", folder=str(self._area.root), jobs=gone)
