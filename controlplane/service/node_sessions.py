"""Sessions with node agents. They receive hellos, heartbeats and events, and send deltas.

`HelloQueue` limits how many hellos are handled at a time. `missed_by_peers` checks whether workers
on other nodes confirm that a silent node is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import structlog

from controlplane.core.commands import SendDelta, SendSweepDelta
from controlplane.core.inputs import (
    NodeForgotten,
    NodeGreeted,
    NodeHeard,
    NodeLost,
    NodeReported,
    NodeSuspected,
    OrderTooLarge,
)
from controlplane.core.model.job import Job
from controlplane.core.model.node import Node, NodePhase
from controlplane.core.model.report_bounds import clamp_numbers
from controlplane.core.model.rescale import RescalePhase
from controlplane.core.model.worker import WorkerPhase
from controlplane.core.state import State
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.rights import NODE, REVOKED, speaks_for
from schemas.codec import FROM_AGENT, MAX_BYTES, PUBLISHED, encode
from schemas.errors import DeniedError, OnesError, UnavailableError
from schemas.host.logging import Audit
from schemas.ids import BootId, NodeId, Seconds, Term, node_of, worker_id
from schemas.jobs import JobSpec
from schemas.session import (
    Condition,
    ControllerOutput,
    ControllerSession,
    Deliver,
    SessionTimings,
    ToNode,
    equivalent_hellos,
)
from schemas.sweeps import printable
from schemas.transport.sockets import Incoming, Socket
from schemas.wire import agent as wire
from schemas.wire import files
from schemas.wire.streams import OpenStream
from schemas.wire.sweeps import SweepDelta

UNDER_WAY: Final = 32  # hellos in the journal's queue; more would delay all other inputs
UNDER_WAY_SHARE: Final = 20  # in a large cluster: one in so many nodes, as each commit takes longer


@dataclass(slots=True)
class HelloQueue:
    """Nodes that wait to be greeted, in order of arrival, and nodes with a hello under way.

    A repeated hello keeps the place of the first one. Only the newest hello and its connection
    are used.
    """

    limit: int = UNDER_WAY
    waiting: dict[NodeId, tuple[bytes, wire.Hello]] = field(default_factory=dict)
    under_way: dict[NodeId, tuple[bytes, wire.Hello]] = field(default_factory=dict)

    def put(self, route: bytes, hello: wire.Hello) -> None:
        """Add a hello. If the same hello is under way, only redirect its reply to the new route."""
        begun = self.under_way.get(hello.node)
        if begun is not None and equivalent_hellos(begun[1], hello):
            self.under_way[hello.node] = (route, hello)
            self.waiting.pop(hello.node, None)
        else:
            self.waiting[hello.node] = (route, hello)

    def take(self) -> wire.Hello | None:
        """Return the next hello and mark it as under way, or None if too many are under way."""
        if len(self.under_way) >= self.limit:
            return None
        node = next((node for node in self.waiting if node not in self.under_way), None)
        if node is None:
            return None
        self.under_way[node] = self.waiting.pop(node)
        return self.under_way[node][1]

    def done(self, node: NodeId) -> bytes:
        """Remove a durable hello, and return the route for the reply."""
        return self.under_way.pop(node)[0]


MAX_FENCED_S: Final = 7200.0  # a longer `fenced_s` in a node's hello is ignored
EXITING: Final = frozenset({WorkerPhase.LEAVING, WorkerPhase.EXITED})


def fenced_s(node: Node) -> float:
    """Return the seconds of silence after which all workers of a node have exited, 0 if unknown.

    If no controller replies, an agent kills its workers after the time that its hello states.
    """
    stated = node.spec.fenced_s
    return stated if 0.0 < stated <= MAX_FENCED_S else 0.0


def missed_by_peers(state: State, node: NodeId) -> bool:
    """True if a group that lost a member waits only for its workers on `node`.

    All members on other nodes have reported that they quiesced.
    """
    return any(_is_missed(job, node) for job in state.slot_index.jobs_on(node))


def _is_missed(job: Job, node: NodeId) -> bool:
    change = job.change
    if change is None or change.phase is not RescalePhase.QUIESCING:
        return False
    waited_for = [
        node_of(member.slot)
        for member in change.group.members
        if member.worker not in change.quiesce_points
        and job.workers[member.worker].phase not in EXITING
    ]
    return set(waited_for) == {node} and bool(change.quiesce_points)


log = structlog.get_logger("node_sessions")
TICK_S: Final = 0.5
SLICE: Final = 200  # nodes whose silence is checked in one turn of the event loop
CONNECTED: Final = frozenset({NodePhase.UP, NodePhase.SUSPECT})
SILENT: Final = frozenset({NodePhase.SUSPECT, NodePhase.LOST})
STALL_S: Final = 1.0  # longer pauses of the controller do not count as silence of nodes


@dataclass(kw_only=True, eq=False)
class NodeSessions:
    """Connections to all nodes.

    `ports` are the ports of the log relay and of `events`. Welcome messages contain them.
    """

    commit_loop: CommitLoop
    orders: Socket
    events: Socket
    term: Term
    timings: SessionTimings
    ports: tuple[int, int]
    on_steps: Callable[[wire.StepsReported], None]
    on_stall: Callable[[wire.WorkerStalled], None]
    on_usage: Callable[[wire.WorkerUsed], None]
    audit: Audit
    next_key: str = ""  # public key after the rotation of the server's key; empty: none
    secrets: Callable[[JobSpec], dict[str, str]] = lambda _: {}  # of a job, added to its deltas

    def __post_init__(self) -> None:
        """Set up the state that no caller passes."""
        self._routes: dict[NodeId, bytes] = {}
        self._greetings: dict[NodeId, Incoming] = {}  # latest hellos, without frames
        self._sessions: dict[NodeId, ControllerSession] = {}
        self._hellos = HelloQueue()
        self._durable: dict[NodeId, tuple[BootId, int]] = {}  # last event to acknowledge
        for node in self.commit_loop.reactor.state.nodes:
            self._session(node)

    def use(self, timings: SessionTimings) -> None:
        """Apply these timings from now on."""
        self.timings = timings
        for node, session in self._sessions.items():
            session.timings = self._timings()
            self._apply(node, session.repeat_welcome(*self.ports))

    def _timings(self) -> SessionTimings:
        return self.timings.of_cluster(len(self._state.nodes))

    def announce_key(self, public: str) -> None:
        """Send the server's next public key to all nodes, including nodes that greet later."""
        self.next_key = public
        for route in self._routes.values():
            self._send_key(route)

    def _send_key(self, route: bytes) -> None:
        if self.next_key:
            self.orders.send(route, encode(wire.NextServerKey(public=self.next_key)))

    def cut_off_revoked(self) -> None:
        """Stop using connections with revoked keys.

        From now on, their nodes are treated as silent.
        """
        for node, greeting in list(self._greetings.items()):
            if greeting.revoked:
                del self._greetings[node]
                if (route := self._routes.pop(node, None)) is not None:
                    self.orders.send(route, encode(_revoked()))

    # --- tasks

    async def receive_messages(self) -> None:
        """Handle messages from the agents' DEALER sockets until cancelled."""
        async for incoming in self.orders:
            try:
                self._receive_message(incoming)
            except OnesError as error:
                self._refuse(incoming, error)
            except Exception as error:  # one peer's message must not stop the controller
                log.exception("message dropped", peer=str(incoming.identity))
                self._refuse(incoming, UnavailableError(repr(error)))

    async def receive_events(self) -> None:
        """Handle what agents of an earlier release publish, until cancelled."""
        async for incoming in self.events:
            try:
                self._receive_published(incoming, PUBLISHED.decode(incoming.frames[-1]))
            except OnesError as error:
                self._refuse(incoming, error)
            except Exception:  # one message, or a policy that it reaches, must not stop the others
                log.exception("message dropped", peer=str(incoming.identity))

    async def watch_silence(self) -> None:
        """Resend unacknowledged messages and detect silent nodes, until cancelled."""
        before = self._now()
        while True:
            await asyncio.sleep(TICK_S)
            now = self._now()
            stalled_s, before = now - before - TICK_S, now
            if stalled_s > STALL_S:  # the controller paused, so messages wait in its queue
                for session in self._sessions.values():
                    session.last_received_at = Seconds(session.last_received_at + stalled_s)
            for number, (node, session) in enumerate(self._to_check(now), start=1):
                if number % SLICE == 0:
                    await asyncio.sleep(0)
                self._apply(node, session.tick(now))
                self._check_silence(node, session, now)

    def _to_check(self, now: Seconds) -> list[tuple[NodeId, ControllerSession]]:
        """Return the nodes that are silent, not up, or have not acknowledged their deltas."""
        silent_since = now - min(self.timings.missed_s, self.timings.suspect_s, self.timings.lost_s)
        nodes, up = self._state.nodes, NodePhase.UP
        return [
            (node, session)
            for node, session in self._sessions.items()
            if session.last_received_at <= silent_since
            or session.outstanding
            or node not in nodes
            or nodes[node].phase is not up
        ]

    # --- received messages

    def _receive_published(self, incoming: Incoming, message: wire.Published) -> None:
        if not self._is_node(incoming, message.node):
            return
        match message:
            case wire.Telemetry(steps=steps):
                if self._accepts(incoming, steps):
                    self.on_steps(steps)
            case wire.StallTelemetry(stall=stall):
                if self._accepts(incoming, stall):
                    at = printable(stall.at[: wire.MAX_PLACE])
                    self.on_stall(msgspec.structs.replace(clamp_numbers(stall), at=at))
            case wire.UsageTelemetry(used=used):
                if self._accepts(incoming, used):
                    self.on_usage(clamp_numbers(used))
            case wire.Numbered():
                self._receive_event(message)

    def _accepts(
        self, incoming: Incoming, report: wire.StepsReported | wire.WorkerStalled | wire.WorkerUsed
    ) -> bool:
        """Return whether telemetry is of a running job, and from the node of its worker."""
        job = self._state.jobs.get(report.job)
        if job is None or job.ended:
            return False
        worker = worker_id(report.job, report.version, report.rank)
        group = report.version if isinstance(report, wire.WorkerUsed) else report.group
        why = ""
        if job.journal != report.journal:
            why = f"{worker} belongs to an earlier job of this name"
        elif group > job.version or not speaks_for(
            incoming.identity, job, report.version, report.rank
        ):
            why = f"{worker} of group {group} is not on this node"
        if why:
            self.audit.refused("telemetry", why, peer=str(incoming.identity))
        return not why

    def _receive_message(self, incoming: Incoming) -> None:
        message = FROM_AGENT.decode(incoming.frames[-1])
        if incoming.revoked:
            self.audit.refused("message", REVOKED[0], peer=str(incoming.key, "ascii", "replace"))
            if isinstance(message, wire.Hello | wire.Heartbeat):
                self.orders.send(incoming.route, encode(_revoked()))
            return
        if isinstance(message, wire.Published):
            self._receive_published(incoming, message)
            return
        identity = incoming.identity
        if isinstance(message, wire.Hello):
            if self._is_node(incoming, message.node):
                self._greetings[message.node] = replace(incoming, frames=())
                self._receive_hello(incoming.route, message)
            return
        node = NodeId(identity.name) if identity and identity.role == NODE else NodeId("")
        session = self._sessions.get(node)
        if session is None or self._routes.get(node) != incoming.route:
            if isinstance(message, wire.Heartbeat):
                unknown = ControllerSession(node, self.term, self.timings)
                self._answer(incoming.route, (session or unknown).request_hello())
            return
        self._apply(node, session.receive(message, self._now()))

    def _receive_hello(self, route: bytes, hello: wire.Hello) -> None:
        if not hello.spec.slots:
            refusal = wire.Refused(
                code="no_slots", message="the node offers no slots", hint="set slots"
            )
            self.orders.send(route, encode(refusal))
            return

        known = self._node(hello.node)
        session = self._session(hello.node)
        if known is not None and (why := self._is_used(known, hello, session)):
            code = "stale_boot" if hello.boot in known.former_boots else "node_in_use"
            self.audit.refused("hello", why, peer=hello.node)
            hint = "stop this agent, or give it its own name and key"
            self.orders.send(route, encode(wire.Refused(code=code, message=why, hint=hint)))
            return
        if known is not None and known.phase in SILENT and not session.echo_matches(hello):
            self._answer(route, session.request_hello())
            return
        if known is not None and known.phase in CONNECTED and session.repeats_hello(hello):
            self._routes[hello.node] = route
            self._apply(hello.node, session.resume_session(hello, self._now(), *self.ports))
            return
        self._hellos.put(route, hello)
        self._greet_waiting()

    def _is_used(self, known: Node, hello: wire.Hello, session: ControllerSession) -> str:
        """Return why another agent has the node's name now; empty if it may be this agent's.

        An agent that was restarted has the run folder of its predecessor, which locks that folder.
        So only an agent with another run folder can be a copy. A copy is refused while the first
        agent sends messages. A replaced agent may return when the other agent is silent.
        """
        heard = session.session is not None and session.boot == known.boot
        if hello.boot == known.boot or not heard:
            return ""
        if session.condition(self._now()) is not Condition.ALIVE:
            return ""
        if hello.boot in known.former_boots:
            return f"boot {hello.boot} of {hello.node} was replaced by {known.boot}"
        if known.run_id and hello.run_id and known.run_id != hello.run_id:
            return f"node {hello.node} is used by another agent, boot {known.boot}"
        return ""

    def _greet_waiting(self) -> None:
        self._hellos.limit = max(UNDER_WAY, len(self._sessions) // UNDER_WAY_SHARE)
        while (hello := self._hellos.take()) is not None:
            self._greet(hello)

    def _greet(self, hello: wire.Hello) -> None:
        known = self._node(hello.node)
        committed = known.committed_of(hello.boot) if known is not None else 0
        if hello.events_dropped > committed:
            log.warning("events lost: the journal is older than the node", node=hello.node)

        def welcome() -> None:
            route = self._hellos.done(hello.node)
            if hello.node in self._greetings:  # False if its key was revoked meanwhile
                self._routes[hello.node] = route
            asyncio.get_running_loop().call_soon(self._greet_waiting)
            session = self._session(hello.node)
            session.timings = self._timings()
            outputs = session.open_session(hello, committed, self._now(), *self.ports)
            self._apply(hello.node, outputs)
            self._send_key(route)

        log.info("node greeted", node=hello.node, workers=len(hello.workers), boot=hello.boot)
        stated = {name: getattr(hello, name) for name in NodeGreeted.__struct_fields__}
        try:
            self.commit_loop.handle(NodeGreeted(**stated), before_effects=welcome)
        except BaseException:
            self._hellos.done(hello.node)
            raise

    def _receive_event(self, numbered: wire.Numbered) -> None:
        session = self._sessions.get(numbered.node)
        if session is not None:
            outputs = session.receive_events((numbered,), self._now())
            self._apply(numbered.node, outputs)

    # --- sent messages

    def send(self, command: SendDelta | SendSweepDelta) -> None:
        """Send a delta if the node has a session. If not, its next hello causes a new delta."""
        session = self._sessions.get(command.node)
        if session is not None:
            self._apply(command.node, session.order(command.delta, self._now()))

    def ask(self, node: NodeId, message: files.ToNode | OpenStream) -> bool:
        """Send an agent a request outside its session. The reply arrives on the bulk port.

        The request is sent once. Return True if the node is connected now.
        """
        route, session = self._routes.get(node), self._sessions.get(node)
        if route is None or session is None or session.condition(self._now()) is Condition.LOST:
            return False
        return self.orders.send(route, encode(message))

    def _apply(self, node: NodeId, outputs: Iterable[ControllerOutput]) -> None:
        for output in outputs:
            match output:
                case ToNode(message=message):
                    route = self._routes.get(node)
                    if route is not None:
                        self._send(node, route, message)
                case Deliver(numbered=numbered):
                    self._deliver(numbered)

    def _send(self, node: NodeId, route: bytes, message: wire.ToSession) -> None:
        """Send a message. Withdraw an oversized order, because the agent would disconnect."""
        data = encode(self._with_secrets(message))
        if len(data) <= MAX_BYTES or not isinstance(message, wire.GroupDelta | SweepDelta):
            self.orders.send(route, data)
            return
        log.error(
            "order exceeds the size of a message", job=message.job, node=node, bytes=len(data)
        )
        self._sessions[node].withdraw(message)
        told = OrderTooLarge(job=message.job, node=node, size=len(data), most=MAX_BYTES)
        asyncio.get_running_loop().call_soon(self.commit_loop.handle, told)

    def _with_secrets(self, message: wire.ToSession) -> wire.ToSession:
        spec = message.spec if isinstance(message, wire.GroupDelta) else None
        if not isinstance(message, wire.GroupDelta) or spec is None or not spec.secret_names:
            return message
        return msgspec.structs.replace(message, secrets=self.secrets(spec))

    def _answer(self, route: bytes, outputs: Iterable[ControllerOutput]) -> None:
        """Send messages on a route that has no session."""
        for output in outputs:
            if isinstance(output, ToNode):
                self.orders.send(route, encode(output.message))

    def _deliver(self, numbered: wire.Numbered) -> None:
        reported = NodeReported(
            node=numbered.node,
            boot=numbered.boot,
            seq=numbered.seq,
            event=wire.bounded_report(numbered.event),
        )

        def committed() -> None:
            if not self._durable:
                asyncio.get_running_loop().call_soon(self._acknowledge)
            self._durable[numbered.node] = (numbered.boot, numbered.seq)

        self.commit_loop.handle(reported, before_effects=committed)

    def _acknowledge(self) -> None:
        """Send each node one acknowledgement for all events that became durable together."""
        durable, self._durable = self._durable, {}
        for node, (boot, seq) in durable.items():
            session = self._sessions[node]
            if session.boot == boot:
                self._apply(node, session.acknowledge(seq))

    def _check_silence(self, node: NodeId, session: ControllerSession, now: Seconds) -> None:
        known = self._node(node)
        if known is None:
            return
        condition = session.condition(now)
        silent_s = now - session.last_received_at
        if silent_s >= self.timings.missed_s and missed_by_peers(self._state, node):
            condition = Condition.LOST
        if condition is Condition.LOST and silent_s < fenced_s(known):
            condition = Condition.SUSPECT
        if condition is Condition.LOST and known.phase is not NodePhase.LOST:
            self.commit_loop.handle(NodeLost(node=node, silent_s=silent_s))
        elif condition is Condition.SUSPECT and known.phase is NodePhase.UP:
            self.commit_loop.handle(NodeSuspected(node=node, silent_s=silent_s))
        elif condition is Condition.ALIVE and known.phase is NodePhase.SUSPECT and session.session:
            self.commit_loop.handle(NodeHeard(node=node))
        elif known.phase is NodePhase.LOST and self._was_lost_for_s(known) > self.timings.forget_s:
            self.commit_loop.handle(NodeForgotten(node=node, user=""))
        elif condition is Condition.ALIVE and known.phase is NodePhase.LOST:
            session.session = None  # the reply to its next heartbeat requests a hello

    # --- helpers

    @staticmethod
    def _now() -> Seconds:
        """Return monotonic seconds. The wall clock must not affect the detection of silence."""
        return Seconds(asyncio.get_running_loop().time())

    def _node(self, node: NodeId) -> Node | None:
        return self._state.nodes.get(node)

    @property
    def _state(self) -> State:
        return self.commit_loop.reactor.state

    def _was_lost_for_s(self, node: Node) -> float:
        return self.commit_loop.now() - node.since

    def _session(self, node: NodeId) -> ControllerSession:
        session = self._sessions.get(node)
        if session is None:  # silence is measured from now on
            now = self._now()
            session = ControllerSession(node, self.term, self.timings, last_received_at=now)
            self._sessions[node] = session
        return session

    def _is_node(self, incoming: Incoming, node: NodeId) -> bool:
        identity = incoming.identity
        if identity is not None and identity.role == NODE and identity.name == node:
            return True
        why = f"key of {identity} used for node {node!r}"
        self.audit.refused("message", why, peer=str(identity))
        return False

    def _refuse(self, incoming: Incoming, error: OnesError) -> None:
        self.audit.refused("message", str(error), peer=str(incoming.identity))


def _revoked() -> wire.Refused:
    what, hint = REVOKED
    return wire.Refused(code=DeniedError.code, message=what, hint=hint)
