"""Change from one group of a job to the next, its transition table, and swaps of slots.

The change is the "shadow join" of ONES section 3.3. Newcomers are prepared while the old group
trains, and all members switch to the new group at one agreed step. A recovery is a change without
newcomers after a member was lost. The survivors quiesce, agree on the step that is furthest ahead,
and continue from this step.
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
    """Phase of a change."""

    PREPARING = "preparing"  # newcomers start; the old group trains
    SWITCHING = "switching"  # all members are notified; the old group trains up to the boundary
    QUIESCING = "quiescing"  # a member was lost; the others stop and report their step
    REJOINING = "rejoining"  # the survivors form a group and take the state that is furthest ahead
    SETTLED = "settled"
    ABANDONED = "abandoned"  # the old group continues
    BROKEN = "broken"  # another change replaces this change
    LOST = "lost"  # no worker has the state; the job returns to its checkpoint


class RescaleTrigger(Enum):
    """Events that move a change along its table."""

    PREPARED = "prepared"  # every newcomer is ready, and the store of the new group is open
    FORMED = "formed"  # every member trains in the new group
    NEWCOMER_LOST = "newcomer lost"
    JOIN_FAILED = "join failed"  # a member could not build the new group
    SUPERSEDED = "superseded"  # a newer order arrived before the members were notified
    EXPIRED = "expired"
    MEMBER_LOST = "member lost"  # a member of the current group
    QUIESCED = "quiesced"  # every survivor reported its position
    NO_FULL_STATE = "no full state"  # no survivor has the full state


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
    (RescalePhase.QUIESCING, RescaleTrigger.NO_FULL_STATE): RescalePhase.LOST,
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
    """Position at which a survivor quiesced."""

    step: int
    epoch: int  # last finished epoch
    has_full_state: bool
    port: int


class Rescale(msgspec.Struct, kw_only=True):
    """Change of a job's group that is in progress."""

    group: Group  # the new group; its version is the version of the change
    kind: str  # join, recover or suspend
    before: Version  # version on nodes that were not notified yet
    phase: RescalePhase
    reason: str
    started_at: Seconds
    store: str = ""  # HOST:PORT; empty until known
    source: int | None = None  # recover: rank of the state that all copy; None: all are equal
    quiesce_points: dict[WorkerId, QuiescePoint] = {}
    notified_nodes: dict[NodeId, None] = {}  # nodes that were sent this version
    pause_ms: float = 0.0  # longest pause of a member
    step_ms: float = 0.0  # usual time of a step of that member before; 0: not measured
    connect_ms: float = 0.0  # longest time in which a member built the process group
    prepared_at: Seconds = Seconds(0.0)  # time of the order to switch or to rejoin
    switched_at: Seconds = Seconds(0.0)  # time at which the first member trained in the new group

    @property
    def pause(self) -> dict[str, float]:
        """Pause of training in ms and in steps, as far as reported."""
        if not self.pause_ms:
            return {}
        steps = {"pause_steps": self.pause_ms / self.step_ms} if self.step_ms else {}
        return {"pause_ms": self.pause_ms, **steps}

    def phases(self, now: Seconds) -> dict[str, float]:
        """Return the durations of the phases up to `now`, when the last member was in the group.

        Phases that took no time are left out. `connect_s` is a part of `switch_s`.
        """
        times = {
            "prepare_s": self.prepared_at - self.started_at,
            "connect_s": self.connect_ms / 1000.0,
            "switch_s": self.switched_at - self.prepared_at,
            "transfer_s": now - self.switched_at,
        }
        return {name: took_s for name, took_s in times.items() if took_s > 0.0}


def advance(job: JobId, change: Rescale, trigger: RescaleTrigger) -> RescalePhase:
    """Move `change` of `job` along the table and return its new phase."""
    try:
        change.phase = NEXT[change.phase, trigger]
    except KeyError:
        raise IllegalTransitionError(
            job, change.phase.value, trigger.value, change.reason
        ) from None
    return change.phase


class YieldMode(Enum):
    """Way for a job to yield its slots, cheapest first. The value is shown to users."""

    STAGING = "moves to free slots temporarily"
    SHRINK = "continues on fewer slots temporarily"
    PAUSE = "pauses temporarily"


class SwapYield(msgspec.Struct, frozen=True, kw_only=True):
    """The slots that a yielding job uses until the other jobs have moved."""

    mode: YieldMode
    local_batch: dict[SlotId, int] = {}  # samples per step; empty while the job pauses


class Swap(msgspec.Struct, kw_only=True):
    """Exchange of slots among running jobs. Each job gets slots that another of these jobs has.

    After the jobs in `yields` have yielded, the other jobs can move one after the other.
    """

    targets: dict[JobId, dict[SlotId, int]]  # slot -> local batch, samples per step
    yields: dict[JobId, SwapYield]
    reasons: dict[JobId, Reason]
    by: str = "policy"  # policy or operator
    yielded: dict[JobId, None] = {}  # jobs of `yields` that were ordered to yield
    started_at: Seconds = Seconds(0.0)

    def slots(self) -> set[SlotId]:
        """Return the target slots of all jobs. The swap reserves these slots until it is over."""
        return {slot for target in self.targets.values() for slot in target}
