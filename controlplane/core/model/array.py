"""Array of jobs that differ by an index only."""

from __future__ import annotations

import msgspec

from schemas.ids import JobId


class JobArray(msgspec.Struct, kw_only=True):
    """Elements of an array. An index becomes a job only when the job might start soon."""

    first: int
    last: int
    following: int  # next index to become a job
    most: int  # elements that may live at the same time; 0: no limit
    live: dict[JobId, int] = {}  # elements that have not ended, with their indices
    ended: dict[str, int] = {}  # number of ended elements by final state
    failure: str = ""  # first element that did not succeed, and its reason

    @property
    def size(self) -> int:
        """Number of indices."""
        return self.last - self.first + 1

    @property
    def finished(self) -> int:
        """Number of elements that have ended."""
        return sum(self.ended.values())

    @property
    def complete(self) -> bool:
        """True if every element has ended."""
        return self.following > self.last and not self.live

    @property
    def text(self) -> str:
        """Description of the progress, for users."""
        failed = self.finished - self.ended.get("succeeded", 0)
        bad = f" ({failed} not successfully)" if failed else ""
        if not self.live and not self.finished:
            return f"array of {self.size} elements"
        return f"{self.finished} of {self.size} elements have ended{bad}, {len(self.live)} are live"
