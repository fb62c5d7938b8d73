"""Sans-I/O delivery between the controller and one agent.

Inputs are decoded messages, clock ticks, and events or deltas to send. Outputs are values that
describe what to send, publish or accept. Events go to the controller. They are numbered per (node,
boot) and delivered once, in order. Deltas go to the agent. Deltas of jobs are ordered by (term,
version, stage), and deltas of sweeps by (term, revision). Each delta is delivered at least once and
applied once. This module uses no socket, clock or thread. All times are seconds of one monotonic
clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Final

from msgspec.structs import replace

from schemas.ids import BootId, JobId, NodeId, Seconds, Term, Version
from schemas.wire.agent import (
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
    ToSession,
    Welcome,
)
from schemas.wire.sweeps import SweepDelta, SweepDeltaAcked

Delta = GroupDelta | SweepDelta
Order = tuple[int, ...]  # (term, version, stage); for a sweep (term, revision)
Key = tuple[JobId, bool]  # job, and True for its sweep
MAX_RESENT: Final = 256  # events in one Resent
MAX_DOUBLINGS: Final = 10  # then the pause between hellos grows no further
MAX_RETRY_S: Final = 16.0  # longest pause between copies of a delta
MAX_HELLO_PAUSE_S: Final = 8.0  # longest pause between hellos; the first one is one heartbeat
HEARTBEATS_PER_S: Final = 2000.0  # of all nodes together
AGENT_SUSPECT_S: Final = 6.0  # an agent without replies for so long leaves its session
BEAT_DELAY_S: Final = 0.75  # longest time from when three heartbeats are due until they are handled
MAX_SPOOLED: Final = 20_000  # events; then the agent stops reading its workers' reports
MAX_HELD: Final = 4096  # events that arrived early and wait for a gap to close


@dataclass(frozen=True, slots=True)
class SessionTimings:
    """Intervals of a session, in seconds."""

    heartbeat_s: float = 1.0
    suspect_s: float = AGENT_SUSPECT_S
    lost_s: float = 30.0
    missed_s: float = 5.0  # replaces `lost_s` if workers of other nodes wait for this node's
    retry_s: float = 2.0  # until a delta is repeated for the first time
    forget_s: float = 30 * 86400.0  # a node that was lost for so long is removed

    def of_cluster(self, nodes: int) -> SessionTimings:
        """Return timings with fewer heartbeats, so that many nodes do not keep a core busy."""
        silence_s = min(self.suspect_s, self.missed_s, AGENT_SUSPECT_S)
        longest_s = (silence_s - BEAT_DELAY_S) / 3.0  # two heartbeats may be lost
        pause_s = min(longest_s, nodes / HEARTBEATS_PER_S)
        return dataclasses.replace(self, heartbeat_s=max(self.heartbeat_s, pause_s))


def equivalent_hellos(one: Hello, other: Hello) -> bool:
    """True if two hellos differ only in numbers of events, `term`, `echo`, or the known jobs."""
    passing = ("events_sent", "events_dropped", "echo", "jobs", "highest_job", "term")
    same = {name: getattr(one, name) for name in passing}
    return one == replace(other, **same)


def key_of(message: Delta | DeltaAcked | SweepDeltaAcked) -> Key:
    """Return the key of a delta's job or sweep. A later delta replaces earlier ones of its key."""
    return message.job, isinstance(message, SweepDelta | SweepDeltaAcked)


def order_of(message: Delta | DeltaAcked | SweepDeltaAcked) -> Order:
    """Return the tuple that orders the deltas of a job, or of a sweep."""
    if isinstance(message, SweepDelta | SweepDeltaAcked):
        return message.term, message.revision
    return message.term, message.version, message.stage


def _ack(delta: Delta, order: Order, *, applied: bool) -> DeltaAcked | SweepDeltaAcked:
    term, version, *stage = order
    if isinstance(delta, SweepDelta):
        return SweepDeltaAcked(job=delta.job, term=Term(term), revision=version)
    return DeltaAcked(
        job=delta.job, term=Term(term), version=Version(version), stage=stage[0], applied=applied
    )


# --- agent's end, which sends hellos, numbers and spools events, and refuses old deltas


@dataclass(frozen=True, slots=True)
class ToController:
    """Instruction to send a message over the agent's DEALER."""

    message: FromAgent


@dataclass(frozen=True, slots=True)
class Publish:
    """Instruction to send an event."""

    numbered: Numbered


@dataclass(frozen=True, slots=True)
class SendHello:
    """Instruction to send a `Hello` with the current workers. On failure call `hello_not_sent`."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Instruction to make this the desired state of its job, or of its sweep, on this node."""

    delta: Delta


# A `Welcome` begins a session and has ports. `Refused` means that the controller rejects this node.
AgentOutput = ToController | Publish | SendHello | Apply | Welcome | Refused


@dataclass(slots=True)
class AgentSession:
    """Agent's end of a session with the controller."""

    node: NodeId
    boot: BootId
    timings: SessionTimings = field(default_factory=SessionTimings)
    session: str | None = None
    term: Term = Term(0)
    spool: list[Numbered] = field(default_factory=list)
    sent: int = 0  # last sequence number
    held: dict[Key, Order] = field(default_factory=dict)
    echo: str = ""  # from the last `HelloRequest`, to be repeated in hellos
    longest_heartbeat_s: float = inf  # a lost heartbeat must not fence this agent's workers
    chance: Callable[[], float] = lambda: 0.0  # random number, 0 to 1, which spreads agents' hellos
    _last_received_at: Seconds = Seconds(0.0)
    _unanswered_hellos: int = 0
    _next_hello_at: Seconds = Seconds(-1e9)  # time of the next hello
    _last_sent: Seconds = Seconds(-1e9)
    _heartbeats: int = 0  # number of sent heartbeats
    _pending: dict[int, Seconds] = field(default_factory=dict)  # sending times by heartbeat number
    _acked_sent_at: Seconds | None = None  # sending time of the last acknowledged heartbeat

    @property
    def spool_full(self) -> bool:
        """True if events should wait at their source until the controller has caught up."""
        return len(self.spool) >= MAX_SPOOLED

    @property
    def dropped(self) -> int:
        """Highest sequence number that is committed and can no longer be resent."""
        return self.spool[0].seq - 1 if self.spool else self.sent

    def unconfirmed_s(self, now: Seconds) -> float:
        """Return for how many seconds the controller might have received nothing from this agent.

        A reply proves that a heartbeat arrived, and the agent knows when it sent this heartbeat.
        The result is the time since then, because later messages might have been lost.
        """
        return 0.0 if self._acked_sent_at is None else now - self._acked_sent_at

    def record_event(self, event: AgentEvent) -> list[AgentOutput]:
        """Number an event of a worker, store it until it is committed, and publish it."""
        self.sent += 1
        numbered = Numbered(node=self.node, boot=self.boot, seq=self.sent, event=event)
        self.spool.append(numbered)
        return [Publish(numbered)]

    def tick(self, now: Seconds) -> list[AgentOutput]:
        """Return what must be sent now: a heartbeat, a hello, or nothing."""
        if self._acked_sent_at is None:
            self._acked_sent_at = now  # first tick after the agent's start
        if self.session is not None and now - self._last_received_at > self.timings.suspect_s:
            self._leave_session()
        if self.session is None:
            return self._send_hello(now) if now >= self._next_hello_at else []
        if now - self._last_sent < self.timings.heartbeat_s:
            return []
        self._last_sent = now
        self._heartbeats += 1
        self._pending[self._heartbeats] = now
        heartbeat = Heartbeat(session=self.session, events_sent=self.sent, number=self._heartbeats)
        return [ToController(heartbeat)]

    def receive(self, message: ToSession, now: Seconds) -> list[AgentOutput]:
        """Process a message from the controller. An outdated message changes nothing."""
        match message:
            case Welcome():
                return self._on_welcome(message, now)
            case HelloRequest():
                return self._on_hello_request(message, now)
            case Refused():
                self._unanswered_hellos = MAX_DOUBLINGS
                self._next_hello_at = self._after_pause(now)
                return [message]
            case HeartbeatAck(session=session, term=term, committed=committed):
                if session == self.session and term >= self.term:
                    self._last_received_at = now
                    self._record_ack(message.number, now)
                    self._drop_through(committed)
                return []
            case EventsCommitted(boot=boot, through=through, term=term):
                if boot == self.boot and term >= self.term:
                    self._drop_through(through)
                return []
            case ResendEvents(boot=boot, first=first):
                return self._resend(first) if boot == self.boot else []
            case GroupDelta() | SweepDelta():
                return self._on_delta(message)

    def _record_ack(self, number: int, now: Seconds) -> None:
        """Record that a heartbeat arrived. `number` is 0 in replies of older controllers."""
        sent_at = self._pending.get(number) if number else now
        if sent_at is not None:
            self._acked_sent_at = sent_at
            self._pending = {n: at for n, at in self._pending.items() if n > number > 0}

    def _on_welcome(self, message: Welcome, now: Seconds) -> list[AgentOutput]:
        if message.term < self.term or message.boot != self.boot:
            return []
        if message.session != self.session:
            self._pending.clear()
        self.session, self.term = message.session, message.term
        pause_s = min(message.heartbeat_s, self.longest_heartbeat_s)
        self.timings = dataclasses.replace(self.timings, heartbeat_s=pause_s)
        self._last_received_at = self._last_sent = now
        self._drop_through(message.committed)
        return [message, *self._resend(message.committed + 1)]

    def _on_hello_request(self, asked: HelloRequest, now: Seconds) -> list[AgentOutput]:
        if asked.term < self.term:
            return []
        known = (asked.term, asked.echo or self.echo) == (self.term, self.echo)
        if self.session is None and known and now < self._next_hello_at:
            return []  # a hello was sent just now
        self.term, self.echo = asked.term, asked.echo or self.echo
        self._leave_session()
        return self._send_hello(now)

    def _leave_session(self) -> None:
        self.session, self._unanswered_hellos, self._next_hello_at = None, 0, Seconds(-1e9)

    def _send_hello(self, now: Seconds) -> list[AgentOutput]:
        self._next_hello_at = self._after_pause(now)
        self._unanswered_hellos = min(self._unanswered_hellos + 1, MAX_DOUBLINGS)
        return [SendHello()]

    def _after_pause(self, now: Seconds) -> Seconds:
        """Return the time of the next hello. Pauses double, and vary randomly between agents."""
        pause_s = min(MAX_HELLO_PAUSE_S, self.timings.heartbeat_s * 2.0**self._unanswered_hellos)
        return Seconds(now + pause_s * (1.0 - self.chance() / 2.0))

    def hello_not_sent(self, now: Seconds) -> None:
        """Retry a hello that could not be sent soon, because it caused the controller no work."""
        self._unanswered_hellos = 0
        self._next_hello_at = self._after_pause(now)

    def _drop_through(self, through: int) -> None:
        if self.spool and self.spool[0].seq <= through:
            self.spool = [numbered for numbered in self.spool if numbered.seq > through]

    def _resend(self, first: int) -> list[AgentOutput]:
        missed = [numbered for numbered in self.spool if numbered.seq >= first]
        return [
            ToController(Resent(events=tuple(missed[start : start + MAX_RESENT])))
            for start in range(0, len(missed), MAX_RESENT)
        ]

    def _on_delta(self, delta: Delta) -> list[AgentOutput]:
        key, order = key_of(delta), order_of(delta)
        newest = self.held.get(key, (0,))
        if order < newest or delta.term < self.term:
            held = max(newest, (self.term, 0, 0))
            return [ToController(_ack(delta, held, applied=False))]
        self.held[key], self.term = order, delta.term
        applied: list[AgentOutput] = []
        # `forget` may be set after the last version of a job was applied.
        if order > newest or (isinstance(delta, GroupDelta) and delta.forget):
            applied = [Apply(delta)]
        return [*applied, ToController(_ack(delta, order, applied=True))]

    def forget_job(self, job: JobId) -> None:
        """Delete the order numbers of a job that has nothing left on this node."""
        for is_sweep in (False, True):
            self.held.pop((job, is_sweep), None)


# --- controller's end, which delivers events in order and repeats deltas until acknowledged


@dataclass(frozen=True, slots=True)
class ToNode:
    """Instruction to send a message to the agent."""

    message: ToSession


@dataclass(frozen=True, slots=True)
class Deliver:
    """The next event of the stream. The caller commits it, then calls `acknowledge`."""

    numbered: Numbered


ControllerOutput = ToNode | Deliver


class Condition(Enum):
    """Condition of a node, derived from the length of its silence."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    LOST = "lost"


@dataclass(slots=True)
class Outstanding:
    """Delta that is repeated until it is acknowledged."""

    delta: Delta
    sent_at: Seconds
    pause_s: float  # until it is repeated


@dataclass(slots=True)
class ControllerSession:
    """Controller's end of a session with one node."""

    node: NodeId
    term: Term
    timings: SessionTimings = field(default_factory=SessionTimings)
    session: str | None = None
    boot: BootId | None = None
    received: int = 0  # events are delivered up to this sequence number
    durable: int = 0  # events are committed up to this sequence number
    outstanding: dict[Key, Outstanding] = field(default_factory=dict)
    last_received_at: Seconds = Seconds(0.0)
    _early: dict[int, Numbered] = field(default_factory=dict)
    _requested_at: Seconds = Seconds(-1e9)
    _behind_at: int | None = None  # `received` if the last heartbeat announced later events
    _sessions: int = 0
    _echoes: int = 0
    _echo: str = ""  # text that the next hello must repeat; empty: none
    _hello: Hello | None = None  # the hello that began this session
    _report_again: bool = False  # the journal lost reports of this boot

    def open_session(
        self, hello: Hello, committed: int, now: Seconds, log_port: int, event_port: int
    ) -> list[ControllerOutput]:
        """Begin a session. `committed` is the highest durable sequence number of this boot.

        If the journal lost events that the agent has dropped, the welcome requests them anew.
        A hello without our echo does not prove that the node is alive, because the agent might not
        receive our messages.
        """
        self._sessions += 1
        self._hello = hello
        self._report_again = hello.events_dropped > committed
        committed = max(committed, hello.events_dropped)
        self.session = f"{self.term}.{self._sessions}"
        if hello.boot != self.boot:
            self._early.clear()
            self.received = committed
            self.last_received_at = now  # the handshake of its new connection needed our replies
        self.boot, self.durable = hello.boot, committed
        self.received = max(self.received, committed)
        self._requested_at = now
        self.outstanding.clear()
        return self.resume_session(hello, now, log_port, event_port)

    def repeats_hello(self, hello: Hello) -> bool:
        """True if a hello is equivalent to the hello that began the current session."""
        begun = self._hello
        return self.session is not None and begun is not None and equivalent_hellos(begun, hello)

    def resume_session(
        self, hello: Hello, now: Seconds, log_port: int, event_port: int
    ) -> list[ControllerOutput]:
        """Send another welcome in the open session. Outstanding deltas are soon repeated."""
        if self.session is None:
            return []
        for one in self.outstanding.values():
            one.sent_at, one.pause_s = now, self.timings.retry_s
        if self.echo_matches(hello):
            self.last_received_at, self._echo = now, ""
        return self.repeat_welcome(log_port, event_port)

    def repeat_welcome(self, log_port: int, event_port: int) -> list[ControllerOutput]:
        """Send another welcome in the open session, so that the agent learns new timings."""
        if self.session is None or self.boot is None:
            return []
        welcome = Welcome(
            session=self.session,
            boot=self.boot,
            term=self.term,
            committed=self.durable,
            log_port=log_port,
            event_port=event_port,
            report_again=self._report_again,
            heartbeat_s=self.timings.heartbeat_s,
            events_here=True,
        )
        return [ToNode(welcome)]

    def echo_matches(self, hello: Hello) -> bool:
        """True if a hello proves that its agent receives our messages.

        Older agents repeat no echo. Their hellos are accepted as proof.
        """
        return hello.echo is None or (self._echo != "" and hello.echo == self._echo)

    def request_hello(self) -> list[ControllerOutput]:
        """Request a hello with an `echo` that the agent can only know from this request."""
        if not self._echo:
            self._echoes += 1
            self._echo = f"{self.term}.{self._echoes}"
        return [ToNode(HelloRequest(term=self.term, echo=self._echo))]

    def receive(
        self, message: Heartbeat | Resent | DeltaAcked | SweepDeltaAcked, now: Seconds
    ) -> list[ControllerOutput]:
        """Process a message of this node that arrived over the ROUTER."""
        match message:
            case Heartbeat():
                return self._on_heartbeat(message, now)
            case Resent(events=events):
                return self.receive_events(events, now)
            case DeltaAcked() | SweepDeltaAcked():
                ordered = self.outstanding.get(key_of(message))
                if ordered and order_of(message) >= order_of(ordered.delta):
                    del self.outstanding[key_of(message)]
                return []

    def receive_events(self, events: Iterable[Numbered], now: Seconds) -> list[ControllerOutput]:
        """Deliver events that are next in order, store early ones, and request missing ones.

        The events may be in any order. Repeated events, and events of another node or boot, are
        skipped.
        """
        outputs: list[ControllerOutput] = []
        for numbered in events:
            if (numbered.node, numbered.boot) != (self.node, self.boot):
                continue
            if numbered.seq <= self.received:
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
        return [ToNode(EventsCommitted(boot=self.boot, through=through, term=self.term))]

    def order(self, delta: Delta, now: Seconds) -> list[ControllerOutput]:
        """Send a delta and repeat it until it is acknowledged, or replaced by a newer one.

        Return nothing while no session is open, because all deltas are sent after the next hello.
        """
        if self.session is None:
            return []
        self.outstanding[key_of(delta)] = Outstanding(delta, now, self.timings.retry_s)
        return [ToNode(delta)]

    def withdraw(self, delta: Delta) -> None:
        """Stop repeating this delta. A newer delta of the same job continues to be repeated."""
        ordered = self.outstanding.get(key_of(delta))
        if ordered is not None and ordered.delta is delta:
            del self.outstanding[key_of(delta)]

    def tick(self, now: Seconds) -> list[ControllerOutput]:
        """Repeat deltas that were not acknowledged in time, after pauses that double."""
        if self.session is None:
            return []
        overdue = [one for one in self.outstanding.values() if now - one.sent_at >= one.pause_s]
        for one in overdue:
            one.sent_at, one.pause_s = now, min(MAX_RETRY_S, 2.0 * one.pause_s)
        return [ToNode(one.delta) for one in overdue]

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
        # Older agents send events on another socket, so late ones may still arrive before the next
        # heartbeat.
        missing = self._request_missing(now) if behind and self._behind_at == self.received else []
        self._behind_at = self.received if behind else None
        return [ToNode(answer), *missing]

    def _request_missing(self, now: Seconds) -> list[ControllerOutput]:
        if self.boot is None or now - self._requested_at < self.timings.heartbeat_s / 2:
            return []
        self._requested_at = now
        return [ToNode(ResendEvents(boot=self.boot, first=self.received + 1))]
