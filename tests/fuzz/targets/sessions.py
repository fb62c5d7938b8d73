"""Both ends of a session, told anything in any order: no error, and nothing grows without bounds."""

from __future__ import annotations

from typing import Final

from schemas.codec import FROM_AGENT, PUBLISHED, TO_AGENT, encode
from schemas.errors import OnesError
from schemas.ids import BootId, NodeId, Seconds, Term
from schemas.session import (
    MAX_HELD,
    MAX_RESENT,
    AgentSession,
    ControllerSession,
    Deliver,
    Publish,
    ToController,
    ToNode,
)
from schemas.wire.agent import (
    Hello,
    NodeHealth,
    Numbered,
    StallTelemetry,
    Telemetry,
    ToSession,
    UsageTelemetry,
)
from tests.fuzz.choices import Choices
from tests.fuzz.hostile_messages import Known, hostile_bytes

NODE, BOOT = NodeId("n1"), BootId("b1")
PORTS: Final = (7704, 7700)
KNOWN: Final[Known] = {
    "node": ["n1", "n1", "n2"], "boot": ["b1", "b1", "b2"], "session": ["1.1", "1.2", "2.1"], "term": [1, 2, 3],
    "seq": [1, 2, 3, 4], "committed": [0, 1, 2], "through": [1, 2], "first": [0, 1, 2], "job": ["a-1", "b-2"],
    "version": [1, 2, 3], "stage": [1, 2, 3], "revision": [1, 2], "events_sent": [0, 1, 3],
    "events_dropped": [0, 1], "number": [0, 1, 2], "echo": ["", "1.1"],
}  # fmt: skip
STEPS: Final = 60


def agent(data: bytes) -> None:
    """An agent whose controller says anything."""
    choices = Choices(data)
    session, now, happened = AgentSession(NODE, BOOT), 0.0, 0
    for _ in range(STEPS):
        if not choices.left:
            break
        now += choices.pick((0.0, 0.1, 1.0, 10.0))
        match choices.below(4):
            case 0:
                outputs = session.tick(Seconds(now))
            case 1:
                happened += 1
                outputs = session.record_event(NodeHealth(problems=()))
            case _:
                try:
                    message = TO_AGENT.decode(hostile_bytes(choices, TO_AGENT.tags, KNOWN))
                except OnesError:
                    continue
                if not isinstance(message, ToSession):
                    continue  # are no matter of the session
                outputs = session.receive(message, Seconds(now))
        for output in outputs:
            if isinstance(output, ToController):
                encode(output.message)
            elif isinstance(output, Publish):
                encode(output.numbered)
        assert len(outputs) <= 2 + happened // MAX_RESENT + 1
        assert len(session.spool) <= happened
        assert len(session._pending) <= STEPS
        assert session.unconfirmed_s(Seconds(now)) >= 0.0
        assert session.sent == happened


def controller(data: bytes) -> None:
    """A controller whose node says anything: what it delivers is in order, and of that node."""
    choices = Choices(data)
    session = ControllerSession(NODE, Term(1))
    now, delivered, boot = 0.0, 0, session.boot
    for _ in range(STEPS):
        if not choices.left:
            break
        now += choices.pick((0.0, 0.1, 1.0, 10.0))
        codec = choices.pick((FROM_AGENT, PUBLISHED))
        try:
            message = codec.decode(hostile_bytes(choices, codec.tags, KNOWN))
        except OnesError:
            continue
        if isinstance(message, Telemetry | StallTelemetry | UsageTelemetry):
            continue
        if isinstance(message, Hello):
            committed = delivered if message.boot == boot else choices.below(4)
            outputs = session.open_session(message, committed, Seconds(now), *PORTS)
            boot, delivered = message.boot, max(committed, session.received)
        elif isinstance(message, Numbered):
            outputs = session.receive_events((message,), Seconds(now))
        else:
            outputs = session.receive(message, Seconds(now))
        for output in outputs:
            if isinstance(output, ToNode):
                encode(output.message)
            elif isinstance(output, Deliver):
                assert (output.numbered.node, output.numbered.boot) == (NODE, boot)
                assert output.numbered.seq == delivered + 1
                delivered += 1
        assert len(session._early) <= MAX_HELD
        session.condition(Seconds(now))
        session.tick(Seconds(now))
