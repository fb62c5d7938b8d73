"""Files of jobs on a node: their owners, limits of running jobs, and clean-up after ended jobs.

Files of ended jobs are marked, then deleted by age and size. A mark is a file `.ended/JOB` next to
the job's folder, so that the mark survives crashes and is visible on every node that shares the
folder. `.owners/JOB` names the journal and the user of a job in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog

from nodeagent.errors import StartError
from nodeagent.folders import NodeFolders, zygote_outputs
from nodeagent.health import CLEAR_FACTOR, free_bytes
from nodeagent.job_folders import MARK
from nodeagent.owned_files import (
    SHARED_FOLDERS,
    bytes_below,
    bytes_of,
    owner_of,
    read_small,
    remove_tree,
    write_private,
)
from nodeagent.settings import AgentSettings
from nodeagent.states import JOB
from schemas.host.files import AgedFile, expired_files
from schemas.ids import JobId, stated_number

log = structlog.get_logger("ended_jobs")
leftovers_log = structlog.get_logger("leftovers")
MARKS: Final = ".ended"
OWNERS: Final = ".owners"
MIN_AGE_FOR_SIZE_S: Final = 3600.0  # younger folders are deleted by age only, not by size
MAX_UNMARKED: Final = 2000  # jobs that a hello reports
MIN_UNREPORTED_AGE_S: Final = 7 * 86400.0  # age of a folder if the job's end was not reported
FIRST_CHECK_S: Final = 60.0  # after the start; by then the controller has named the active jobs
FIND_TIMEOUT_S: Final = 2.0
MAX_INTERVAL_S: Final = 600.0  # longest interval
MIN_INTERVAL_S: Final = 10.0
MIN_STATES_AGE_S: Final = 3600.0  # for sweep states, because graduated trials start from them
DISK_INTERVAL_S: Final = 5.0  # between measurements of running jobs, and at least
MAX_ZYGOTE_OUTPUT: Final = 64 << 20  # bytes; zygotes of this library write a few lines
DISK_SHARE: Final = 20  # this multiple of a measurement's duration


class KeepLimits(NamedTuple):
    """Limits of the kept files of ended jobs."""

    seconds: float  # after a job's end
    bytes: int  # of all folders together
    reserve: int = 0  # free bytes of the file system; with less, the limits above do not matter


@dataclass(frozen=True, slots=True)
class Leftovers:
    """A folder that contains one folder for each job."""

    root: Path
    shared: bool = False  # True: used by other nodes too, so this node does not know all jobs in it
    marker_file: str = ""  # only a folder with this file belongs to a job; empty: every folder does

    def claim(self, job: JobId, user: str, journal: str) -> None:
        """Record the owner of a job's files here.

        Raises:
            StartError: if the files belong to a job of another journal with the same name.
            OSError: if the disk cannot store the record.
        """
        path = self.root / OWNERS / job
        known, _, _ = self.owner(job).partition(" ")
        if known and known != journal and (self.root / job).exists():
            what = f"{self.root / job} has files of another cluster's job {job}"
            raise StartError(what, "move them away, or submit the job again for another number")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_private(path, f"{journal} {user}".encode())

    def owner(self, job: str) -> str:
        """Return the journal and the user of a job, or "" if they are not known."""
        with contextlib.suppress(OSError):
            return read_small(self.root / OWNERS / job).decode(errors="replace")
        return ""

    def note(self, job: JobId, *, ended: bool) -> None:
        """Mark a job as ended, unless it is marked already. If `ended` is False, remove the mark.

        A job without a folder here gets no mark.
        """
        path = self.root / MARKS / job
        if not ended:
            path.unlink(missing_ok=True)
        elif (self.root / job).is_dir():
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.touch(exist_ok=False)
        else:
            (self.root / OWNERS / job).unlink(missing_ok=True)

    def is_short(self, reserve: int) -> bool:
        """True if the file system has less than `reserve` bytes left."""
        with contextlib.suppress(OSError):
            return free_bytes(self.root) < reserve
        return False

    def delete(
        self,
        keep: KeepLimits,
        busy: Container[str],
        now: float,
        sizes: dict[str, AgedFile],
        unmarked: Collection[str] | None = (),
    ) -> list[str]:
        """Delete folders of jobs that ended too long ago. Then delete the oldest to limit the size.

        If the file system has less free space than the reserve, also delete folders of the user
        with the most bytes, oldest first, until twice the reserve is free. Jobs in `busy` are kept.
        `sizes` caches sizes from earlier calls. `unmarked` has ended jobs for which no mark could
        be written; if it is None, old folders without a mark are kept. Return the jobs of the
        deleted folders.
        """
        found: dict[str, AgedFile] = {}
        for name, at in self._ended(busy, now, unmarked):
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
            self._remove(one.name, sizes)
            del found[one.name]
        if self.is_short(keep.reserve):
            gone += self._make_room(found, keep.reserve * CLEAR_FACTOR, sizes)
        return [one.name for one in gone]

    def _make_room(
        self, found: dict[str, AgedFile], wanted: int, sizes: dict[str, AgedFile]
    ) -> Iterator[AgedFile]:
        """Delete and yield folders until `wanted` bytes are free."""
        users = {name: self.owner(name).partition(" ")[2] for name in found}
        used = Counter[str]()
        for name, one in found.items():
            used[users[name]] += one.size
        while found and self.is_short(wanted):
            largest = max((users[name] for name in found), key=lambda user: used[user])
            oldest = min(
                (one for one in found.values() if users[one.name] == largest),
                key=lambda one: (one.at, one.name),
            )
            self._remove(oldest.name, sizes)
            used[largest] -= oldest.size
            yield found.pop(oldest.name)

    def _remove(self, name: str, sizes: dict[str, AgedFile]) -> None:
        folder = self.root / name
        remove_tree(folder)
        if folder.exists():
            leftovers_log.warning("folder of an ended job not deleted", folder=str(folder))
            return
        for kind in (MARKS, OWNERS):
            (self.root / kind / name).unlink(missing_ok=True)
        del sizes[name]

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

    def _ended(
        self, busy: Container[str], now: float, unmarked: Collection[str] | None
    ) -> Iterator[tuple[str, float]]:
        marks = {**dict.fromkeys(unmarked or (), now), **dict(_marks(self.root / MARKS))}
        with os.scandir(self.root) as entries:
            for entry in entries:
                at = marks.pop(entry.name, None)
                if at is None and unmarked is not None:
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


def mark_used(environments: Path, name: str) -> None:
    """Record that an environment is used now. Its age is the time since then."""
    mark = environments / MARKS / name
    mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    mark.touch()


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
        busy_environments: Callable[[], set[str]] = set,
    ) -> None:
        def work() -> KeepLimits:
            own = settings()
            return KeepLimits(own.keep_work_s, own.keep_work_bytes, own.disk_reserve_bytes)

        def states() -> KeepLimits:
            return work()._replace(seconds=max(settings().keep_work_s, MIN_STATES_AGE_S))

        def checkpoints() -> KeepLimits:
            own = settings()
            seconds, size = own.keep_checkpoints_s, own.keep_checkpoints_bytes
            return KeepLimits(seconds, size, own.disk_reserve_bytes)

        self._busy = busy
        self.highest = 0  # highest number of a job that had files here, ended or not
        self._roots = (folders.work, folders.all_states)  # `checkpoints` may have other folders
        self._found: set[JobId] = set()  # jobs found at the start, without a delta since then
        self._own = (Leftovers(folders.work, marker_file=MARK), Leftovers(folders.all_states))
        shared = Leftovers(folders.checkpoints, shared=True)
        self._areas = (*self._own, shared)
        self._keepers = (
            Keeper(self._own[0], work, busy),
            Keeper(self._own[1], states, busy),
            Keeper(shared, checkpoints, busy),
            Keeper(Leftovers(folders.environments), work, busy_environments),
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

    def claim(self, job: JobId, user: str, journal: str) -> None:
        """Record the owner of a job's files before a start. Failures of the disk are ignored.

        Raises:
            StartError: if there are files of a job of another journal with the same name.
        """
        for area in self._areas:
            with contextlib.suppress(OSError):  # the health watch reports the node
                area.claim(job, user, journal)

    def is_of_other_journal(self, job: JobId, journal: str) -> bool:
        """True if files here belong to a job with the same name from another journal."""
        known = self._own[0].owner(job).partition(" ")[0]
        return "" not in {known, journal} and known != journal

    def make_room(self) -> None:
        """Check all folders now, because a file system is full."""
        for keeper in self._keepers:
            keeper.wake()

    def tasks(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """Return the tasks that keep the folders within their limits until cancelled."""
        return [keeper.run for keeper in self._keepers]


class Keeper:
    """Task that keeps one folder within its limits. Its file operations run in a thread."""

    def __init__(
        self, area: Leftovers, keep: Callable[[], KeepLimits], busy: Callable[[], Container[str]]
    ) -> None:
        self._area = area
        self._keep = keep
        self._busy = busy
        self._noted: dict[JobId, bool] = {}
        self._early = False  # True until the controller has named the active jobs
        self._wake = asyncio.Event()
        self._sizes: dict[str, AgedFile] = {}

    def note(self, job: JobId, *, ended: bool) -> None:
        """See `EndedJobs.note`."""
        self._noted.pop(job, None)
        self._noted[job] = ended
        self._wake.set()

    def wake(self) -> None:
        """Check the folder now."""
        self._wake.set()

    async def run(self) -> None:
        """Mark and delete until cancelled."""
        loop = asyncio.get_running_loop()
        look_at = loop.time() + FIRST_CHECK_S
        self._early = True
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), look_at - loop.time())
            self._wake.clear()
            keep = self._keep()
            if due := loop.time() >= look_at:
                self._early = False
            if due or not keep.seconds:
                look_at = loop.time() + min(MAX_INTERVAL_S, max(keep.seconds, MIN_INTERVAL_S))
            look = due or not keep.seconds
            await self.turn(keep, look=look)
            if not look and await asyncio.to_thread(self._area.is_short, keep.reserve):
                await asyncio.to_thread(self._delete, keep, self._busy())

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

    def _delete(self, keep: KeepLimits, busy: Container[str]) -> None:
        try:
            ended = None if self._early else {job for job, end in self._noted.items() if end}
            gone = self._area.delete(keep, busy, time.time(), self._sizes, ended)
        except FileNotFoundError:  # the folder was never used
            return
        except OSError as error:
            log.warning("folders of ended jobs not deleted", why=str(error))
            return
        if gone:
            log.info("folders of ended jobs deleted", folder=str(self._area.root), jobs=gone)


class DiskLimits:
    """Watch that stops running jobs if their files in one folder of the node exceed a limit.

    The limit is `most` bytes, or half of the file system if `most` is 0. The files are measured,
    so a job may exceed the limit for some seconds. If `is_own` is true for the uid of a job, all
    files of that uid in `SHARED_FOLDERS` count, together with the job's folders on the same file
    system. On a file system without jobs' folders, the limit is at most half of it.
    """

    def __init__(
        self,
        folders: NodeFolders,
        most: Callable[[], int],
        running: Callable[[], Iterable[JobId]],
        stop: Callable[[JobId, int], None],
        is_own: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._folders = folders
        self._most = most
        self._running = running
        self._stop = stop
        self._is_own = is_own
        self._own = [one.resolve() for one in (folders.run, folders.work, folders.checkpoints)]

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            began = time.monotonic()
            for job in tuple(self._running()):
                limit = await asyncio.to_thread(self.exceeded, job)
                if limit:
                    self._stop(job, limit)
            await asyncio.sleep(max(DISK_INTERVAL_S, DISK_SHARE * (time.monotonic() - began)))

    def exceeded(self, job: JobId) -> int:
        """Return the limit that the files of a job exceed, or 0 if they exceed none."""
        folders = self._folders
        owner = owner_of(folders.job(job))
        uid = owner.uid if owner is not None and self._is_own(owner.uid) else None
        shared = _by_device(SHARED_FOLDERS if uid is not None else ())
        places: list[tuple[Path, tuple[Path, ...]]] = [
            (folders.work, (folders.job(job), folders.states(job))),
            (folders.checkpoints, (folders.checkpoints / job,)),
        ]
        known = _by_device(root for root, _ in places)
        places += [(found[0], ()) for device, found in shared.items() if device not in known]
        for root, paths in places:
            with contextlib.suppress(OSError):
                status = os.statvfs(root)
                half = status.f_blocks * status.f_frsize // 2
                limit = self._most() or half
                if not paths:
                    limit = min(limit, half)
                used = (status.f_blocks - status.f_bfree) * status.f_frsize
                total = sum(map(bytes_below, paths)) if used > limit else 0
                if uid is not None and used > limit >= total:
                    beside = shared.get(root.stat().st_dev, ())
                    total += bytes_of(uid, beside, limit - total, self._own)
                if total > limit:
                    return limit
        return self._zygotes_exceed(job)

    def _zygotes_exceed(self, job: JobId) -> int:
        """Return `MAX_ZYGOTE_OUTPUT` if the zygotes of a job with its own user wrote more."""
        if (owner := owner_of(self._folders.job(job))) is None:
            return 0
        with contextlib.suppress(OSError):
            sizes = (path.stat().st_size for path in zygote_outputs(self._folders, owner.uid))
            return MAX_ZYGOTE_OUTPUT if sum(sizes) > MAX_ZYGOTE_OUTPUT else 0
        return 0


def _by_device(folders: Iterable[Path]) -> dict[int, list[Path]]:
    """Return the existing folders by their file system."""
    found: dict[int, list[Path]] = {}
    for folder in folders:
        with contextlib.suppress(OSError):
            found.setdefault(folder.stat().st_dev, []).append(folder)
    return found
