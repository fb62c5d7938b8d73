"""Errors of the decision logic."""

from __future__ import annotations

from typing import ClassVar

from schemas.errors import OnesError


class CoreError(OnesError):
    """Base of what the core raises on purpose; each is a fault of ours, never a user's."""

    code: ClassVar[str] = "core"


class IllegalTransitionError(CoreError):
    """An arrow that the table does not draw."""

    def __init__(self, who: str, phase: str, happening: str, story: str) -> None:
        """Say which arrow it would have been.

        Args:
            happening: the trigger that finds no arrow there.
        """
        super().__init__(f"{who} is {phase} and cannot take {happening}; before: {story}")
        self.who = who
        self.phase = phase
        self.happening = happening


class InvariantBrokenError(CoreError):
    """Something holds that must never hold."""
