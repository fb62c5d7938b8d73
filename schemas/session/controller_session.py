"""The controller's end of a session with one agent: events in order, deltas until acknowledged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from schemas.ids import BootId, JobId, NodeId, Seconds, Term
from schemas.session.delivery_rules import (
    SessionTimings,
    order_of,
    says_the_same,
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

MAX_HELD: Final = 4096  # events that arrived too early and wait for a gap to close


@dataclass(frozen=True, slots=True)
class ToNode:
    """Send this to the agent."""

    message: ToSession


@dataclass(frozen=True, slots=True)
class Deliver:
    """The next event of the stream; commit it, then call `committed`."""

    numbered: Numbered


ControllerOutput = ToNode | Deliver


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
    outstanding_sweeps: dict[JobId, tuple[SweepDelta, Seconds]] = field(default_factory=dict)
    last_heard: Seconds = Seconds(0.0)
    _early: dict[int, Numbered] = field(default_factory=dict)
    _asked_at: Seconds = Seconds(-1e9)
    _behind_at: int | None = None  # what was received when the last heartbeat announced more
    _sessions: int = 0
    _echoes: int = 0
    _echo: str = ""  # what a hello has to repeat to show that we are heard; empty: nothing yet
    _hello: Hello | None = None  # that this session began with

    def greeted(
        self, hello: Hello, committed: int, now: Seconds, log_port: int, event_port: int
    ) -> list[ControllerOutput]:
        """Begin a session; `committed` is how far this boot's events are durable here.

        Who only says hello, and repeats nothing of ours, may not hear us: that is silence.

        Args:
            committed: highest sequence number of this boot that is durable here.
            now: seconds of a monotonic clock, the same in every call.
            log_port: where the agent sends its workers' output.
        """
        self._sessions += 1
        self._hello = hello
        self.session = f"{self.term}.{self._sessions}"
        if hello.boot != self.boot:
            self._early.clear()
            self.received = committed
            self.last_heard = now  # its connection is new, which took answers
        self._note_echo(hello, now)
        self.boot, self.durable = hello.boot, committed
        self.received = max(self.received, committed)
        self._asked_at = now
        self.outstanding.clear()
        self.outstanding_sweeps.clear()
        return [ToNode(self._welcome(self.session, hello.boot, log_port, event_port))]

    def says_nothing_new(self, hello: Hello) -> bool:
        """Whether a hello only repeats the one that the present session began with."""
        begun = self._hello
        return self.session is not None and begun is not None and says_the_same(begun, hello)

    def greeted_again(
        self, hello: Hello, now: Seconds, log_port: int, event_port: int
    ) -> list[ControllerOutput]:
        """Welcome an agent back into the session that it has; its deltas go on being repeated.

        Args:
            now: seconds of a monotonic clock.
            log_port: where the agent sends its workers' output.
        """
        if self.session is None:
            return []
        self._note_echo(hello, now)
        return [ToNode(self._welcome(self.session, hello.boot, log_port, event_port))]

    def hears(self, hello: Hello) -> bool:
        """Whether a hello shows that its agent hears us now, and does not only speak.

        Args:
            hello: of this node. That of an older agent, which repeats nothing, is taken for it.
        """
        return hello.echo is None or (self._echo != "" and hello.echo == self._echo)

    def ask_to_greet(self) -> list[ControllerOutput]:
        """Have the agent say hello, and repeat a word that it cannot know otherwise."""
        if not self._echo:
            self._echoes += 1
            self._echo = f"{self.term}.{self._echoes}"
        return [ToNode(HelloRequest(term=self.term, echo=self._echo))]

    def _note_echo(self, hello: Hello, now: Seconds) -> None:
        if self.hears(hello):
            self.last_heard, self._echo = now, ""

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
            case SweepDeltaAcked():
                ordered = self.outstanding_sweeps.get(message.job)
                if ordered and sweep_order_of(message) >= sweep_order_of(ordered[0]):
                    del self.outstanding_sweeps[message.job]
                return []

    def published(self, events: Iterable[Numbered], now: Seconds) -> list[ControllerOutput]:
        """Take in events: deliver those in order, hold early ones, ask for what is missing.

        Args:
            events: in any order, perhaps repeated, perhaps of an earlier boot; another node's are
                passed over.
            now: seconds of a monotonic clock.
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

    def order(self, delta: GroupDelta | SweepDelta, now: Seconds) -> list[ControllerOutput]:
        """Send `delta` until it is acknowledged; only the newest of a job or sweep is repeated.

        Args:
            delta: what the node should run of one job, or of one sweep.
            now: seconds of a monotonic clock.

        Returns:
            Nothing while no session is open: the next hello asks for all deltas again.
        """
        if self.session is None:
            return []
        if isinstance(delta, SweepDelta):
            self.outstanding_sweeps[delta.job] = (delta, now)
        else:
            self.outstanding[delta.job] = (delta, now)
        return [ToNode(delta)]

    def withdraw(self, delta: GroupDelta | SweepDelta) -> None:
        """Repeat a delta no more.

        Args:
            delta: as it was ordered; a newer one of its job stays.
        """
        group, sweep = self.outstanding.get(delta.job), self.outstanding_sweeps.get(delta.job)
        if group is not None and group[0] is delta:
            del self.outstanding[delta.job]
        elif sweep is not None and sweep[0] is delta:
            del self.outstanding_sweeps[delta.job]

    def tick(self, now: Seconds) -> list[ControllerOutput]:
        """Repeat deltas that nobody acknowledged.

        Args:
            now: seconds of a monotonic clock.
        """
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
            return self.ask_to_greet()
        self.last_heard = now
        answer = HeartbeatAck(
            session=self.session, term=self.term, committed=self.durable, number=message.number
        )
        behind = message.events_sent > self.received
        # Events travel on a socket of their own: those that are only late come before the next.
        missing = self._ask(now) if behind and self._behind_at == self.received else []
        self._behind_at = self.received if behind else None
        return [ToNode(answer), *missing]

    def _ask(self, now: Seconds) -> list[ControllerOutput]:
        if self.boot is None or now - self._asked_at < self.timings.heartbeat_s / 2:
            return []
        self._asked_at = now
        return [ToNode(ResendEvents(boot=self.boot, first=self.received + 1))]
