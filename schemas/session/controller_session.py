"""Controller's end of a session with one agent: events in order, deltas until acknowledged.

All times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from schemas.ids import BootId, JobId, NodeId, Seconds, Term
from schemas.session.delivery_rules import (
    SessionTimings,
    equivalent_hellos,
    order_of,
    sweep_order_of,
)
from schemas.wire.agent import (
    DeltaAcked,
    EventsCommitted,
    GroupDelta,
    Heartbeat,
    HeartbeatAck,
    Hello,
    HelloRequest,
    Numbered,
    ResendEvents,
    Resent,
    ToSession,
    Welcome,
)
from schemas.wire.sweeps import SweepDelta, SweepDeltaAcked

MAX_HELD: Final = 4096  # events that arrived early and wait for a gap to close


@dataclass(frozen=True, slots=True)
class ToNode:
    """Send this to the agent."""

    message: ToSession


@dataclass(frozen=True, slots=True)
class Deliver:
    """The next event of the stream; commit it, then call `acknowledge`."""

    numbered: Numbered


ControllerOutput = ToNode | Deliver


class Condition(Enum):
    """State of a node, by the length of its silence."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    LOST = "lost"


@dataclass(slots=True)
class ControllerSession:
    """Controller's end of a session with one node."""

    node: NodeId
    term: Term
    timings: SessionTimings = field(default_factory=SessionTimings)
    session: str | None = None
    boot: BootId | None = None
    received: int = 0  # delivered through this seq
    durable: int = 0  # committed through this seq
    outstanding: dict[JobId, tuple[GroupDelta, Seconds]] = field(default_factory=dict)
    outstanding_sweeps: dict[JobId, tuple[SweepDelta, Seconds]] = field(default_factory=dict)
    last_received_at: Seconds = Seconds(0.0)
    _early: dict[int, Numbered] = field(default_factory=dict)
    _requested_at: Seconds = Seconds(-1e9)
    _behind_at: int | None = None  # `received` when the last heartbeat announced more
    _sessions: int = 0
    _echoes: int = 0
    _echo: str = ""  # word that the next hello must repeat; empty: none
    _hello: Hello | None = None  # that began this session

    def open_session(
        self, hello: Hello, committed: int, now: Seconds, log_port: int, event_port: int
    ) -> list[ControllerOutput]:
        """Begin a session.

        A hello that does not repeat our word is no sign of life: its agent may not receive us.

        Args:
            committed: highest sequence number of this boot that is durable.
            log_port: where the agent sends its workers' output.
        """
        self._sessions += 1
        self._hello = hello
        self.session = f"{self.term}.{self._sessions}"
        if hello.boot != self.boot:
            self._early.clear()
            self.received = committed
            self.last_received_at = now  # a new connection, whose handshake needed our replies
        self._check_echo(hello, now)
        self.boot, self.durable = hello.boot, committed
        self.received = max(self.received, committed)
        self._requested_at = now
        self.outstanding.clear()
        self.outstanding_sweeps.clear()
        return [ToNode(self._welcome(self.session, hello.boot, log_port, event_port))]

    def repeats_hello(self, hello: Hello) -> bool:
        """True if a hello only repeats the one with which the current session began."""
        begun = self._hello
        return self.session is not None and begun is not None and equivalent_hellos(begun, hello)

    def resume_session(
        self, hello: Hello, now: Seconds, log_port: int, event_port: int
    ) -> list[ControllerOutput]:
        """Welcome an agent back into its open session; its deltas continue to be repeated."""
        if self.session is None:
            return []
        self._check_echo(hello, now)
        return [ToNode(self._welcome(self.session, hello.boot, log_port, event_port))]

    def echo_matches(self, hello: Hello) -> bool:
        """True if a hello proves that its agent receives our messages.

        An older agent repeats nothing, and is believed.
        """
        return hello.echo is None or (self._echo != "" and hello.echo == self._echo)

    def request_hello(self) -> list[ControllerOutput]:
        """Request a hello that repeats a word which the agent cannot know otherwise."""
        if not self._echo:
            self._echoes += 1
            self._echo = f"{self.term}.{self._echoes}"
        return [ToNode(HelloRequest(term=self.term, echo=self._echo))]

    def _check_echo(self, hello: Hello, now: Seconds) -> None:
        if self.echo_matches(hello):
            self.last_received_at, self._echo = now, ""

    def _welcome(self, session: str, boot: BootId, log_port: int, event_port: int) -> Welcome:
        return Welcome(
            session=session,
            boot=boot,
            term=self.term,
            committed=self.durable,
            log_port=log_port,
            event_port=event_port,
        )

    def receive(
        self, message: Heartbeat | Resent | DeltaAcked | SweepDeltaAcked, now: Seconds
    ) -> list[ControllerOutput]:
        """Process a message of this node that arrived over the ROUTER."""
        match message:
            case Heartbeat():
                return self._on_heartbeat(message, now)
            case Resent(events=events):
                return self.receive_events(events, now)
            case DeltaAcked():
                waiting = self.outstanding.get(message.job)
                if waiting and order_of(message) >= order_of(waiting[0]):
                    del self.outstanding[message.job]
                return []
            case SweepDeltaAcked():
                ordered = self.outstanding_sweeps.get(message.job)
                if ordered and sweep_order_of(message) >= sweep_order_of(ordered[0]):
                    del self.outstanding_sweeps[message.job]
                return []

    def receive_events(self, events: Iterable[Numbered], now: Seconds) -> list[ControllerOutput]:
        """Deliver events that are next in order, hold early ones, request missing ones.

        The events may be unordered, repeated or of an earlier boot; those of another node are
        skipped.
        """
        outputs: list[ControllerOutput] = []
        for numbered in events:
            if numbered.boot != self.boot or numbered.seq <= self.received:
                continue
            if numbered.node != self.node:
                continue
            if len(self._early) < MAX_HELD or numbered.seq == self.received + 1:
                self._early[numbered.seq] = numbered
            while (ready := self._early.pop(self.received + 1, None)) is not None:
                self.received += 1
                outputs.append(Deliver(ready))
        if self._early:
            outputs.extend(self._request_missing(now))
        return outputs

    def acknowledge(self, through: int) -> list[ControllerOutput]:
        """Tell the agent that its events up to this sequence number are durable."""
        if self.boot is None or through <= self.durable:
            return []
        self.durable = through
        return [ToNode(EventsCommitted(boot=self.boot, through=through))]

    def order(self, delta: GroupDelta | SweepDelta, now: Seconds) -> list[ControllerOutput]:
        """Send a delta until it is acknowledged; only the newest of a job or sweep is repeated.

        Returns nothing while no session is open: the next hello requests all deltas again.
        """
        if self.session is None:
            return []
        if isinstance(delta, SweepDelta):
            self.outstanding_sweeps[delta.job] = (delta, now)
        else:
            self.outstanding[delta.job] = (delta, now)
        return [ToNode(delta)]

    def withdraw(self, delta: GroupDelta | SweepDelta) -> None:
        """Stop repeating this delta; a newer one of its job stays."""
        group, sweep = self.outstanding.get(delta.job), self.outstanding_sweeps.get(delta.job)
        if group is not None and group[0] is delta:
            del self.outstanding[delta.job]
        elif sweep is not None and sweep[0] is delta:
            del self.outstanding_sweeps[delta.job]

    def tick(self, now: Seconds) -> list[ControllerOutput]:
        """Repeat deltas that were not acknowledged in time."""
        ordered: list[tuple[GroupDelta | SweepDelta, Seconds]] = []
        if self.session is not None:
            ordered += self.outstanding.values()
            ordered += self.outstanding_sweeps.values()
        overdue = [delta for delta, said in ordered if now - said >= self.timings.retry_s]
        outputs: list[ControllerOutput] = []
        for delta in overdue:
            outputs.extend(self.order(delta, now))
        return outputs

    def condition(self, now: Seconds) -> Condition:
        """Return the condition that follows from the time since the node's last message."""
        silent = now - self.last_received_at
        if silent >= self.timings.lost_s:
            return Condition.LOST
        return Condition.SUSPECT if silent >= self.timings.suspect_s else Condition.ALIVE

    def _on_heartbeat(self, message: Heartbeat, now: Seconds) -> list[ControllerOutput]:
        if self.session is None or message.session != self.session:
            return self.request_hello()
        self.last_received_at = now
        answer = HeartbeatAck(
            session=self.session, term=self.term, committed=self.durable, number=message.number
        )
        behind = message.events_sent > self.received
        # Events use another socket: late ones arrive before the next heartbeat.
        missing = self._request_missing(now) if behind and self._behind_at == self.received else []
        self._behind_at = self.received if behind else None
        return [ToNode(answer), *missing]

    def _request_missing(self, now: Seconds) -> list[ControllerOutput]:
        if self.boot is None or now - self._requested_at < self.timings.heartbeat_s / 2:
            return []
        self._requested_at = now
        return [ToNode(ResendEvents(boot=self.boot, first=self.received + 1))]
