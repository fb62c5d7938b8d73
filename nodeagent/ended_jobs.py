"""Keeps what ended jobs left on a node within bounds, as its settings say.

What ended jobs leave on a node: marked when their ends are heard of, deleted by age and size.

A mark is a file `.ended/JOB` beside the job's folder, so it is there after any crash, and on every
node that shares the folder.
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
from schemas.host.files import FileSeen, outdated
from schemas.ids import JobId

leftovers_log = structlog.get_logger("leftovers")
MARKS: Final = ".ended"
YOUNG_S: Final = 3600.0  # what is younger goes by its age only
MOST_UNMARKED: Final = 2000  # that are told of
UNHEARD_S: Final = 7 * 86400.0  # at least, where nobody heard of the job's end


class Kept(NamedTuple):
    """How much of ended jobs stays."""

    seconds: float  # behind a job's end
    bytes: int  # of all of them together


@dataclass(frozen=True, slots=True)
class Leftovers:
    """A folder that has a folder for each job.

    Args:
        shared: other nodes use it, too: a job may live although this node does not know it.
        ours: a file that a job's folder has, if it is one; empty: all of them are.
    """

    root: Path
    shared: bool = False
    ours: str = ""

    def note(self, job: JobId, *, ended: bool) -> None:
        """Mark a job as ended, since now if it was not before; or as one that lives.

        Args:
            job: its name; where nothing of it lies here, it gets no mark.

        Raises:
            OSError: if the disk does not take it.
        """
        path = self.root / MARKS / job
        if not ended:
            path.unlink(missing_ok=True)
        elif (self.root / job).is_dir():
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.touch(exist_ok=False)

    def delete(
        self,
        keep: Kept,
        busy: Container[str],
        now: float,
        sizes: dict[str, FileSeen],
    ) -> list[str]:
        """Delete folders of jobs that ended too long ago, and the oldest where they are too much.

        Args:
            busy: jobs that are known to this node, which stay.
            now: seconds since the epoch.
            sizes: of what was found before; brought up to date.

        Returns:
            Whose were deleted, the oldest first.

        Raises:
            OSError: if the folder cannot be read.
        """
        found = {
            name: known
            if (known := sizes.get(name)) is not None and known.at == at
            else FileSeen(name, bytes_below(self.root / name), at)
            for name, at in self._ended(busy, now)
        }
        sizes.clear()
        sizes.update(found)
        may_go = [one for one in found.values() if now - one.at > min(YOUNG_S, keep.seconds)]
        gone = outdated(may_go, keep.seconds, keep.bytes, now)
        for one in gone:
            remove_tree(self.root / one.name)
            if (self.root / one.name).exists():
                leftovers_log.warning("not deleted", folder=str(self.root / one.name))
            else:
                (self.root / MARKS / one.name).unlink(missing_ok=True)
                del sizes[one.name]
        return [one.name for one in gone]

    def unmarked(self) -> list[JobId]:
        """Jobs that left something here and are not known to have ended.

        Returns:
            At most `MOST_UNMARKED`, those whose folders were changed last; nothing of a folder
            that cannot be read, and of one that other nodes use, too.
        """
        found: list[tuple[float, JobId]] = []
        with contextlib.suppress(OSError):
            marks = dict(_marks(self.root / MARKS))
            with os.scandir(self.root) as entries:
                found.extend(
                    (at, JobId(entry.name))
                    for entry in entries
                    if entry.name not in marks and (at := self._changed(entry)) is not None
                )
        return [job for _, job in sorted(found, reverse=True)[:MOST_UNMARKED]]

    def marked(self) -> list[JobId]:
        """Jobs that left something here and have ended; nothing of a folder that cannot be read."""
        with contextlib.suppress(OSError):
            return [JobId(name) for name, _ in _marks(self.root / MARKS)]
        return []

    def _ended(self, busy: Container[str], now: float) -> Iterator[tuple[str, float]]:
        """Folders of jobs that have ended, and since when."""
        marks = dict(_marks(self.root / MARKS))
        with os.scandir(self.root) as entries:
            for entry in entries:
                at = marks.pop(entry.name, None)
                if at is None:
                    at = self._changed(entry)
                    at = at if at is not None and now - at > UNHEARD_S else None
                if at is None or not entry.is_dir(follow_symlinks=False):
                    continue
                if entry.name not in busy:
                    yield entry.name, at
        for name in marks:
            (self.root / MARKS / name).unlink(missing_ok=True)

    def _changed(self, entry: os.DirEntry[str]) -> float | None:
        """When the folder of a job was changed last; None for others, and where it says nothing."""
        if self.shared or not JOB.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
            return None
        if self.ours and not Path(entry.path, self.ours).exists():
            return None
        return entry.stat(follow_symlinks=False).st_mtime


def _marks(folder: Path) -> Iterator[tuple[str, float]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                yield entry.name, entry.stat(follow_symlinks=False).st_mtime


log = structlog.get_logger("ended_jobs")
FIRST_S: Final = 60.0  # after the start: by then the controller said what lives
FIND_S: Final = 2.0
LOOK_S: Final = 600.0  # at most
SHORTEST_LOOK_S: Final = 10.0
STATES_S: Final = 3600.0  # at least: trials that graduated begin with them


class EndedJobs:
    """Working directories, states of sweeps and checkpoints, each kept by itself.

    Args:
        busy: the jobs that are known to this node now.
    """

    def __init__(
        self,
        folders: NodeFolders,
        settings: Callable[[], AgentSettings],
        busy: Callable[[], set[JobId]],
    ) -> None:
        def work() -> Kept:
            now = settings()
            return Kept(now.keep_work_s, now.keep_work_bytes)

        def states() -> Kept:
            now = settings()
            return Kept(max(now.keep_work_s, STATES_S), now.keep_work_bytes)

        def checkpoints() -> Kept:
            now = settings()
            return Kept(now.keep_checkpoints_s, now.keep_checkpoints_bytes)

        self._busy = busy
        self._found: set[JobId] = set()  # as the agent began, and not heard of since
        self._own = (Leftovers(folders.work, ours=MARK), Leftovers(folders.all_states))
        self._keepers = (
            Keeper(self._own[0], work, busy),
            Keeper(self._own[1], states, busy),
            Keeper(Leftovers(folders.checkpoints, shared=True), checkpoints, busy),
        )

    async def find(self) -> list[JobId]:
        """Look who left something here, unless the disk takes long to say it.

        Returns:
            Sweeps that have ended.
        """
        with contextlib.suppress(TimeoutError):
            found, ended = await asyncio.wait_for(asyncio.to_thread(self._look), FIND_S)
            self._found = set(found)
            return ended
        return []

    def _look(self) -> tuple[list[JobId], list[JobId]]:
        return [job for area in self._own for job in area.unmarked()], self._own[1].marked()

    @property
    def unended(self) -> tuple[JobId, ...]:
        """Jobs that left something here and are not known to have ended, for the hello."""
        return tuple(sorted(self._found | self._busy()))

    def note(self, job: JobId, *, ended: bool) -> None:
        """Nothing of a job runs here any more, and it will not come back; or it begins."""
        self._found.discard(job)
        for keeper in self._keepers:
            keeper.note(job, ended=ended)

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """What runs for ever."""
        return [keeper.run() for keeper in self._keepers]


class Keeper:
    """Keeps one folder within its bounds, in a thread, one thing after the other.

    Args:
        keep: what stays, asked anew each time.
        busy: the jobs that are known to this node now.
    """

    def __init__(
        self, area: Leftovers, keep: Callable[[], Kept], busy: Callable[[], set[JobId]]
    ) -> None:
        self._area = area
        self._keep = keep
        self._busy = busy
        self._noted: dict[JobId, bool] = {}
        self._wake = asyncio.Event()
        self._sizes: dict[str, FileSeen] = {}

    def note(self, job: JobId, *, ended: bool) -> None:
        """See `EndedJobs.note`."""
        self._noted.pop(job, None)
        self._noted[job] = ended
        self._wake.set()

    async def run(self) -> None:
        """Mark and delete, for ever."""
        loop = asyncio.get_running_loop()
        look_at = loop.time() + FIRST_S
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), look_at - loop.time())
            self._wake.clear()
            keep = self._keep()
            if (due := loop.time() >= look_at) or not keep.seconds:
                look_at = loop.time() + min(LOOK_S, max(keep.seconds, SHORTEST_LOOK_S))
            await self.turn(keep, look=due or not keep.seconds)

    async def turn(self, keep: Kept, *, look: bool) -> None:
        """Mark those of which something was heard; what the disk does not take is tried again.

        Args:
            look: whether to delete what is beyond that, too.
        """
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
            log.warning("job not marked", ended=noted, why=str(error))
        return left

    def _delete(self, keep: Kept, busy: set[JobId]) -> None:
        try:
            gone = self._area.delete(keep, busy, time.time(), self._sizes)
        except FileNotFoundError:  # nothing was ever put there
            return
        except OSError as error:
            log.warning("what ended jobs left stays", why=str(error))
            return
        if gone:
            log.info("what ended jobs left is deleted", folder=str(self._area.root), jobs=gone)
