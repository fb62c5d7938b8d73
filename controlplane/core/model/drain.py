"""An operator empties a node: what trains there goes elsewhere, and nothing new comes."""

from __future__ import annotations

import msgspec

from schemas.ids import JobId, Seconds, Version


class Drain(msgspec.Struct, kw_only=True):
    """Why a node is emptied, and until when that may take."""

    user: str
    reason: str
    since: Seconds
    deadline: Seconds | None  # what remains is stopped then, and waits for slots; None: never
    over: bool = False  # the deadline has passed
    empty: bool = False  # nothing is left there, and that was announced
    moved: dict[JobId, Version] = {}  # jobs that grew elsewhere first, and when they had

    @property
    def why(self) -> str:
        """In words, for users."""
        return f"drained by {self.user}" + (f": {self.reason}" if self.reason else "")
