"""Everything the core may ask of the shell, to be done after its input is durable.

Errors of the decision logic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from schemas.errors import OnesError
from schemas.ids import JobId, NodeId
from schemas.wire.agent import GroupDelta
from schemas.wire.feed import FeedEvent
from schemas.wire.sweeps import SweepDelta


@dataclass(frozen=True, slots=True)
class SendDelta:
    """Bring one job on one node to this state."""

    node: NodeId
    delta: GroupDelta


@dataclass(frozen=True, slots=True)
class SendSweepDelta:
    """Bring one sweep on one node to this state."""

    node: NodeId
    delta: SweepDelta


@dataclass(frozen=True, slots=True)
class Announce:
    """Publish this to the feed."""

    event: FeedEvent


@dataclass(frozen=True, slots=True)
class Accept:
    """Answer the submission: this is its job."""

    job: JobId


@dataclass(frozen=True, slots=True)
class AskForPlan:
    """The cluster changed in a way that may change the plan."""


Command = SendDelta | SendSweepDelta | Announce | Accept | AskForPlan


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
