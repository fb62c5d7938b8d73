"""Commands and errors of the core.

The service carries out a command after the input that caused the command is durable.
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
    """Send a node its desired state of one job."""

    node: NodeId
    delta: GroupDelta


@dataclass(frozen=True, slots=True)
class SendSweepDelta:
    """Send a node its desired state of one sweep."""

    node: NodeId
    delta: SweepDelta


@dataclass(frozen=True, slots=True)
class Announce:
    """Publish an event in the feed."""

    event: FeedEvent


@dataclass(frozen=True, slots=True)
class Accept:
    """Reply to a submission with the job's name."""

    job: JobId


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """Request a new plan, because a change in the cluster may require one."""


Command = SendDelta | SendSweepDelta | Announce | Accept | RequestPlan


class CoreError(OnesError):
    """Base class of the core's errors. Each is a bug of this project, never an error of a user."""

    code: ClassVar[str] = "core"


class IllegalTransitionError(CoreError):
    """Raised when a transition table has no entry for a trigger in a phase."""

    def __init__(self, subject: str, phase: str, trigger: str, reason: str = "") -> None:
        last = f" (last reason: {reason})" if reason else ""
        super().__init__(f'{subject} is {phase}: no transition for "{trigger}"{last}')
        self.subject = subject
        self.phase = phase
        self.trigger = trigger


class InvariantBrokenError(CoreError):
    """Raised when an invariant of the state is violated."""
