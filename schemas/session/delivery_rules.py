"""Rules that both ends of a session share: which delta is newer, and the timings."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from schemas.wire.agent import DeltaAcked, GroupDelta, Hello
from schemas.wire.sweeps import SweepDelta, SweepDeltaAcked

Order = tuple[int, int, int]  # (term, version, stage)
SweepOrder = tuple[int, int]  # (term, revision)


@dataclass(frozen=True, slots=True)
class SessionTimings:
    """Intervals of a session, in seconds."""

    heartbeat_s: float = 1.0
    suspect_s: float = 6.0
    lost_s: float = 30.0
    missed_s: float = 5.0  # lost so early if workers of other nodes miss their peers
    retry_s: float = 2.0


def equivalent_hellos(one: Hello, other: Hello) -> bool:
    """True if two hellos differ only in their events' range, repeats and requests."""

    def lasting(hello: Hello) -> Hello:
        return replace(hello, events_sent=0, events_dropped=0, echo=None, jobs=())

    return lasting(one) == lasting(other)


def order_of(delta: GroupDelta | DeltaAcked) -> Order:
    """Return (term, version, stage) of a delta, which orders deltas as a tuple."""
    return (delta.term, delta.version, delta.stage)


def sweep_order_of(delta: SweepDelta | SweepDeltaAcked) -> SweepOrder:
    """Return (term, revision) of a delta of a sweep, which orders deltas as a tuple."""
    return (delta.term, delta.revision)
