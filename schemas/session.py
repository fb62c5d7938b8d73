"""Sans-I/O delivery between the controller and one agent.

What goes in: decoded messages, ticks of a clock, things to say. What comes out: values that say
what to send, publish or take in. Events up are numbered per (node, boot) and delivered once and in
order; deltas down are ordered by (term, version, stage) and delivered at least once, applied once.
Nothing here knows a socket, a clock or a thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from schemas.ids import BootId, JobId, NodeId, Seconds, Term, Version
from schemas.messages.agent import (
    AgentEvent,
    DeltaAcked,
    EventsCommitted,
    FromAgent,
    GroupDelta,
    Heartbeat,
    HeartbeatAck,
    Hello,
    HelloRequest,
    Numbered,
    Refused,
    ResendEvents,
    Resent,
    ToAgent,
    Welcome,
)

MAX_HELD: Final = 4096  # events that arrived too early and wait for a gap to close
MAX_RESENT: Final = 256  # events in one Resent
SPOOL_FULL: Final = 20_000  # events; beyond it an agent stops reading its workers' reports
Order = tuple[int, int, int]  # (term, version, stage)


@dataclass(frozen=True, slots=True)
class SessionTimings:
    """Intervals of a session, in seconds."""

    heartbeat_s: float = 1.0
    suspect_s: float = 6.0
    lost_s: float = 30.0
    retry_s: float = 2.0


# --- outputs


@dataclass(frozen=True, slots=True)
class ToController:
    """Send this over the agent's DEALER."""

    message: FromAgent


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish this on the agent's PUB."""

    numbered: Numbered


@dataclass(frozen=True, slots=True)
class SayHello:
    """Take stock of the workers and send what `hello` makes of it."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Make this the desired state of its job on this node."""

    delta: GroupDelta


@dataclass(frozen=True, slots=True)
class Welcomed:
    """A session began; the controller's bulk and event ports are in the message."""

    welcome: Welcome


@dataclass(frozen=True, slots=True)
class Rejected:
    """The controller does not accept this node."""

    refused: Refused


AgentOutput = ToController | Publish | SayHello | Apply | Welcomed | Rejected


@dataclass(frozen=True, slots=True)
class ToNode:
    """Send this to the agent."""

    message: ToAgent


@dataclass(frozen=True, slots=True)
class Deliver:
    """The next event of the stream; commit it, then call `committed`."""

    numbered: Numbered


ControllerOutput = ToNode | Deliver


def order_of(delta: GroupDelta | DeltaAcked) -> Order:
    """What makes one delta newer than another.

    Args:
        delta: what was sent, or what was acknowledged.

    Returns:
        (term, version, stage), to be compared as a tuple.
    """
    return (delta.term, delta.version, delta.stage)


# --- the agent's end


@dataclass(slots=True)
class AgentSession:
    """One agent's end: greets, numbers and spools events, fences deltas."""

    node: NodeId
    boot: BootId
    timings: SessionTimings = field(default_factory=SessionTimings)
    session: str | None = None
    term: Term = Term(0)
    spool: list[Numbered] = field(default_factory=list)
    sent: int = 0  # highest seq given out
    held: dict[JobId, Order] = field(default_factory=dict)
    _last_heard: Seconds = Seconds(0.0)
    _last_said: Seconds = Seconds(-1e9)

    @property
    def spool_full(self) -> bool:
        """Whether events should stay where they are until the controller caught up."""
        return len(self.spool) >= SPOOL_FULL

    def happened(self, event: AgentEvent) -> list[AgentOutput]:
        """Number `event`, keep it until it is committed, publish it.

        Args:
            event: of one of this node's workers.
        """
        self.sent += 1
        numbered = Numbered(node=self.node, boot=self.boot, seq=self.sent, event=event)
        self.spool.append(numbered)
        return [Publish(numbered)]

    def tick(self, now: Seconds) -> list[AgentOutput]:
        """What the passing of time asks for: a heartbeat, or a new greeting.

        Args:
            now: seconds of a monotonic clock, the same in every call.
        """
        if self.session is not None and now - self._last_heard > self.timings.suspect_s:
            self.session = None
        if now - self._last_said < self.timings.heartbeat_s:
            return []
        self._last_said = now
        if self.session is None:
            return [SayHello()]
        return [ToController(Heartbeat(session=self.session, events_sent=self.sent))]

    def receive(self, message: ToAgent, now: Seconds) -> list[AgentOutput]:
        """Take in one message of the controller; a stale one changes nothing.

        Args:
            message: as it was decoded.
            now: seconds of a monotonic clock.
        """
        match message:
            case Welcome():
                return self._welcome(message, now)
            case HelloRequest(term=term):
                return self._greet(term, now)
            case Refused():
                return [Rejected(message)]
            case HeartbeatAck(session=session, committed=committed):
                if session == self.session:
                    self._last_heard = now
                    self._forget(committed)
                return []
            case EventsCommitted(boot=boot, through=through):
                if boot == self.boot:
                    self._forget(through)
                return []
            case ResendEvents(boot=boot, first=first):
                return self._resend(first) if boot == self.boot else []
            case GroupDelta():
                return self._delta(message)

    def _welcome(self, message: Welcome, now: Seconds) -> list[AgentOutput]:
        if message.term < self.term or message.boot != self.boot:
            return []
        self.session, self.term, self._last_heard = message.session, message.term, now
        self._forget(message.committed)
        return [Welcomed(message), *self._resend(message.committed + 1)]

    def _greet(self, term: Term, now: Seconds) -> list[AgentOutput]:
        if term < self.term:
            return []
        self.term = term
        self.session, self._last_said = None, now
        return [SayHello()]

    def _forget(self, through: int) -> None:
        if self.spool and self.spool[0].seq <= through:
            self.spool = [numbered for numbered in self.spool if numbered.seq > through]

    def _resend(self, first: int) -> list[AgentOutput]:
        missed = [numbered for numbered in self.spool if numbered.seq >= first]
        return [
            ToController(Resent(events=tuple(missed[start : start + MAX_RESENT])))
            for start in range(0, len(missed), MAX_RESENT)
        ]

    def _delta(self, delta: GroupDelta) -> list[AgentOutput]:
        newest = self.held.get(delta.job, (0, 0, 0))
        order = order_of(delta)
        if order < newest or delta.term < self.term:
            term, version, stage = max(newest, (self.term, 0, 0))
            refusal = DeltaAcked(
                job=delta.job,
                term=Term(term),
                version=Version(version),
                stage=stage,
                applied=False,
            )
            return [ToController(refusal)]
        ack = DeltaAcked(
            job=delta.job, term=delta.term, version=delta.version, stage=delta.stage, applied=True
        )
        self.held[delta.job], self.term = order, delta.term
        applied: list[AgentOutput] = [Apply(delta)] if order > newest else []
        return [*applied, ToController(ack)]

    def forget_job(self, job: JobId) -> None:
        """Drop the fence of a job of which nothing is left on this node.

        Args:
            job: its name; one that is not held is passed over.
        """
        self.held.pop(job, None)


# --- the controller's end


class Condition(Enum):
    """What the controller thinks of a silent node."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    LOST = "lost"


@dataclass(slots=True)
class ControllerSession:
    """The controller's end towards one node."""

    node: NodeId
    term: Term
    timings: SessionTimings = field(default_factory=SessionTimings)
    session: str | None = None
    boot: BootId | None = None
    received: int = 0  # delivered through this seq
    durable: int = 0  # committed through this seq
    outstanding: dict[JobId, tuple[GroupDelta, Seconds]] = field(default_factory=dict)
    last_heard: Seconds = Seconds(0.0)
    _early: dict[int, Numbered] = field(default_factory=dict)
    _asked_at: Seconds = Seconds(-1e9)
    _behind_at: int | None = None  # what was received when the last heartbeat told of more
    _sessions: int = 0

    def greeted(
        self, hello: Hello, committed: int, now: Seconds, log_port: int, event_port: int
    ) -> list[ControllerOutput]:
        """Begin a session; `committed` is how far this boot's events are durable here.

        Args:
            hello: the agent's.
            committed: highest sequence number of this boot that is durable here.
            now: seconds of a monotonic clock, the same in every call.
            log_port: where the agent sends its workers' output.
            event_port: where it publishes.
        """
        self._sessions += 1
        self.session = f"{self.term}.{self._sessions}"
        if hello.boot != self.boot:
            self._early.clear()
            self.received = committed
        self.boot, self.durable = hello.boot, committed
        self.received = max(self.received, committed)
        self.last_heard = now
        self._asked_at = now
        self.outstanding.clear()
        welcome = Welcome(
            session=self.session,
            boot=hello.boot,
            term=self.term,
            committed=committed,
            log_port=log_port,
            event_port=event_port,
        )
        return [ToNode(welcome)]

    def receive(
        self, message: Heartbeat | Resent | DeltaAcked, now: Seconds
    ) -> list[ControllerOutput]:
        """Take in what came over the ROUTER.

        Args:
            message: of this node, as it was decoded.
            now: seconds of a monotonic clock.
        """
        match message:
            case Heartbeat():
                return self._heartbeat(message, now)
            case Resent(events=events):
                return self.published(events, now)
            case DeltaAcked():
                waiting = self.outstanding.get(message.job)
                if waiting and order_of(message) >= order_of(waiting[0]):
                    del self.outstanding[message.job]
                return []

    def published(self, events: Iterable[Numbered], now: Seconds) -> list[ControllerOutput]:
        """Take in events: deliver those in order, hold early ones, ask for what is missing.

        Args:
            events: in any order, perhaps repeated, perhaps of an earlier boot.
            now: seconds of a monotonic clock.
        """
        outputs: list[ControllerOutput] = []
        for numbered in events:
            if numbered.boot != self.boot or numbered.seq <= self.received:
                continue
            if len(self._early) < MAX_HELD or numbered.seq == self.received + 1:
                self._early[numbered.seq] = numbered
            while (ready := self._early.pop(self.received + 1, None)) is not None:
                self.received += 1
                outputs.append(Deliver(ready))
        if self._early:
            outputs.extend(self._ask(now))
        return outputs

    def committed(self, through: int) -> list[ControllerOutput]:
        """Tell the agent that its events through this one are durable.

        Args:
            through: a sequence number of this boot.
        """
        if self.boot is None or through <= self.durable:
            return []
        self.durable = through
        return [ToNode(EventsCommitted(boot=self.boot, through=through))]

    def order(self, delta: GroupDelta, now: Seconds) -> list[ControllerOutput]:
        """Send `delta` until it is acknowledged; only the newest of a job is repeated.

        Args:
            delta: what the node should run of one job.
            now: seconds of a monotonic clock.

        Returns:
            Nothing while no session is open: the next hello asks for all deltas again.
        """
        if self.session is None:
            return []
        self.outstanding[delta.job] = (delta, now)
        return [ToNode(delta)]

    def tick(self, now: Seconds) -> list[ControllerOutput]:
        """Repeat deltas that nobody acknowledged.

        Args:
            now: seconds of a monotonic clock.
        """
        overdue = [
            delta
            for delta, said in self.outstanding.values()
            if now - said >= self.timings.retry_s and self.session is not None
        ]
        outputs: list[ControllerOutput] = []
        for delta in overdue:
            outputs.extend(self.order(delta, now))
        return outputs

    def condition(self, now: Seconds) -> Condition:
        """What the time since the last word of this node means.

        Args:
            now: seconds of a monotonic clock.
        """
        silent = now - self.last_heard
        if silent >= self.timings.lost_s:
            return Condition.LOST
        return Condition.SUSPECT if silent >= self.timings.suspect_s else Condition.ALIVE

    def _heartbeat(self, message: Heartbeat, now: Seconds) -> list[ControllerOutput]:
        if self.session is None or message.session != self.session:
            return [ToNode(HelloRequest(term=self.term))]
        self.last_heard = now
        ack = ToNode(HeartbeatAck(session=self.session, term=self.term, committed=self.durable))
        behind = message.events_sent > self.received
        # Events travel on a socket of their own: those that are only late come before the next.
        missing = self._ask(now) if behind and self._behind_at == self.received else []
        self._behind_at = self.received if behind else None
        return [ack, *missing]

    def _ask(self, now: Seconds) -> list[ControllerOutput]:
        if self.boot is None or now - self._asked_at < self.timings.heartbeat_s / 2:
            return []
        self._asked_at = now
        return [ToNode(ResendEvents(boot=self.boot, first=self.received + 1))]
