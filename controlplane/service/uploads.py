"""Archives of working directories, stored by their SHA-256.

`ArchiveSenders` records which user uploaded which archive. `unneeded_archives` and
`excess_archives` choose the archives to delete when there are too many.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from schemas.errors import BadFieldError, TooLargeError, UnavailableError
from schemas.host.archives import DEFAULT_BOUNDS, UNREADABLE, ArchiveBounds, inspect
from schemas.host.files import AgedFile


class ArchiveSenders:
    """Folder with a subfolder per user, where each sent archive has an empty file."""

    def __init__(self, folder: Path, archives: Path) -> None:
        self._folder = folder
        self._archives = archives

    def sent(self, who: str, digest: str) -> bool:
        """True if the user uploaded the archive."""
        return (self._of(who) / digest).is_file()

    def note(self, who: str, digest: str) -> None:
        """Record that a user uploaded an archive."""
        self._of(who).mkdir(mode=0o700, parents=True, exist_ok=True)
        (self._of(who) / digest).touch(mode=0o600)

    def archives_of(self, who: str) -> list[AgedFile]:
        """Return the stored archives that a user uploaded, with the times of their last use."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for mark in self._of(who).iterdir():
                with contextlib.suppress(FileNotFoundError):
                    status = (self._archives / mark.name).stat()
                    found.append(AgedFile(mark.name, status.st_size, status.st_mtime))
        return found

    def drop(self, who: str, digest: str) -> None:
        """Remove an archive from a user's archives. Delete it if no other user uploaded it."""
        (self._of(who) / digest).unlink(missing_ok=True)
        if not any(self._folder.glob(f"*/{digest}")):
            (self._archives / digest).unlink(missing_ok=True)

    def forget(self, digest: str) -> None:
        """Remove a deleted archive from all users' archives."""
        for mark in self._folder.glob(f"*/{digest}"):
            mark.unlink(missing_ok=True)

    def all(self) -> dict[str, set[str]]:
        """Return the senders of each archive, as hashes of their names."""
        found = defaultdict[str, set[str]](set)
        for mark in self._folder.glob("*/*"):
            found[mark.name].add(mark.parent.name)
        return found

    def _of(self, who: str) -> Path:
        return self._folder / folder_of(who)


def folder_of(who: str) -> str:
    """Return the folder name for a user."""
    return hashlib.sha256(who.encode()).hexdigest()[:16]


def unneeded_archives(
    archives: Iterable[AgedFile], most: int, *, needed: Collection[str], before: float
) -> tuple[list[AgedFile], int]:
    """Return archives of one user to delete, oldest first, and the bytes that then remain.

    At most `most` bytes should remain. Archives in `needed` and archives used
    after `before` (seconds since the epoch) are kept.
    """
    ordered = sorted(archives, key=lambda file: (file.at, file.name))
    left = sum(file.size for file in ordered)
    dropped = []
    for file in ordered:
        if left > most and file.name not in needed and file.at <= before:
            dropped.append(file)
            left -= file.size
    return dropped, left


def excess_archives(
    archives: Iterable[AgedFile], most: int, senders: Mapping[str, Collection[str]]
) -> list[AgedFile]:
    """Return archives to delete, so that at most `most` bytes remain in total.

    Each is the oldest archive of the user who has the most bytes left. Archives without a sender
    are treated as if one additional user had sent all of them.
    """
    ordered = sorted(archives, key=lambda file: (file.at, file.name))
    left = sum(file.size for file in ordered)
    by_user = defaultdict[str, dict[str, AgedFile]](dict)  # oldest first
    sizes = Counter[str]()
    for file in ordered:
        for who in senders.get(file.name) or ("",):
            by_user[who][file.name] = file
            sizes[who] += file.size
    dropped = []
    while left > most:
        largest = max(by_user, key=lambda who: (sizes[who], bool(by_user[who])))
        file = next(iter(by_user[largest].values()))
        for who in senders.get(file.name) or ("",):
            del by_user[who][file.name]
            sizes[who] -= file.size
        dropped.append(file)
        left -= file.size
    return dropped


DIGEST: Final = re.compile(r"[0-9a-f]{64}")
PIECE_BYTES: Final = 1 << 20
SENDERS_FOLDER: Final = "snapshot-senders"  # next to the folder of archives
IDLE_AFTER_S: Final = 60.0  # then a new upload of the user may replace the idle upload
MAX_INSPECTED: Final = 10_000  # number of inspected archives to remember


class StoredArchives:
    """Complete archives in a folder, which both processes of the controller read."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder

    def has(self, digest: str) -> bool:
        """True if the complete archive is stored. Mark the archive as used now."""
        if not DIGEST.fullmatch(digest):
            return False
        try:
            os.utime(self.folder / digest)
        except OSError:
            return (self.folder / digest).is_file()
        return True

    def piece(self, digest: str, offset: int) -> tuple[bytes, int]:
        """Return up to 1 MiB of an archive from `offset` on, and its size (-1 if not stored)."""
        if not self.has(digest) or offset < 0:
            return b"", -1
        with (self.folder / digest).open("rb") as file:
            file.seek(offset)
            return file.read(PIECE_BYTES), os.fstat(file.fileno()).st_size


class SnapshotStore(StoredArchives):
    """Folder of archives. A file gets its final name only after its content was verified.

    The constructor deletes unfinished uploads in `folder`. `upload_bytes` limits the unfinished
    uploads of a user, and `user_bytes` the archives of a user.
    """

    needed: Callable[[], Collection[str]] = frozenset  # archives of jobs that have not ended

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        bounds: ArchiveBounds = DEFAULT_BOUNDS,
        upload_bytes: int = 2 << 30,
        user_bytes: int = 8 << 30,
    ) -> None:
        super().__init__(folder)
        self.on_stored: Callable[[Path], None] = lambda _: None  # called with each new archive
        self.senders = ArchiveSenders(folder.with_name(SENDERS_FOLDER), folder)
        self.max_bytes = max_bytes
        self.bounds = bounds
        self.upload_bytes = upload_bytes
        self.user_bytes = user_bytes
        self._quota_lock = threading.Lock()  # locked while archives of a user are counted and added
        self._parts = defaultdict[str, dict[Path, int]](dict)  # bytes of each upload, by user
        self._inspected: dict[str, ArchiveBounds] = {}  # bounds that each archive meets
        self._finishing: dict[Path, asyncio.Future[None]] = {}  # unfinished uploads being hashed
        for left_over in folder.glob("*.part"):
            left_over.unlink()

    def is_of(self, who: str, digest: str) -> bool:
        """True if the complete archive is stored and the user uploaded all of it."""
        return self.has(digest) and self.senders.sent(who, digest)

    async def inspect(self, digest: str) -> None:
        """Refuse an archive that no node would unpack. Check each archive once, in a thread.

        Raises:
            TooLargeError: if the unpacked archive exceeds its bounds.
            BadFieldError: if the archive cannot be unpacked.
        """
        if self._inspected.get(digest) == self.bounds:
            return
        bounds = self.bounds
        await asyncio.to_thread(_inspect, self.folder / digest, bounds)
        if len(self._inspected) >= MAX_INSPECTED:
            self._inspected.clear()
        self._inspected[digest] = bounds

    def forget(self, name: str) -> None:
        """Delete an archive or an unfinished upload, if it exists."""
        (self.folder / name).unlink(missing_ok=True)
        self.senders.forget(name)
        for parts in self._parts.values():
            parts.pop(self.folder / name, None)

    async def put(self, who: str, digest: str, offset: int, data: bytes, total: int) -> int:
        """Store a piece, and return how many bytes are stored. Verify a complete archive.

        Args:
            who: the sender. Two users who upload the same archive do not disturb or notice each
                other, because knowing a digest does not prove possession of the archive.
            digest: SHA-256 of the complete archive, hexadecimal.
            offset: position of `data`, in bytes. 0 restarts the upload.
            total: size of the archive, bytes.

        Raises:
            BadFieldError: if the digest is malformed or does not match the archive.
            TooLargeError: if the archive exceeds the bound of the cluster or of the user.
            UnavailableError: if the disk cannot be written.
        """
        if not DIGEST.fullmatch(digest):
            raise BadFieldError("digest is not a SHA-256", "give 64 hexadecimal digits", "digest")
        if total > self.max_bytes:
            what = f"the packed working directory has {total} bytes, the limit is {self.max_bytes}"
            raise TooLargeError(what, "exclude data from it (.onesignore)", "total")
        if self.is_of(who, digest):
            return total
        part = self.folder / f"{digest}.{folder_of(who)}.part"
        if offset == 0:
            await asyncio.to_thread(self._fit_archive, who, total, self.needed())
        if (finishing := self._finishing.get(part)) is not None:  # the last piece was sent twice
            await asyncio.shield(finishing)
            return total
        have = part.stat().st_size if part.exists() else 0
        if offset == 0:
            have = 0
        if offset != have or have + len(data) > total:
            return have
        self._fit_upload(who, part, have, total if offset == 0 else have + len(data))
        try:
            with part.open("ab" if have else "wb") as file:
                file.write(data)
        except OSError as error:
            raise UnavailableError(f"snapshot: {error.strerror}", "free space, try again") from None
        have += len(data)
        self._parts[who][part] = have
        if have == total:
            finishing = self._finishing[part] = asyncio.ensure_future(
                asyncio.to_thread(self._finish, part, digest, who, self.needed())
            )
            finishing.add_done_callback(lambda _: self._finished(who, part))
            await asyncio.shield(finishing)
            self.on_stored(self.folder / digest)
        return have

    def _finished(self, who: str, part: Path) -> None:
        del self._finishing[part]
        self._parts[who].pop(part, None)
        if not self._parts[who]:
            del self._parts[who]

    def _fit_upload(self, who: str, part: Path, have: int, wanted: int) -> None:
        """Delete a user's abandoned uploads until all uploads are within the user's bound."""
        others = {path: size for path, size in self._parts[who].items() if path != part}
        left = sum(others.values())
        for path, size in others.items():  # oldest first
            if left + wanted <= self.upload_bytes:
                break
            if path not in self._finishing and time.time() - _changed_at(path) > IDLE_AFTER_S:
                path.unlink(missing_ok=True)
                del self._parts[who][path]
                left -= size
        if left + wanted > self.upload_bytes:
            what = f"your unfinished uploads have {left + have} bytes, with this one more than "
            hint = "finish the others, or wait a minute"
            raise TooLargeError(f"{what}{self.upload_bytes}", hint, "total")

    def _fit_archive(self, who: str, size: int, needed: Collection[str]) -> None:
        """Delete a user's unneeded archives until a new one of `size` bytes is within the bound."""
        mine = self.senders.archives_of(who)
        before = time.time() - IDLE_AFTER_S  # newer archives could be needed at any moment
        dropped, left = unneeded_archives(
            mine, self.user_bytes - size, needed=needed, before=before
        )
        if left + size > self.user_bytes:
            what = f"your working directories of live jobs and of the last minute have {left} bytes"
            hint = "wait until jobs end, exclude data (.onesignore), or have limits.archive_bytes "
            raise TooLargeError(
                f"{what}; with this one they would exceed {self.user_bytes}",
                f"{hint}raised",
                "limits.archive_bytes",
            )
        for file in dropped:
            self.senders.drop(who, file.name)

    def _finish(self, part: Path, digest: str, who: str, needed: Collection[str]) -> None:
        try:
            with part.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
                size = os.fstat(file.fileno()).st_size
            if found != digest:
                part.unlink()
                what = "the archive does not match its digest"
                raise BadFieldError(what, "send it again", "digest")
            with self._quota_lock:
                try:
                    self._fit_archive(who, size, needed)
                except TooLargeError:
                    part.unlink()
                    raise
                part.rename(self.folder / digest)
                self.senders.note(who, digest)
        except OSError as error:
            raise UnavailableError(f"snapshot: {error.strerror}", "send it again") from None


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _inspect(path: Path, bounds: ArchiveBounds) -> None:
    try:
        with path.open("rb") as file:
            inspect(file, bounds)
    except FileNotFoundError:
        return  # deleted meanwhile; nodes will report the missing archive
    except UNREADABLE as error:
        what = f"snapshot: its archive cannot be unpacked: {error}"
        raise BadFieldError(what, "pack a tar file of files and folders", "snapshot") from None
