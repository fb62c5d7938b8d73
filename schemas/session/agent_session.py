"""Agent's end of a session: sends hellos, numbers and spools events, refuses old deltas.

All times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from schemas.ids import BootId, JobId, NodeId, Seconds, Term, Version
from schemas.session.delivery_rules import (
    Order,
    SessionTimings,
    SweepOrder,
    order_of,
    sweep_order_of,
)
from schemas.wire.agent import (
    AgentEvent,
    DeltaAcked,
    EventsCommitted,
    FromAgent,
    GroupDelta,
    Heartbeat,
    HeartbeatAck,
    HelloRequest,
    Numbered,
    Refused,
    ResendEvents,
    Resent,
    ToSession,
    Welcome,
)
from schemas.wire.sweeps import SweepDelta, SweepDeltaAcked

MAX_RESENT: Final = 256  # events in one Resent
MAX_DOUBLINGS: Final = 10  # the pause between hellos grows no further
MAX_HELLO_PAUSE_S: Final = 8.0  # between two unanswered hellos; the first pause is one heartbeat
MAX_SPOOLED: Final = 20_000  # events; beyond it the agent stops reading its workers' reports


@dataclass(frozen=True, slots=True)
class ToController:
    """Send this over the agent's DEALER."""

    message: FromAgent


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish this on the agent's PUB."""

    numbered: Numbered


@dataclass(frozen=True, slots=True)
class SendHello:
    """Build a `Hello` from the current workers and send it, or call `hello_not_sent`."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Make this the desired state of its job, or of its sweep, on this node."""

    delta: GroupDelta | SweepDelta


@dataclass(frozen=True, slots=True)
class Welcomed:
    """A session began; the message has the controller's bulk and event ports."""

    welcome: Welcome


@dataclass(frozen=True, slots=True)
class Rejected:
    """The controller does not accept this node."""

    refused: Refused


AgentOutput = ToController | Publish | SendHello | Apply | Welcomed | Rejected


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
    held: dict[JobId, Order] = field(default_factory=dict)
    held_sweeps: dict[JobId, SweepOrder] = field(default_factory=dict)
    echo: str = ""  # word that the last `HelloRequest` asked to repeat
    chance: Callable[[], float] = lambda: 0.0  # 0 to 1: spreads the hellos of many agents
    _last_received_at: Seconds = Seconds(0.0)
    _unanswered_hellos: int = 0
    _next_hello_at: Seconds = Seconds(-1e9)  # when the next one is due
    _last_sent: Seconds = Seconds(-1e9)
    _heartbeats: int = 0  # sent
    _pending: dict[int, Seconds] = field(default_factory=dict)  # heartbeats' times, by number
    _acked_sent_at: Seconds | None = None  # time of sending of the last heartbeat with a reply

    @property
    def spool_full(self) -> bool:
        """True if events should wait at their source until the controller has caught up."""
        return len(self.spool) >= MAX_SPOOLED

    @property
    def dropped(self) -> int:
        """Highest sequence number that is committed and can no longer be resent."""
        return self.spool[0].seq - 1 if self.spool else self.sent

    def unconfirmed_s(self, now: Seconds) -> float:
        """Return how long the controller may have received nothing of this agent, in seconds.

        A reply proves that its heartbeat arrived, and when that was sent. The controller has
        received something since then, even if later replies were lost.
        """
        return 0.0 if self._acked_sent_at is None else now - self._acked_sent_at

    def record_event(self, event: AgentEvent) -> list[AgentOutput]:
        """Number an event of a worker, keep it until it is committed, publish it."""
        self.sent += 1
        numbered = Numbered(node=self.node, boot=self.boot, seq=self.sent, event=event)
        self.spool.append(numbered)
        return [Publish(numbered)]

    def tick(self, now: Seconds) -> list[AgentOutput]:
        """Return what is due: a heartbeat, or a hello."""
        if self._acked_sent_at is None:
            self._acked_sent_at = now  # the agent starts
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
        """Process one message of the controller; a stale one changes nothing."""
        match message:
            case Welcome():
                return self._on_welcome(message, now)
            case HelloRequest():
                return self._on_hello_request(message, now)
            case Refused():
                self._unanswered_hellos = MAX_DOUBLINGS
                self._next_hello_at = self._after_pause(now)
                return [Rejected(message)]
            case HeartbeatAck(session=session, term=term, committed=committed):
                if session == self.session and term >= self.term:
                    self._last_received_at = now
                    self._record_ack(message.number, now)
                    self._drop_through(committed)
                return []
            case EventsCommitted(boot=boot, through=through):
                if boot == self.boot:
                    self._drop_through(through)
                return []
            case ResendEvents(boot=boot, first=first):
                return self._resend(first) if boot == self.boot else []
            case GroupDelta():
                return self._on_delta(message)
            case SweepDelta():
                return self._on_sweep_delta(message)

    def _record_ack(self, number: int, now: Seconds) -> None:
        """Record that a heartbeat arrived; an older controller does not say which one."""
        said = self._pending.get(number) if number else now
        if said is not None:
            self._acked_sent_at = said
            later = {n: at for n, at in self._pending.items() if n > number > 0}
            self._pending = later

    def _on_welcome(self, message: Welcome, now: Seconds) -> list[AgentOutput]:
        if message.term < self.term or message.boot != self.boot:
            return []
        if message.session != self.session:
            self._pending.clear()
        self.session, self.term = message.session, message.term
        self._last_received_at = self._last_sent = now
        self._drop_through(message.committed)
        return [Welcomed(message), *self._resend(message.committed + 1)]

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
        """Return the time of the next hello: pauses double, and agents differ by chance."""
        pause_s = min(MAX_HELLO_PAUSE_S, self.timings.heartbeat_s * 2.0**self._unanswered_hellos)
        return Seconds(now + pause_s * (1.0 - self.chance() / 2.0))

    def hello_not_sent(self, now: Seconds) -> None:
        """Retry soon after a hello that could not be sent: it cost the controller nothing."""
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

    def _on_delta(self, delta: GroupDelta) -> list[AgentOutput]:
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
        news = order > newest or delta.forget  # a job may be forgotten later than its last version
        applied: list[AgentOutput] = [Apply(delta)] if news else []
        return [*applied, ToController(ack)]

    def _on_sweep_delta(self, delta: SweepDelta) -> list[AgentOutput]:
        newest = self.held_sweeps.get(delta.job, (0, 0))
        order = sweep_order_of(delta)
        if order < newest or delta.term < self.term:
            term, revision = max(newest, (self.term, 0))
            held = SweepDeltaAcked(job=delta.job, term=Term(term), revision=revision)
            return [ToController(held)]
        self.held_sweeps[delta.job], self.term = order, delta.term
        ack = SweepDeltaAcked(job=delta.job, term=delta.term, revision=delta.revision)
        applied: list[AgentOutput] = [Apply(delta)] if order > newest else []
        return [*applied, ToController(ack)]

    def forget_job(self, job: JobId) -> None:
        """Drop the order numbers of a job of which nothing is left on this node."""
        self.held.pop(job, None)
        self.held_sweeps.pop(job, None)
