"""Everything the core may ask of the shell, to be done after its input is durable."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.ids import JobId, NodeId
from schemas.messages.agent import GroupDelta
from schemas.messages.feed import FeedEvent
from schemas.messages.hopping import SweepDelta


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
