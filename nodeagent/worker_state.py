"""What the agent knows of one worker on its node."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from schemas.groups import Member
from schemas.ids import JobId, Rank, Version, WorkerId, index_of
from schemas.messages.agent import (
    GroupDelta,
    ScriptReport,
    UnitBegun,
    UnitEnded,
    UnitFailed,
    WorkerSeen,
)
from schemas.messages.hopping import UnitOrder


class ProcessPhase(Enum):
    """Where one process stands."""

    WANTED = "wanted"  # waits for its working directory or its slot
    STARTING = "starting"  # the zygote was asked
    ALIVE = "alive"
    RETIRING = "retiring"  # left its group as agreed; is given time to exit by itself
    STOPPING = "stopping"  # TERM was sent
    ENDED = "ended"  # its folder stays until its output is stored


LIVING = frozenset(
    {ProcessPhase.STARTING, ProcessPhase.ALIVE, ProcessPhase.RETIRING, ProcessPhase.STOPPING}
)
LISTENING = frozenset({ProcessPhase.ALIVE, ProcessPhase.RETIRING})


@dataclass(slots=True)
class HeldUnit:
    """The unit of a sweep that a worker holds, by its attempt; 0: none."""

    told: int = 0  # the newest that went to it over its present connection
    held: int = 0  # the newest that it may have heard of
    over: int = 0  # the newest of which it said what came

    @property
    def under_way(self) -> bool:
        """Whether it may be at work."""
        return self.held > self.over

    def tell(self, unit: UnitOrder) -> bool:
        """Whether the worker should hear of `unit` now; it counts as told."""
        if unit.attempt <= max(self.told, self.over):
            return False
        self.told, self.held = unit.attempt, max(self.held, unit.attempt)
        return True

    def reported(self, report: ScriptReport) -> None:
        """Take in what the worker said.

        Args:
            report: of any kind; those that are not of units change nothing.
        """
        match report:
            case UnitBegun(attempt=attempt):
                self.held = max(self.held, attempt)
            case UnitEnded(attempt=attempt) | UnitFailed(attempt=attempt):
                self.held, self.over = max(self.held, attempt), max(self.over, attempt)

    def withdrawn(self, unit: UnitOrder | None, attempts: int) -> bool:
        """Whether the unit under way is not wanted any more.

        Args:
            attempts: the highest that whoever says so knows of.
        """
        wanted = unit.attempt if unit is not None else 0
        return self.under_way and self.held <= attempts and self.held != wanted


@dataclass(slots=True)
class WorkerState:
    """One worker on this node."""

    worker: WorkerId
    job: JobId
    version: Version
    rank: Rank
    slot: int
    phase: ProcessPhase = ProcessPhase.WANTED
    pid: int | None = None
    started_ticks: int | None = None
    code: int | None = None
    signal: int | None = None
    granted: bool = True  # the slot's device is its own
    adopted: bool = False  # an earlier life of this agent may have granted it since it began
    leaving: bool = False  # was notified of a group without it
    newest_order: tuple[Version, int] = (Version(0), 0)  # the newest order that was sent to it
    stored: bool = False
    awaited: bool = False  # its exit, with a limit
    unit: HeldUnit = field(default_factory=HeldUnit)  # if it is a sweep's

    @classmethod
    def wanted(cls, identity: WorkerId, delta: GroupDelta, member: Member) -> WorkerState:
        """A worker that is not there yet."""
        return cls(
            worker=identity,
            job=delta.job,
            version=delta.version,
            rank=member.rank,
            slot=index_of(member.slot),
        )

    @property
    def who(self) -> dict[str, Any]:
        """What events about it begin with."""
        return {"job": self.job, "version": self.version, "rank": self.rank}

    def seen(self) -> WorkerSeen:
        """As a greeting tells it."""
        return WorkerSeen(
            **self.who,
            slot=self.slot,
            pid=self.pid,
            started_ticks=self.started_ticks,
            ended=self.phase is ProcessPhase.ENDED,
            code=self.code,
            signal=self.signal,
        )
