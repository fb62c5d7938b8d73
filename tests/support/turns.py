"""Cases that take turns: where a run has to be short, those that seldom differ run by commits.

Everything runs unless `TURNS=commit` is in the environment. A run of the same commit is the same.
"""

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
VARIABLE: Final = "TURNS"
BY_COMMIT: Final = "commit"


def by_commit() -> bool:
    """Whether cases take turns in this run; and properties have half of their examples."""
    return os.environ.get(VARIABLE) == BY_COMMIT


def turn(cases: Sequence[T], what: str, *, of: int | None = None) -> list[T]:
    """Those of `cases` whose turn it is: every one of them, once in so many commits on average.

    Args:
        cases: that take turns.
        what: the cases are of; others have theirs at other commits.
        of: one in so many has its turn; None: one of all.
    """
    if not by_commit():
        return list(cases)
    step = of or max(1, len(cases))
    return list(cases[zlib.crc32(f"{what} {commit()}".encode()) % step :: step])


@functools.cache
def commit() -> str:
    """What is checked out; empty where there is no git."""
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
    return ""
