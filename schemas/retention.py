"""What is kept of the past goes by age and size, the oldest first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class FileSeen(NamedTuple):
    """A file of a folder."""

    name: str
    size: int  # bytes
    at: float  # when it was changed last, or its job ended, seconds since the epoch


def outdated(
    files: Iterable[FileSeen], keep_s: float, keep_bytes: int, now: float
) -> list[FileSeen]:
    """Which files go: those that are too old, and the oldest while all are too large together.

    Args:
        files: that may go.
        keep_s: seconds.
        now: seconds since the epoch.

    Returns:
        The oldest first.
    """
    ordered = sorted(files, key=lambda file: (file.at, file.name))
    left = sum(file.size for file in ordered)
    found = []
    for file in ordered:
        if now - file.at <= keep_s and left <= keep_bytes:
            break
        found.append(file)
        left -= file.size
    return found
