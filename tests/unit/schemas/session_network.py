"""An agent, a controller and the network between them, all in memory and all under control.

A message that is sent waits in `up` or `down`; the caller decides about each one: deliver it, in
any order, lose it, or bring it again long after, out of `sent_up` or `sent_down`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from msgspec.structs import replace

from schemas.ids import BootId, JobId, NodeId, Rank, Seconds, Term, Version
from schemas.nodes import NodeSpec
from schemas.session import (
    AgentOutput,
    AgentSession,
    Apply,
    Condition,
    ControllerOutput,
    ControllerSession,
    Deliver,
    Key,
    Order,
    Publish,
    SendHello,
    ToController,
    ToNode,
    key_of,
    order_of,
)
from schemas.wire.agent import (
    DeltaAcked,
    FromAgent,
    GroupDelta,
    HeartbeatAck,
    Hello,
    HelloRequest,
    Numbered,
    ToSession,
    Welcome,
    WorkerStarted,
)
from schemas.wire.sweeps import SweepDelta, SweepDeltaAcked

NODE = NodeId("agent-1")
SPEC = NodeSpec(
    node=NODE, host="ash", address="10.0.0.7", slots=(), cores=4, memory_bytes=1, release="0"
)


Delta = GroupDelta | SweepDelta
Up = tuple[BootId, FromAgent | Numbered]  # with the agent's boot that sent it
Down = tuple[BootId | None, ToSession]  # with the agent's boot that it is meant for


def started(pid: int) -> WorkerStarted:
    """An event that differs from every other one by its `pid`."""
    return WorkerStarted(
        job=JobId("a-1"), version=Version(1), rank=Rank(0), pid=pid, started_ticks=1
    )


def delta(job: str, term: int, version: int, stage: int) -> GroupDelta:
    """A delta of which only the order matters."""
    return GroupDelta(
        job=JobId(job), term=Term(term), version=Version(version), stage=stage, group=None,
        spec=None,
    )  # fmt: skip


def sweep_delta(job: str, term: int, revision: int) -> SweepDelta:
    """A delta of a sweep of which only the order matters."""
    return SweepDelta(
        job=JobId(job), term=Term(term), revision=revision, attempts=0, units=(), wanted=()
    )


def hello(boot: BootId, events_sent: int, echo: str = "") -> Hello:
    """Return the hello of an agent without workers."""
    return Hello(node=NODE, boot=boot, spec=SPEC, workers=(), events_sent=events_sent, echo=echo)


@dataclass
class Controller:
    """One incarnation: its session, and what it has yet to commit."""

    session: ControllerSession
    pending: list[Numbered | Hello] = field(default_factory=list)  # commits in this order


@dataclass
class Network:
    """The two ends and everything that is under way between them."""

    now: Seconds = Seconds(0.0)
    journal: dict[BootId, list[Numbered]] = field(default_factory=dict)
    wanted: dict[Key, Delta] = field(default_factory=dict)
    up: list[Up] = field(default_factory=list)
    down: list[Down] = field(default_factory=list)
    sent_up: list[Up] = field(default_factory=list)  # ever
    sent_down: list[Down] = field(default_factory=list)  # ever
    recorded: dict[BootId, list[Numbered]] = field(default_factory=dict)  # events of each boot
    orders: dict[tuple[BootId, Key], list[Order]] = field(default_factory=dict)
    agent: AgentSession = field(init=False)
    began: Seconds | None = field(init=False)  # when the agent first looked at its clock
    controller: Controller = field(init=False)
    former: list[Controller] = field(default_factory=list)  # incarnations that do not know it

    def __post_init__(self) -> None:
        self._terms = 0
        self._boots = 0
        self.start_agent()
        self.start_controller()

    # --- events

    def start_agent(self) -> None:
        """Start a new agent process without the knowledge of the old one."""
        self._boots += 1
        self.agent = AgentSession(NODE, BootId(f"boot-{self._boots}"))
        self.began = None
        self.recorded[self.agent.boot] = []
        self.journal[self.agent.boot] = []

    def start_controller(self) -> None:
        """Start a new incarnation; the old one continues as if it were alone."""
        self._terms += 1
        if self._terms > 1:
            self.former.append(self.controller)
        session = ControllerSession(NODE, Term(self._terms), last_received_at=self.now)
        self.controller = Controller(session)

    def record(self) -> None:
        """Record an event of a worker."""
        outputs = self.agent.record_event(started(pid=self.agent.sent + 1))
        self.recorded[self.agent.boot] += [o.numbered for o in outputs if isinstance(o, Publish)]
        self._of_agent(outputs)

    def want(self, new: Delta) -> None:
        """Order a group or a sweep, as the core does."""
        self.wanted[key_of(new)] = self.order(self.controller, new)

    def order(self, controller: Controller, new: Delta) -> Delta:
        """Order a group or a sweep, maybe as a former controller."""
        new = replace(new, term=controller.session.term)
        self._of_controller(controller, controller.session.order(new, self.now))
        return new

    def pass_time(self, seconds: float) -> None:
        """Let time pass at both ends."""
        self.now = Seconds(self.now + seconds)
        if self.began is None:
            self.began = self.now
        self._of_agent(self.agent.tick(self.now))
        for controller in (self.controller, *self.former):
            self._of_controller(controller, controller.session.tick(self.now))

    def commit(self) -> None:
        """Commit the oldest pending event or hello."""
        controller = self.controller
        if not controller.pending:
            return
        taken = controller.pending.pop(0)
        session = controller.session
        if isinstance(taken, Hello):
            committed = len(self.journal[taken.boot])
            self._of_controller(controller, session.open_session(taken, committed, self.now, 1, 2))
            for key, wish in self.wanted.items():
                self.wanted[key] = self.order(controller, wish)
            return
        self.journal[taken.boot].append(taken)
        if session.boot == taken.boot:
            self._of_controller(controller, session.acknowledge(taken.seq))

    # --- network

    def arrive_up(self, sent: Up, controller: Controller | None = None) -> None:
        """Bring a message to the controller, or to an incarnation before it."""
        boot, message = sent
        controller = controller or self.controller
        if isinstance(message, DeltaAcked | SweepDeltaAcked) and boot != controller.session.boot:
            return  # an ack names no boot, but its connection ended with its process
        if isinstance(message, Hello):
            self._greet(controller, message)
        elif isinstance(message, Numbered):
            outputs = controller.session.receive_events((message,), self.now)
            self._of_controller(controller, outputs)
        else:
            self._of_controller(controller, controller.session.receive(message, self.now))

    def arrive_down(self, sent: Down) -> None:
        """Bring a message to the agent; one of a lower term must change nothing."""
        boot, message = sent
        if isinstance(message, Welcome) and boot != self.agent.boot:
            return  # a welcome names no boot, but its connection ended with its process
        before = copy.deepcopy(self.agent) if self._is_outdated(message) else None
        outputs = self.agent.receive(message, self.now)
        if before is not None:
            assert self.agent == before, f"{message} changed something"
            assert [o for o in outputs if not is_refusal(o)] == []
        self._of_agent(outputs)

    def settle(self, seconds: float = 20.0) -> None:
        """Deliver everything until nothing is left to send."""
        end = self.now + seconds
        while self.now < end and not self.settled():
            self.deliver_all(0.5)

    def deliver_all(self, seconds: float = 1.0) -> None:
        """Let time pass, then deliver all messages in order and commit all events."""
        self.pass_time(seconds)
        while self.up or self.down or self.controller.pending:
            if self.up:
                self.arrive_up(self.up.pop(0))
            self.commit()
            if self.down:
                self.arrive_down(self.down.pop(0))

    def settled(self) -> bool:
        """True if nothing is left to send."""
        return (
            self.agent.session is not None
            and self.agent.session == self.controller.session.session
            and self.journal[self.agent.boot] == self.recorded[self.agent.boot]
            and not self.agent.spool
            and not self.controller.session.outstanding
        )

    def _greet(self, controller: Controller, message: Hello) -> None:
        session = controller.session
        silent = session.boot is not None and session.condition(self.now) is not Condition.ALIVE
        if silent and not session.echo_matches(message):
            self._of_controller(controller, session.request_hello())
            return
        if session.repeats_hello(message):
            self._of_controller(controller, session.resume_session(message, self.now, 1, 2))
            return
        controller.pending.append(message)
        if controller is self.controller and message.boot != self.agent.boot:
            # A former life's hello that overtakes the present one's in the journal makes the
            # session forget what it delivered of the present one; here it finds the journal idle.
            while controller.pending:
                self.commit()

    def _is_outdated(self, message: ToSession) -> bool:
        match message:
            case (
                Welcome(term=term)
                | HelloRequest(term=term)
                | GroupDelta(term=term)
                | SweepDelta(term=term)
                | HeartbeatAck(term=term)
            ):
                return term < self.agent.term
            case _:
                return False

    # --- outputs

    def _of_agent(self, outputs: list[AgentOutput]) -> None:
        for output in outputs:
            match output:
                case ToController(message=message):
                    self._send_up(message)
                case Publish(numbered=numbered):
                    self._send_up(numbered)
                case SendHello():
                    said = hello(self.agent.boot, self.agent.sent, self.agent.echo)
                    self._send_up(said)
                case Apply(delta=new):
                    held = self.orders.setdefault((self.agent.boot, key_of(new)), [])
                    held.append(order_of(new))

    def _of_controller(self, controller: Controller, outputs: list[ControllerOutput]) -> None:
        for output in outputs:
            match output:
                case ToNode(message=message):
                    sent = (controller.session.boot, message)
                    self.down.append(sent)
                    self.sent_down.append(sent)
                case Deliver(numbered=numbered):
                    controller.pending.append(numbered)

    def _send_up(self, message: FromAgent | Numbered) -> None:
        self.up.append((self.agent.boot, message))
        self.sent_up.append((self.agent.boot, message))


def is_refusal(output: AgentOutput) -> bool:
    """Whether this only tells the sender that it is outdated."""
    if not isinstance(output, ToController):
        return False
    message = output.message
    return isinstance(message, SweepDeltaAcked) or (
        isinstance(message, DeltaAcked) and not message.applied
    )
