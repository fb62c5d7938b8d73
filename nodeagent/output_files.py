"""One output file of a worker, read for as long as anybody still has it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import structlog

from nodeagent.owned_files import acting_as, open_regular, require_regular
from nodeagent.worker_folders import WorkerFolder
from schemas.messages.logs import LOG

log = structlog.get_logger("output")
WRITE: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
MOST_BEGUN: Final = 64 << 20  # bytes of a log that was begun anew, that are kept
NUL: Final = b"\0"
SLACK: Final = 16 << 20  # bytes beyond the bound of a file, with which it is cut
UNBOUNDED: Final = 1 << 62


class OutputFile:
    """A stream of a worker, behind its path or behind a handle that outlives a deletion.

    A file that is deleted is read on from this agent's handle, or from the worker's own. What
    nobody has any more is a gap: a line in the worker's log says so, and the stream goes on behind
    it. So followers see what is missing, and no position means two different bytes.
    """

    def __init__(self, folder: WorkerFolder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._file: BinaryIO | None = None
        self._lost = False  # nothing more can come of it
        self._end: int | None = None  # of what is kept of one that is beyond its bound

    def size(self, sent: int, most: int = UNBOUNDED) -> int:
        """How long the file is, once a gap in it was marked, and what is beyond its bound was cut.

        Args:
            sent: bytes of it that are under way, or with the controller.
            most: bytes of it that are kept.

        Raises:
            OSError: if it cannot be read, or a gap cannot be marked now.
        """
        if self._lost:
            return sent
        # Looked for before the file: a worker has its log when it marks that it is there.
        begun = self._file is None and self._name == LOG and self._folder.mark() is not None
        file = self._file = self._file or self._open()
        if file is None and not sent and not begun:
            return 0  # nobody wrote to it yet
        size = -1 if file is None else os.fstat(file.fileno()).st_size
        if size >= sent:
            return self.bound(sent, most)
        self._mark_gap(sent, "deleted" if file is None else "cut")
        if self._name == LOG:
            return self.size(sent, most)
        self._lost = True
        return sent

    def bound(self, sent: int, most: int) -> int:
        """Cut the file if it is beyond its bound; what a worker writes next lies there again.

        Args:
            sent: bytes of it that the controller has, at least; these stay.
            most: bytes of it that are kept.

        Returns:
            How many bytes of it there are, of those that are kept.

        Raises:
            OSError: if it cannot be read.
        """
        file = self._file = self._file or self._open()
        size = 0 if file is None else os.fstat(file.fileno()).st_size
        if file is None or size <= most:
            self._end = None
            return size
        if self._end is None:
            self._end = self._mark_end(file.fileno(), max(most, sent), most)
        if size > self._end + SLACK:
            with self._writable(file.fileno()) as descriptor:
                os.ftruncate(descriptor, self._end)
        return min(size, self._end)

    def _mark_end(self, file: int, at: int, most: int) -> int:
        """Where what is kept ends: behind a line that says so, if it is a log."""
        if self._name != LOG:
            log.warning("output beyond its bound", worker=self._folder.worker, stream=self._name)
            return at
        note = f"\n[ones: output beyond {most} bytes of a worker is not kept]\n".encode()
        if os.pread(file, len(note), max(0, at - len(note))) == note:  # a former agent wrote it
            return at
        if os.pread(file, len(note), at) != note:
            log.warning("output beyond its bound", worker=self._folder.worker, stream=self._name)
            with self._writable(file) as descriptor:
                os.pwrite(descriptor, note, at)
        return at + len(note)

    @contextlib.contextmanager
    def _writable(self, file: int) -> Iterator[int]:
        """The same file for writing, also when it has no name any more."""
        with acting_as(self._folder.owner):
            descriptor = os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def read(self, offset: int, count: int) -> bytes:
        """Some of it.

        Args:
            offset: from its start, bytes.
            count: bytes, at most.

        Raises:
            OSError: if it cannot be read.
        """
        return b"" if self._file is None else os.pread(self._file.fileno(), count, offset)

    def close(self) -> None:
        """Let go of it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> BinaryIO | None:
        path = self._folder.own.resolve() / self._folder.stream(self._name).name
        with contextlib.suppress(FileNotFoundError), acting_as(self._folder.owner):
            return os.fdopen(open_regular(path), "rb")
        return self._open_deleted(path)

    def _open_deleted(self, path: Path) -> BinaryIO | None:
        """Through the worker's own handle, while it lives."""
        mark = self._folder.mark()
        if mark is None:
            return None
        with contextlib.suppress(OSError), acting_as(self._folder.owner):
            for handle in Path(f"/proc/{mark.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(handle.readlink()) == f"{path} (deleted)":
                        return _reopen(handle)
        return None

    def _mark_gap(self, sent: int, what: str) -> None:
        """Say in the log that bytes of a file are lost; the log itself goes on behind `sent`."""
        path = self._folder.stream(LOG)
        kind = "output" if self._name == LOG else "sample records"
        log.warning("output lost", worker=self._folder.worker, stream=self._name, offset=sent)
        note = f"[ones: {kind} after byte {sent} may be lost: the file was {what}]\n".encode()
        self._folder.path.mkdir(mode=0o700, exist_ok=True)
        with acting_as(self._folder.owner):
            descriptor = _open_for_writing(path)
            try:
                if self._name == LOG:
                    os.pwrite(descriptor, note, sent)  # what the worker writes next lies behind it
                    note = os.pread(descriptor, min(sent, MOST_BEGUN), 0).rstrip(NUL)  # begun anew
                os.lseek(descriptor, 0, os.SEEK_END)
                os.write(descriptor, note)
            finally:
                os.close(descriptor)


def _reopen(handle: Path) -> BinaryIO:
    """What /proc names as an open file: a link of its own kind, which is followed."""
    descriptor = os.open(handle, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return os.fdopen(require_regular(descriptor, handle), "rb")


def _open_for_writing(path: Path) -> int:
    return require_regular(os.open(path, WRITE, 0o600), path)
