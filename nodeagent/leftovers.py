"""What ended jobs leave on a node: marked when their ends are heard of, deleted by age and size.

A mark is a file `.ended/JOB` beside the job's folder, so it is there after any crash, and on every
node that shares the folder.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from nodeagent.owned_files import bytes_below, remove_tree
from nodeagent.state_keeper import JOB
from schemas.ids import JobId
from schemas.retention import FileSeen, outdated

log = structlog.get_logger("leftovers")
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
                log.warning("not deleted", folder=str(self.root / one.name))
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
