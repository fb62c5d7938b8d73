"""Both ends of a session, message by message, and their clocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from schemas.ids import BootId, JobId, NodeId, Rank, Seconds, Term, Version
from schemas.session import (
    MAX_HELD,
    MAX_RESENT,
    MAX_SPOOLED,
    AgentSession,
    Apply,
    Condition,
    ControllerSession,
    Deliver,
    Publish,
    SendHello,
    SessionTimings,
    ToController,
    ToNode,
)
from schemas.wire.agent import (
    DeltaAcked,
    EventsCommitted,
    Heartbeat,
    HeartbeatAck,
    HelloRequest,
    Numbered,
    Refused,
    ResendEvents,
    Resent,
    Welcome,
    WorkerSeen,
)
from schemas.wire.sweeps import SweepDeltaAcked
from tests.support.builders import stop
from tests.support.schemas_examples import NODE
from tests.support.sizes import examples
from tests.unit.schemas.session_network import delta, hello, started, sweep_delta

BOOT, OTHER = BootId("boot-1"), BootId("boot-0")
A, B = JobId("a-1"), JobId("b-2")
ALIVE, SUSPECT, LOST = Condition
HELLO: Final = [SendHello()]

# A step calls a session at a moment, and is compared with the outputs; `...`: with nothing.
Call = Callable[[Any], Any]
Step = tuple[Call, Any]
Case = tuple[Callable[[], Any], list[Step]]


def numbered(seq: int, boot: BootId = BOOT) -> Numbered:
    return Numbered(node=NODE, boot=boot, seq=seq, event=started(pid=seq))


def events(*seqs: int, boot: BootId = BOOT) -> tuple[Numbered, ...]:
    return tuple(numbered(seq, boot) for seq in seqs)


def delivered(*seqs: int) -> list[Deliver]:
    return [Deliver(numbered(seq)) for seq in seqs]


def welcome(session: str = "2.1", *, committed: int = 0) -> Welcome:
    term = Term(int(session.partition(".")[0]))
    return Welcome(
        session=session, boot=BOOT, term=term, committed=committed, log_port=1, event_port=2,
        events_here=True,
    )  # fmt: skip


def acked(term: int, version: int, stage: int, *, applied: bool = True) -> DeltaAcked:
    return DeltaAcked(
        job=A, term=Term(term), version=Version(version), stage=stage, applied=applied
    )


def sweep_acked(term: int, revision: int) -> SweepDeltaAcked:
    return SweepDeltaAcked(job=A, term=Term(term), revision=revision)


def ack(session: str = "2.1", *, committed: int = 0, number: int = 0) -> HeartbeatAck:
    term = Term(int(session.partition(".")[0]))
    return HeartbeatAck(session=session, term=term, committed=committed, number=number)


def beat(session: str, sent: int, number: int = 0) -> Heartbeat:
    return Heartbeat(session=session, events_sent=sent, number=number)


def missing(first: int, boot: BootId = BOOT) -> ResendEvents:
    return ResendEvents(boot=boot, first=first)


def committed(through: int, boot: BootId = BOOT, term: int = 2) -> EventsCommitted:
    return EventsCommitted(boot=boot, through=through, term=Term(term))


def asked(term: int, echo: str = "") -> HelloRequest:
    return HelloRequest(term=Term(term), echo=echo)


def agent(events: int = 0) -> AgentSession:
    """An agent that has sent no hello, with recorded events; its pauses are whole."""
    session = AgentSession(NODE, BOOT)
    for pid in range(1, events + 1):
        session.record_event(started(pid))
    return session


def welcomed(events: int = 0) -> AgentSession:
    """An agent in session 2.1, since second 0."""
    session = agent(events)
    session.receive(welcome("2.1"), Seconds(0.0))
    return session


def fresh() -> ControllerSession:
    return ControllerSession(NODE, Term(2))


def controller(committed: int = 0, boot: BootId = BOOT) -> ControllerSession:
    """The second incarnation, in session 2.1 with an agent, since second 0."""
    session = fresh()
    session.open_session(hello(boot, committed), committed, Seconds(0.0), 1, 2)
    return session


def do(method: str, *arguments: Any) -> Call:
    return lambda session: getattr(session, method)(*arguments)


def receive(message: object, now: float = 1.0) -> Call:
    return do("receive", message, now)


def record(pid: int) -> Call:
    return do("record_event", started(pid=pid))


def take(*seqs: int, now: float = 1.0, boot: BootId = BOOT) -> Call:
    return do("receive_events", events(*seqs, boot=boot), now)


def order(delta: object, now: float = 1.0) -> Call:
    return do("order", delta, now)


def open_(boot: BootId, sent: int, durable: int, now: float) -> Call:
    return do("open_session", hello(boot, sent), durable, now, 1, 2)


def resume(sent: int, now: float, echo: str = "") -> Call:
    return do("resume_session", hello(BOOT, sent, echo), now, 1, 2)


tick, acknowledge, condition, unconfirmed_s = (
    partial(do, name) for name in ("tick", "acknowledge", "condition", "unconfirmed_s")
)
request = do("request_hello")


def attribute(name: str) -> Call:
    return lambda session: getattr(session, name)


def nodes(*messages: Any) -> list[ToNode]:
    return [ToNode(message) for message in messages]


def controllers(*messages: Any) -> list[ToController]:
    return [ToController(message) for message in messages]


REFUSED: Final = Refused(code="no_slots", message="the node offers no slots", hint="set slots")
FIRST, SECOND = delta(A, 2, 1, 1), delta(A, 2, 1, 2)
FORGETS: Final = stop(A, 4, stage=1, term=2, forget=True)
OF_ANOTHER: Final = tuple(replace(one, node=NodeId("another")) for one in events(1, 2))

AGENT: Final[dict[str, Case]] = {
    "a welcomed agent drops committed events and resends the others": (
        partial(agent, 3),
        [
            (receive(welcome(committed=1)), [welcome(committed=1), *controllers(Resent(events=events(2, 3)))]),
            (attribute("spool"), list(events(2, 3))),
        ],
    ),
    "a heartbeat states the last event": (
        partial(welcomed, 3), [(tick(1.0), controllers(beat("2.1", 3, 1))), (tick(1.5), [])],
    ),
    "a request is answered with a hello at once, and with another a second later": (
        welcomed,
        [(receive(asked(3), 4.0), HELLO), (attribute("session"), None), (tick(4.9), []), (tick(5.0), HELLO)],
    ),
    "a second request is answered only if its controller is newer": (
        welcomed, [(receive(asked(3), 4.0), ...), (receive(asked(3), 4.5), []), (receive(asked(4), 4.6), HELLO)],
    ),
    "the requested word is repeated at once": (
        agent,
        [
            (receive(asked(2), 0.0), ...), (receive(asked(2, "2.1"), 0.25), HELLO), (attribute("echo"), "2.1"),
            (receive(asked(2, "2.1"), 0.5), []),
        ],
    ),
    "a refusal is an output": (agent, [(receive(REFUSED), [REFUSED])]),
    "six seconds without a message lead to a hello": (
        welcomed, [(tick(6.0), controllers(beat("2.1", 0, 1))), (tick(7.0), HELLO)],
    ),
    "a reply to a heartbeat keeps the session": (
        welcomed, [(receive(ack(), 5.0), ...), (tick(11.0), controllers(beat("2.1", 0, 1)))],
    ),
    "silence is measured from the heartbeat that was answered last": (
        welcomed,
        [
            (unconfirmed_s(0.0), 0.0), *((tick(now), ...) for now in (1.0, 2.0, 3.0)),
            (receive(ack(number=2), 5.0), ...), (unconfirmed_s(5.0), 3.0),
            (receive(ack(number=1), 5.5), ...), (unconfirmed_s(5.5), 3.5),
            (receive(ack(number=2), 6.0), ...), (unconfirmed_s(6.0), 4.0),
            (receive(ack(number=7), 6.5), ...), (unconfirmed_s(6.5), 4.5),
        ],
    ),
    "a welcome is no reply to a heartbeat": (
        welcomed,
        [
            (tick(1.0), ...), (receive(welcome("2.2"), 5.0), ...), (receive(ack("2.2", number=1), 5.5), ...),
            (unconfirmed_s(6.0), 5.0),
        ],
    ),
    "a reply of an older controller counts from its arrival": (
        welcomed, [(tick(1.0), ...), (receive(ack(), 5.0), ...), (unconfirmed_s(6.0), 1.0)],
    ),
    "a reply of another session changes nothing": (
        partial(welcomed, 2), [(receive(ack("1.9", committed=2), 5.0), []), (attribute("spool"), list(events(1, 2))), (tick(11.0), HELLO)],
    ),
    "a reply of a former controller changes nothing after a delta of a newer one": (
        partial(welcomed, 2),
        [
            (receive(delta(A, 3, 4, 1)), ...), (receive(ack(committed=2), 5.0), []),
            (attribute("spool"), list(events(1, 2))), (tick(6.5), HELLO),
        ],
    ),
    "an event is numbered, published and kept": (
        agent,
        [
            (record(1), [Publish(numbered(1))]), (record(2), [Publish(numbered(2))]),
            (attribute("spool"), list(events(1, 2))),
        ],
    ),
    "missing events are resent": (partial(welcomed, 3), [(receive(missing(2)), controllers(Resent(events=events(2, 3))))]),
    "events of another boot are not resent": (partial(welcomed, 3), [(receive(missing(1, OTHER)), [])]),
    "committed events can not be resent": (
        partial(agent, 3),
        [
            (attribute("dropped"), 0), (receive(committed(2)), ...), (attribute("dropped"), 2),
            (receive(committed(3)), ...), (attribute("dropped"), 3),
        ],
    ),
    "committed events of this boot are dropped": (
        partial(welcomed, 3),
        [
            (receive(committed(3, OTHER)), ...), (attribute("spool"), list(events(1, 2, 3))),
            (receive(committed(2, term=1)), ...), (attribute("spool"), list(events(1, 2, 3))),
            (receive(committed(2)), ...), (attribute("spool"), list(events(3))),
            (receive(committed(1)), ...), (attribute("spool"), list(events(3))),
        ],
    ),
    "a reply to a heartbeat drops committed events": (
        partial(welcomed, 3), [(receive(ack(committed=3)), ...), (attribute("spool"), [])],
    ),
    "a spool is full until the controller has caught up": (
        partial(welcomed, MAX_SPOOLED - 1),
        [
            (attribute("spool_full"), False), (record(MAX_SPOOLED), ...), (attribute("spool_full"), True),
            (receive(committed(1)), ...), (attribute("spool_full"), False),
        ],
    ),
    "newer deltas are applied and acknowledged": (
        welcomed,
        [
            (receive(delta(A, *number)), [Apply(delta(A, *number)), *controllers(acked(*number))])
            for number in ((2, 1, 1), (2, 1, 2), (2, 4, 1), (3, 4, 1))
        ],
    ),
    "a job can be forgotten later than its last version": (
        welcomed,
        [
            (receive(stop(A, 4, stage=1, term=2)), ...),
            (receive(FORGETS), [Apply(FORGETS), *controllers(acked(2, 4, 1))]),
        ],
    ),
    "an equal delta is acknowledged and not applied": (
        welcomed, [(receive(delta(A, 2, 4, 1)), ...), (receive(delta(A, 2, 4, 1)), controllers(acked(2, 4, 1)))],
    ),
    "an older delta is refused with the held order": (
        welcomed,
        [
            (receive(delta(A, 2, 4, 2)), ...),
            *(
                (receive(delta(A, *older)), controllers(acked(2, 4, 2, applied=False)))
                for older in ((1, 9, 3), (2, 3, 3), (2, 4, 1))
            ),
            (attribute("held"), {(A, False): (2, 4, 2)}),
        ],
    ),
    "a delta of a former controller is refused for any job": (
        welcomed, [(receive(delta(A, 1, 9, 3)), controllers(acked(2, 0, 0, applied=False))), (attribute("held"), {})],
    ),
    "jobs are ordered independently": (
        welcomed,
        [(receive(delta(B, 2, 9, 3)), ...), (receive(FIRST), [Apply(FIRST), *controllers(acked(2, 1, 1))])],
    ),
    "a forgotten job holds no order": (
        welcomed,
        [
            (receive(delta(A, 2, 4, 2)), ...), (receive(sweep_delta(A, 2, 7)), ...),
            (do("forget_job", A), None), (attribute("held"), {}),
        ],
    ),
    "newer deltas of a sweep are applied, equal ones acknowledged": (
        welcomed,
        [
            step
            for number in ((2, 1), (2, 9), (3, 2))
            for step in (
                (receive(sweep_delta(A, *number)), [Apply(sweep_delta(A, *number)), *controllers(sweep_acked(*number))]),
                (receive(sweep_delta(A, *number)), controllers(sweep_acked(*number))),
            )
        ],
    ),
    "an older delta of a sweep is answered with the held order": (
        welcomed,
        [
            (receive(sweep_delta(A, 2, 4)), ...),
            (receive(sweep_delta(A, 1, 9)), controllers(sweep_acked(2, 4))),
            (receive(sweep_delta(A, 2, 3)), controllers(sweep_acked(2, 4))),
            (attribute("held"), {(A, True): (2, 4)}),
        ],
    ),
    "a job and its sweep are ordered independently": (
        welcomed,
        [
            (receive(delta(A, 2, 9, 3)), ...),
            (receive(sweep_delta(A, 2, 1)), [Apply(sweep_delta(A, 2, 1)), *controllers(sweep_acked(2, 1))]),
        ],
    ),
    "a lower term changes nothing": (
        partial(welcomed, 2),
        [
            (receive(welcome("1.7", committed=2)), []), (receive(asked(1)), []),
            (receive(ack("1.7", committed=2)), []), (lambda session: session == welcomed(2), True),
        ],
    ),
    "a higher term takes over": (
        welcomed, [(receive(welcome("3.1")), [welcome("3.1")]), (attribute("session"), "3.1"), (attribute("term"), Term(3))],
    ),
}  # fmt: skip

CONTROLLER: Final[dict[str, Case]] = {
    "an equivalent hello resumes the session and its deltas": (
        partial(controller, 7),
        [
            (receive(beat("2.1", 7), 0.5), ...), (order(FIRST, 0.5), ...),
            (do("repeats_hello", hello(BOOT, 9)), True),
            (resume(9, 5.0), nodes(welcome("2.1", committed=7))), (attribute("last_received_at"), 0.5),
            (tick(6.9), []), (tick(7.0), nodes(FIRST)),
        ],
    ),
    "an agent that sends hellos and receives nothing is silent": (
        controller,
        [
            (receive(beat("2.1", 0)), ...), (resume(0, 3.0), ...), (open_(BOOT, 1, 0, 5.0), ...),
            (attribute("last_received_at"), 1.0), (condition(7.0), SUSPECT),
            (receive(beat("2.2", 0), 13.5), ...), (condition(13.5), ALIVE),
        ],
    ),
    "a hello is a sign of life only if it repeats the requested word": (
        controller,
        [
            (request, nodes(asked(2, "2.1"))), (request, nodes(asked(2, "2.1"))),
            (resume(0, 3.0, ""), ...), (attribute("last_received_at"), 0.0),
            (resume(0, 4.0, "1.1"), ...), (attribute("last_received_at"), 0.0),
            (resume(0, 5.0, "2.1"), ...), (attribute("last_received_at"), 5.0),
            (resume(0, 6.0, "2.1"), ...), (attribute("last_received_at"), 5.0),
            (request, nodes(asked(2, "2.2"))),
        ],
    ),
    "a new boot of an agent is a sign of life": (
        controller, [(open_(OTHER, 0, 0, 9.0), ...), (attribute("last_received_at"), 9.0)],
    ),
    "each hello begins a session of this incarnation": (
        fresh,
        [
            (do("repeats_hello", hello(BOOT, 0)), False),
            (open_(BOOT, 9, 7, 0.0), nodes(welcome("2.1", committed=7))),
            (open_(BOOT, 9, 7, 0.0), nodes(welcome("2.2", committed=7))),
        ],
    ),
    "a heartbeat of this session is answered": (
        partial(controller, 5), [(receive(beat("2.1", 5)), nodes(ack(committed=5)))],
    ),
    "a heartbeat of another session leads to a request and is no sign of life": (
        controller,
        [
            *((receive(beat(unknown, 5), 7.0), nodes(asked(2, "2.1"))) for unknown in ("1.1", "2.2", "")),
            (attribute("last_received_at"), 0.0),
        ],
    ),
    "a heartbeat before any hello leads to a request": (
        fresh, [(receive(beat("1.1", 5)), nodes(asked(2, "2.1")))],
    ),
    "a silent node is suspect after 6 s and lost after 30 s": (
        controller, [(condition(5.99), ALIVE), (condition(6.0), SUSPECT), (condition(29.99), SUSPECT), (condition(30.0), LOST)],
    ),
    "a heartbeat ends the suspicion": (
        controller, [(receive(beat("2.1", 0), 10.0), ...), (condition(15.9), ALIVE), (condition(16.0), SUSPECT)],
    ),
    "the intervals are settings": (
        partial(ControllerSession, NODE, Term(2), SessionTimings(suspect_s=0.5, lost_s=1.0)),
        [(condition(0.4), ALIVE), (condition(0.5), SUSPECT), (condition(1.0), LOST)],
    ),
    "events of another node are skipped": (
        controller, [(receive(Resent(events=OF_ANOTHER)), []), (take(1), delivered(1))],
    ),
    "events in order are delivered at once": (
        controller, [(take(1), delivered(1)), (take(2, 3), delivered(2, 3))],
    ),
    "a repeated event is delivered once": (controller, [(take(1, 1), delivered(1)), (take(1), [])]),
    "a gap is requested, and later events are held": (
        controller, [(take(1), ...), (take(3, 4), nodes(missing(2))), (take(2, now=1.1), delivered(2, 3, 4))],
    ),
    "a gap is requested at most twice a second": (
        controller, [(take(3), nodes(missing(1))), (take(4, now=1.4), []), (take(5, now=1.5), nodes(missing(1)))],
    ),
    "nothing is requested right after a welcome": (
        controller, [(take(2, now=0.4), []), (take(3, now=0.5), nodes(missing(1)))],
    ),
    "resent events are delivered in order with held ones": (
        controller, [(take(3), ...), (receive(Resent(events=events(2, 1)), 1.1), delivered(1, 2, 3))],
    ),
    "lost last events are requested at the second heartbeat that counts them": (
        controller,
        [
            (take(1, 2), ...), (receive(beat("2.1", 4), 2.0), nodes(ack())),
            (receive(beat("2.1", 4), 3.0), nodes(ack(), missing(3))),
        ],
    ),
    "events that a heartbeat overtook are not requested": (
        controller,
        [
            (take(1, 2), ...), (receive(beat("2.1", 4), 2.0), ...), (take(3, 4, now=2.1), ...),
            (receive(beat("2.1", 6), 3.0), nodes(ack())),
        ],
    ),
    "events of another boot are not delivered": (
        controller, [(take(1, 2, boot=OTHER), []), (take(1), delivered(1))],
    ),
    "events before any hello are not delivered": (fresh, [(take(1), [])]),
    "a new boot counts from its beginning": (
        partial(controller, boot=OTHER),
        [
            (take(1, 3, boot=OTHER), ...), (open_(BOOT, 1, 0, 2.0), ...),
            (take(1, now=2.0), delivered(1)), (take(2, now=2.0), delivered(2)),
        ],
    ),
    "a hello of the same boot repeats no event": (
        controller, [(take(1, 2, 3), ...), (open_(BOOT, 3, 1, 2.0), ...), (take(2, 3, 4, now=2.0), delivered(4))],
    ),
    "a restarted controller continues where its journal ends": (partial(controller, 2), [(take(1, 2, 3), delivered(3))]),
    "commits are acknowledged once, and never go back": (
        controller,
        [
            (take(1, 2, 3), ...), (acknowledge(2), nodes(committed(2))), (acknowledge(2), []),
            (acknowledge(1), []), (attribute("durable"), 2),
        ],
    ),
    "nothing is acknowledged before a hello": (fresh, [(acknowledge(1), [])]),
    "early events are held up to a limit": (
        controller, [(take(*range(3, MAX_HELD + 100)), ...), (lambda session: len(session._early), MAX_HELD)],
    ),
    "a delta is repeated after doubled pauses until it is acknowledged": (
        controller,
        [
            (order(FIRST), nodes(FIRST)), (tick(2.9), []), (tick(3.0), nodes(FIRST)), (tick(6.9), []),
            (tick(7.0), nodes(FIRST)), (tick(15.0), nodes(FIRST)), (tick(31.0), nodes(FIRST)), (tick(46.9), []),
            (tick(47.0), nodes(FIRST)), (receive(acked(2, 1, 1), 47.1), ...), (tick(99.0), []),
        ],
    ),
    "only the newest delta of a job is repeated": (
        controller,
        [
            (order(FIRST), ...), (order(SECOND, 2.0), ...), (order(delta(B, 2, 7, 1), 2.0), ...),
            (tick(4.0), nodes(SECOND, delta(B, 2, 7, 1))),
        ],
    ),
    "an older acknowledgement does not end the repetition": (
        controller, [(order(SECOND), ...), (receive(acked(2, 1, 1)), ...), (tick(3.0), nodes(SECOND))],
    ),
    "a newer held order ends the repetition": (
        controller, [(order(FIRST), ...), (receive(acked(3, 1, 1, applied=False)), ...), (tick(9.0), [])],
    ),
    "a refusal with an older order does not end the repetition": (
        controller, [(order(FIRST), ...), (receive(acked(2, 0, 0, applied=False)), ...), (tick(3.0), nodes(FIRST))],
    ),
    "nothing is ordered before a hello": (fresh, [(order(FIRST), []), (tick(9.0), [])]),
    "a new session starts without the orders of the last one": (
        controller, [(order(FIRST), ...), (open_(BOOT, 0, 0, 2.0), ...), (tick(9.0), [])],
    ),
    "both deltas of a sweep are repeated until each is acknowledged": (
        controller,
        [
            (order(FIRST), ...), (order(sweep_delta(A, 2, 4)), ...), (order(sweep_delta(A, 2, 5)), ...),
            (receive(sweep_acked(2, 4)), ...), (tick(3.0), nodes(FIRST, sweep_delta(A, 2, 5))),
            (receive(sweep_acked(2, 5)), ...), (tick(7.0), nodes(FIRST)),
            (receive(acked(2, 1, 1)), ...), (tick(60.0), []),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("begin", "steps"), [*AGENT.values(), *CONTROLLER.values()], ids=[*AGENT, *CONTROLLER]
)
def test_a_session_answers_each_step(begin: Callable[[], object], steps: list[Step]) -> None:
    session = begin()
    for number, (call, expected) in enumerate(steps, start=1):
        found = call(session)
        assert expected is ... or found == expected, f"step {number}"


def hellos(session: AgentSession, start: float, end: float) -> list[float]:
    """Return when the session sends hellos, checked each eighth of a second."""
    moments = [start + eighths / 8 for eighths in range(int((end - start) * 8))]
    return [now for now in moments if session.tick(Seconds(now)) == HELLO]


def test_hellos_become_rarer() -> None:
    assert hellos(agent(), 0.0, 40.0) == [0.0, 1.0, 3.0, 7.0, 15.0, 23.0, 31.0, 39.0]


def test_agents_that_begin_together_send_hellos_apart() -> None:
    first, second = (AgentSession(NODE, BOOT, chance=partial(float, at)) for at in (0.1, 0.9))
    for session in (first, second):
        session.tick(Seconds(0.0))

    moments = [hellos(session, 0.0, 9.0) for session in (first, second)]

    assert moments[0] != moments[1]
    assert all(0.5 <= moment <= 1.125 for moment, *_ in moments)


def test_a_hello_that_could_not_be_sent_does_not_count() -> None:
    session = agent()
    for second in map(Seconds, range(5)):
        assert session.tick(second) == HELLO
        session.hello_not_sent(second)


def test_a_refused_agent_waits_before_the_next_hello() -> None:
    session = agent()
    session.tick(Seconds(0.0))
    session.receive(REFUSED, Seconds(0.1))

    assert hellos(session, 0.125, 9.0) == [8.125]


@pytest.mark.parametrize(
    ("nodes", "suspect_s", "pause_s"),
    [(1, 6.0, 1.0), (2000, 6.0, 1.0), (2400, 6.0, 1.2), (50_000, 6.0, 4.25 / 3), (5000, 1.5, 1.0)],
)
def test_agents_of_a_large_cluster_send_fewer_heartbeats(
    nodes: int, suspect_s: float, pause_s: float
) -> None:
    assert first_beat(nodes, suspect_s) == pytest.approx(pause_s, abs=0.01)


def test_heartbeats_are_not_rarer_than_an_agent_allows_and_its_own_limit_holds() -> None:
    long_s = 30.0  # settings of the controller that an agent does not know

    assert first_beat(15_000, long_s) == pytest.approx(5.25 / 3, abs=0.01)
    assert first_beat(15_000, long_s, longest_s=1.0) == pytest.approx(1.0, abs=0.01)


def first_beat(nodes: int, suspect_s: float, *, longest_s: float = math.inf) -> float:
    """Return the pause before the first heartbeat of an agent."""
    controller = fresh()
    timings = SessionTimings(suspect_s=suspect_s, missed_s=max(5.0, suspect_s - 1.0))
    controller.timings = timings.of_cluster(nodes)
    session = agent()
    session.longest_heartbeat_s = longest_s
    for output in controller.open_session(hello(BOOT, 0), 0, Seconds(0.0), 1, 2):
        session.receive(cast("ToNode", output).message, Seconds(0.0))

    return next(at / 100 for at in range(1000) if session.tick(Seconds(at / 100)))


def test_the_end_of_a_session_leads_to_a_hello_at_once() -> None:
    session = agent()
    hellos(session, 0.0, 10.0)
    session.receive(welcome("2.1"), Seconds(10.0))

    assert hellos(session, 10.0, 20.0) == [16.125, 17.125, 19.125]


def test_a_changed_hello_begins_another_session() -> None:
    again = hello(BOOT, 0)
    seen = WorkerSeen(
        job=A, version=Version(1), rank=Rank(0), slot=0, pid=7, started_ticks=7, ended=False
    )
    for news in ({"boot": OTHER}, {"workers": (seen,)}, {"spec": replace(again.spec, cores=9)}):
        assert not controller().repeats_hello(replace(again, **news))


def test_many_missing_events_are_resent_in_pieces() -> None:
    session = welcomed(2 * MAX_RESENT + 1)

    outputs = session.receive(missing(1), Seconds(1.0))

    sent = [output.message for output in outputs if isinstance(output, ToController)]
    resent = [message.events for message in sent if isinstance(message, Resent)]
    assert [len(events) for events in resent] == [MAX_RESENT, MAX_RESENT, 1]
    assert [event for events in resent for event in events] == session.spool


# --- an agent's fence is over before its controller considers it lost


STEP_S = 0.25
ENDS_S = 60.0
FENCE_S = 8.0
DELAYS = st.lists(st.sampled_from((0.0, 0.25, 1.0, 3.0, 7.0, 20.0)), min_size=1, max_size=6)
NEVER = math.inf


@dataclass
class Road:
    """One way: each message takes its time, none overtakes another, and from `cut_s` on all are lost."""

    delays: Sequence[float]
    cut_s: float
    under_way: list[tuple[float, object]] = field(default_factory=list)
    sent: int = 0

    def send(self, message: object, now: float) -> None:
        at = now + self.delays[self.sent % len(self.delays)]
        self.sent += 1
        if now < self.cut_s:
            last = self.under_way[-1][0] if self.under_way else at
            self.under_way.append((max(at, last), message))

    def arrived(self, now: float) -> list[object]:
        due = [message for at, message in self.under_way if at <= now]
        del self.under_way[: len(due)]
        return due


def fenced_and_lost(up: Road, down: Road, *, agent_began_s: float) -> tuple[float, float]:
    """When the agent first was alone for so long, and when the controller had heard nothing for so long."""
    agent = AgentSession(NODE, BootId("boot-1"))
    controller = ControllerSession(NODE, Term(1))
    fenced = lost = NEVER
    for step in range(int(ENDS_S / STEP_S)):
        now = step * STEP_S
        agent_now = Seconds(now + agent_began_s)
        outputs = agent.tick(agent_now)
        for message in down.arrived(now):
            outputs += agent.receive(message, agent_now)  # type: ignore[arg-type]
        for output in outputs:
            match output:
                case ToController(message=said):
                    up.send(said, now)
                case SendHello():
                    up.send(None, now)
        for message in up.arrived(now):
            if message is None:
                greeting = hello(agent.boot, 0, agent.echo)
                known = controller.repeats_hello(greeting)
                answers = (
                    controller.resume_session(greeting, Seconds(now), 1, 2)
                    if known
                    else controller.open_session(greeting, 0, Seconds(now), 1, 2)
                )
            else:
                answers = controller.receive(message, Seconds(now))  # type: ignore[arg-type]
            for answer in answers:
                if isinstance(answer, ToNode):
                    down.send(answer.message, now)
        if agent.unconfirmed_s(agent_now) >= FENCE_S:
            fenced = min(fenced, now)
        if controller.session is not None and now - controller.last_received_at >= FENCE_S:
            lost = min(lost, now)
    return fenced, lost


@settings(max_examples=examples(200), deadline=None)
@given(
    up=DELAYS,
    down=DELAYS,
    up_cut_s=st.sampled_from((5.0, 20.0, NEVER)),
    down_cut_s=st.sampled_from((5.0, 20.0, NEVER)),
    agent_began_s=st.sampled_from((0.0, -1e6, 1e6)),
)
@example(up=[0.0], down=[0.0], up_cut_s=20.0, down_cut_s=NEVER, agent_began_s=0.0)
@example(up=[0.0], down=[3.0], up_cut_s=20.0, down_cut_s=NEVER, agent_began_s=1e6)
def test_an_agent_is_fenced_before_its_controller_considers_it_lost(
    up: list[float], down: list[float], up_cut_s: float, down_cut_s: float, agent_began_s: float
) -> None:
    roads = Road(up, up_cut_s), Road(down, down_cut_s)

    fenced, lost = fenced_and_lost(*roads, agent_began_s=agent_began_s)

    assert fenced <= lost


def test_an_agent_that_is_answered_is_never_fenced() -> None:
    roads = Road([0.25], NEVER), Road([1.0], NEVER)

    assert fenced_and_lost(*roads, agent_began_s=0.0) == (NEVER, NEVER)
