"""One output file of a worker, read for as long as anybody still has it."""

from __future__ import annotations

import contextlib
import os
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


class OutputFile:
    """A stream of a worker, behind its path or behind a handle that outlives a deletion.

    A file that is deleted is read on from this agent's handle, or from the worker's own. What
    nobody has any more is a gap: a line in the worker's log says so, and the stream goes on behind
    it. So followers see what is missing, and no position means two different bytes.

    Args:
        folder: of the worker.
        name: `LOG` or `SAMPLES`.
    """

    def __init__(self, folder: WorkerFolder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._file: BinaryIO | None = None
        self._lost = False  # nothing more can come of it

    def size(self, sent: int) -> int:
        """How long the file is, once a gap in it was marked.

        Args:
            sent: bytes of it that are under way, or with the controller.

        Raises:
            OSError: if it cannot be read, or a gap cannot be marked now.
        """
        if self._lost:
            return sent
        file = self._file = self._file or self._open()
        if file is None and not sent and (self._name != LOG or self._folder.mark() is None):
            return 0  # nobody wrote to it yet
        size = -1 if file is None else os.fstat(file.fileno()).st_size
        if size >= sent:
            return size
        self._mark_gap(sent, "deleted" if file is None else "cut")
        if self._name == LOG:
            return self.size(sent)
        self._lost = True
        return sent

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
