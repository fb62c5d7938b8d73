"""Whose archives are whose: what each user sent, and what of it goes where it is too much."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from schemas.retention import FileSeen


class ArchiveSenders:
    """A folder for each user, with an empty file for each archive that he sent all of.

    Args:
        folder: of these; it need not be there.
        archives: the folder of the archives themselves.
    """

    def __init__(self, folder: Path, archives: Path) -> None:
        self._folder = folder
        self._archives = archives

    def sent(self, who: str, digest: str) -> bool:
        """Whether somebody sent an archive himself."""
        return (self._of(who) / digest).is_file()

    def note(self, who: str, digest: str) -> None:
        """Somebody sent an archive.

        Raises:
            OSError: if the disk does not take it.
        """
        self._of(who).mkdir(mode=0o700, parents=True, exist_ok=True)
        (self._of(who) / digest).touch(mode=0o600)

    def archives_of(self, who: str) -> list[FileSeen]:
        """What a user sent and is still here; when it was asked for last."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for mark in self._of(who).iterdir():
                with contextlib.suppress(FileNotFoundError):
                    status = (self._archives / mark.name).stat()
                    found.append(FileSeen(mark.name, status.st_size, status.st_mtime))
        return found

    def drop(self, who: str, digest: str) -> None:
        """An archive is a user's no more, and goes if it is nobody else's.

        Raises:
            OSError: if it cannot be deleted.
        """
        (self._of(who) / digest).unlink(missing_ok=True)
        if not any(self._folder.glob(f"*/{digest}")):
            (self._archives / digest).unlink(missing_ok=True)

    def forget(self, digest: str) -> None:
        """An archive is gone.

        Raises:
            OSError: if a mark of it cannot be deleted.
        """
        for mark in self._folder.glob(f"*/{digest}"):
            mark.unlink(missing_ok=True)

    def all(self) -> dict[str, set[str]]:
        """The senders of each archive, without their names."""
        found = defaultdict[str, set[str]](set)
        for mark in self._folder.glob("*/*"):
            found[mark.name].add(mark.parent.name)
        return found

    def _of(self, who: str) -> Path:
        return self._folder / folder_of(who)


def folder_of(who: str) -> str:
    """A name for files of a user."""
    return hashlib.sha256(who.encode()).hexdigest()[:16]


def make_room(
    archives: Iterable[FileSeen], most: int, *, stay: Collection[str], before: float
) -> tuple[list[FileSeen], int]:
    """Which archives of a user go: those that no job needs, the oldest first.

    Args:
        most: bytes that they may have then.
        stay: names of those that some job needs.
        before: what was asked for since stays, seconds since the epoch.

    Returns:
        Those that go, and how many bytes are left then.
    """
    ordered = sorted(archives, key=lambda file: (file.at, file.name))
    left = sum(file.size for file in ordered)
    going = []
    for file in ordered:
        if left > most and file.name not in stay and file.at <= before:
            going.append(file)
            left -= file.size
    return going, left


def beyond_share(
    archives: Iterable[FileSeen], most: int, senders: Mapping[str, Collection[str]]
) -> list[FileSeen]:
    """Which archives of all users go: the oldest of whoever has the most, again and again.

    Args:
        archives: that may go.
        most: bytes that they may have together.
        senders: of each, by its name; those of nobody count as one more user's.

    Returns:
        Those that go.
    """
    ordered = sorted(archives, key=lambda file: (file.at, file.name))
    left = sum(file.size for file in ordered)
    theirs = defaultdict[str, dict[str, FileSeen]](dict)  # the oldest first
    sizes = Counter[str]()
    for file in ordered:
        for who in senders.get(file.name) or ("",):
            theirs[who][file.name] = file
            sizes[who] += file.size
    going = []
    while left > most:
        most_of_all = max(theirs, key=lambda who: (sizes[who], bool(theirs[who])))
        file = next(iter(theirs[most_of_all].values()))
        for who in senders.get(file.name) or ("",):
            del theirs[who][file.name]
            sizes[who] -= file.size
        going.append(file)
        left -= file.size
    return going
