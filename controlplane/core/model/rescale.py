"""The change from one version of a job's group to the next, and its transition table.

ONES section 3.3, as a "shadow join": newcomers are prepared while the incumbents train, and all
members swap groups at one agreed step. A recovery is the same change without newcomers, made when a
member was lost: the survivors quiesce, agree on the furthest step and go on.

Running jobs that trade slots: what each is to have, and who steps aside so that it can begin.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

import msgspec

from controlplane.core.commands import IllegalTransitionError
from controlplane.policy.api import Reason
from schemas.ids import JobId, NodeId, Seconds, SlotId, Version, WorkerId
from schemas.nodes import Group


class RescalePhase(Enum):
    """Where a change stands."""

    PREPARING = "preparing"  # newcomers start; the old group trains
    SWITCHING = "switching"  # all members are notified; the old group trains up to the boundary
    QUIESCING = "quiescing"  # a member was lost; the others stand still and report their step
    REJOINING = "rejoining"  # the survivors build a group and take the furthest state
    SETTLED = "settled"
    ABANDONED = "abandoned"  # the old group goes on as if nothing had been asked
    BROKEN = "broken"  # another change takes its place
    LOST = "lost"  # nobody has the state: back to the last checkpoint


class RescaleTrigger(Enum):
    """What can happen to a change."""

    PREPARED = "prepared"  # every newcomer is ready, and the store of the new group is open
    FORMED = "formed"  # every member of the new group takes its steps in it
    NEWCOMER_LOST = "newcomer lost"
    JOIN_FAILED = "join failed"  # a member could not build the new group
    SUPERSEDED = "superseded"  # a newer order came before anybody was notified of this one
    EXPIRED = "expired"
    MEMBER_LOST = "member lost"  # of the group that trains
    QUIESCED = "quiesced"  # every survivor said where it stands
    NOBODY_FULL = "nobody full"  # none of the survivors has the whole state


NEXT: Final[Mapping[tuple[RescalePhase, RescaleTrigger], RescalePhase]] = {
    (RescalePhase.PREPARING, RescaleTrigger.PREPARED): RescalePhase.SWITCHING,
    (RescalePhase.PREPARING, RescaleTrigger.NEWCOMER_LOST): RescalePhase.ABANDONED,
    (RescalePhase.PREPARING, RescaleTrigger.SUPERSEDED): RescalePhase.ABANDONED,
    (RescalePhase.PREPARING, RescaleTrigger.EXPIRED): RescalePhase.ABANDONED,
    (RescalePhase.PREPARING, RescaleTrigger.MEMBER_LOST): RescalePhase.BROKEN,
    (RescalePhase.SWITCHING, RescaleTrigger.FORMED): RescalePhase.SETTLED,
    (RescalePhase.SWITCHING, RescaleTrigger.NEWCOMER_LOST): RescalePhase.ABANDONED,
    (RescalePhase.SWITCHING, RescaleTrigger.JOIN_FAILED): RescalePhase.ABANDONED,
    (RescalePhase.SWITCHING, RescaleTrigger.EXPIRED): RescalePhase.ABANDONED,
    (RescalePhase.SWITCHING, RescaleTrigger.MEMBER_LOST): RescalePhase.BROKEN,
    (RescalePhase.QUIESCING, RescaleTrigger.QUIESCED): RescalePhase.REJOINING,
    (RescalePhase.QUIESCING, RescaleTrigger.MEMBER_LOST): RescalePhase.BROKEN,
    (RescalePhase.QUIESCING, RescaleTrigger.NOBODY_FULL): RescalePhase.LOST,
    (RescalePhase.QUIESCING, RescaleTrigger.EXPIRED): RescalePhase.LOST,
    (RescalePhase.REJOINING, RescaleTrigger.FORMED): RescalePhase.SETTLED,
    (RescalePhase.REJOINING, RescaleTrigger.MEMBER_LOST): RescalePhase.BROKEN,
    (RescalePhase.REJOINING, RescaleTrigger.JOIN_FAILED): RescalePhase.BROKEN,
    (RescalePhase.REJOINING, RescaleTrigger.EXPIRED): RescalePhase.LOST,
}
OPEN: Final = frozenset(
    {
        RescalePhase.PREPARING,
        RescalePhase.SWITCHING,
        RescalePhase.QUIESCING,
        RescalePhase.REJOINING,
    }
)


class QuiescePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a survivor stands still."""

    step: int
    epoch: int  # finished
    full: bool
    port: int


class Rescale(msgspec.Struct, kw_only=True):
    """One change that is under way."""

    group: Group  # what it leads to; its version is the change's
    kind: str  # join, recover or suspend
    before: Version  # what nodes that were not notified of this one hold
    phase: RescalePhase
    why: str
    began: Seconds
    store: str = ""  # HOST:PORT, once known
    source: int | None = None  # recover: rank whose state all take
    points: dict[WorkerId, QuiescePoint] = {}
    notified_nodes: dict[NodeId, None] = {}  # nodes that heard of this version
    pause_ms: float = 0.0  # of the member that stood still for longest
    step_ms: float = 0.0  # of its usual step before; 0: not measured

    @property
    def pause(self) -> dict[str, float]:
        """Pause of training in ms and in steps, as far as it was reported."""
        if not self.pause_ms:
            return {}
        steps = {"pause_steps": self.pause_ms / self.step_ms} if self.step_ms else {}
        return {"pause_ms": self.pause_ms, **steps}


def advance(job: JobId, change: Rescale, trigger: RescaleTrigger) -> RescalePhase:
    """Move `change` along the table.

    Args:
        job: whose change it is, for the error.
        change: it is changed in place.

    Returns:
        Its phase afterwards.

    Raises:
        IllegalTransitionError: if the arrow is not drawn.
    """
    try:
        change.phase = NEXT[change.phase, trigger]
    except KeyError:
        raise IllegalTransitionError(job, change.phase.value, trigger.value, change.why) from None
    return change.phase


class Way(Enum):
    """How a job steps aside; the value is what users see. The cheaper ones come first."""

    STAGING = "goes to free slots meanwhile"
    SHRINK = "goes on with fewer slots meanwhile"
    PAUSE = "pauses meanwhile"


class Aside(msgspec.Struct, frozen=True, kw_only=True):
    """Where one of them is while the others take their places."""

    way: Way
    local_batch: dict[SlotId, int] = {}  # samples per step; none while it pauses


class Swap(msgspec.Struct, kw_only=True):
    """Jobs that train, each of which is to have slots that another one of them has now.

    Without those in `aside`, the others can take their places one after the other.
    """

    targets: dict[JobId, dict[SlotId, int]]  # slot -> local batch, samples per step
    aside: dict[JobId, Aside]
    reasons: dict[JobId, Reason]
    by: str = "policy"  # or operator: whose wish it is
    stepped: dict[JobId, None] = {}  # of `aside`: those that were ordered to
    began: Seconds = Seconds(0.0)

    def slots(self) -> set[SlotId]:
        """All that are kept for its jobs until it is over."""
        return {slot for target in self.targets.values() for slot in target}
