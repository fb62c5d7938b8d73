"""Cases that take turns: of those that are dear and seldom differ, each commit has one."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")
ROOT: Final = Path(__file__).parents[2]
ALL: Final = "TURNS"  # in the environment, `all`: every case has its turn now


def turn(cases: Sequence[T], what: str, *, commit: str | None = None) -> list[T]:
    """The one of `cases` whose turn it is.

    Args:
        cases: that take turns.
        what: the cases are of; others have their turns at other commits.
        commit: whose turn; None: of what is checked out, so that a run of it is the same again.
    """
    if commit is None and os.environ.get(ALL) == "all":
        return list(cases)
    return [cases[zlib.crc32(f"{what} {commit or _checked_out()}".encode()) % len(cases)]]


@functools.cache
def _checked_out() -> str:
    """Its commit; empty where there is no git."""
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
    return ""
