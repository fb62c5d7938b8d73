"""A script's output on a disk that may be full: lost, counted, never raised."""

from __future__ import annotations

import errno
import io
import os
from typing import Final

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})


class LossyOutput(io.RawIOBase):
    """A script's stdout: where there is no room, output is dropped and counted, not raised.

    Args:
        descriptor: open for writing; not closed here.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lost = 0

    def writable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """The descriptor beneath."""
        return self._descriptor

    def write(self, data: object) -> int:
        """Write what there is room for; the rest is lost, and the next line that fits says so.

        Args:
            data: anything with the buffer protocol.

        Returns:
            Bytes of `data`, those that were lost among them.

        Raises:
            OSError: for any other reason than a full or broken disk.
        """
        view = memoryview(data)  # type: ignore[arg-type] # whatever the text layer hands down
        size = view.nbytes
        try:
            if self._lost:
                text = f"\n[ones] {self._lost} bytes of output were lost: the disk was full\n"
                note = memoryview(text.encode())
                while note:
                    note = note[os.write(self._descriptor, note) :]
                self._lost = 0
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._lost += view.nbytes
        return size
