from __future__ import annotations

from functools import partial
from typing import Final

import pytest
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
    Rejected,
    SayHello,
    SessionTimings,
    ToController,
    ToNode,
    Welcomed,
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
from tests.unit.schemas.session_network import NODE, delta, hello, started, sweep_delta

BOOT: Final = BootId("boot-1")
OTHER: Final = BootId("boot-0")
A: Final = JobId("a-1")


def at(seconds: float) -> Seconds:
    return Seconds(seconds)


def numbered(seq: int, boot: BootId = BOOT) -> Numbered:
    return Numbered(node=NODE, boot=boot, seq=seq, event=started(pid=seq))


def events(*seqs: int, boot: BootId = BOOT) -> tuple[Numbered, ...]:
    return tuple(numbered(seq, boot) for seq in seqs)


def delivered(*seqs: int) -> list[Deliver]:
    return [Deliver(numbered(seq)) for seq in seqs]


def welcome(session: str = "2.1", *, committed: int = 0) -> Welcome:
    term = Term(int(session.partition(".")[0]))
    return Welcome(
        session=session, boot=BOOT, term=term, committed=committed, log_port=1, event_port=2
    )


def acked(term: int, version: int, stage: int, *, applied: bool = True) -> DeltaAcked:
    return DeltaAcked(
        job=A, term=Term(term), version=Version(version), stage=stage, applied=applied
    )


def sweep_acked(term: int, revision: int) -> SweepDeltaAcked:
    return SweepDeltaAcked(job=A, term=Term(term), revision=revision)


def agent(*, said: int = 0) -> AgentSession:
    """An agent that greeted nobody yet, to which `said` things happened; its pauses are whole."""
    session = AgentSession(NODE, BOOT)
    for pid in range(1, said + 1):
        session.happened(started(pid))
    return session


def welcomed(*, said: int = 0) -> AgentSession:
    """An agent in session 2.1, since second 0."""
    session = agent(said=said)
    session.receive(welcome("2.1"), at(0.0))
    return session


def controller(*, committed: int = 0, boot: BootId = BOOT) -> ControllerSession:
    """The second incarnation, in session 2.1 with an agent, since second 0."""
    session = ControllerSession(NODE, Term(2))
    session.greeted(hello(boot, committed), committed, at(0.0), 1, 2)
    return session


# --- greeting


def hellos(session: AgentSession, start: float, end: float) -> list[float]:
    """When it says hello, looked at each eighth of a second."""
    moments = [start + eighths / 8 for eighths in range(int((end - start) * 8))]
    return [now for now in moments if session.tick(at(now)) == [SayHello()]]


def test_an_agent_greets_at_its_first_tick_and_then_ever_more_seldom() -> None:
    assert hellos(agent(), 0.0, 40.0) == [0.0, 1.0, 3.0, 7.0, 15.0, 23.0, 31.0, 39.0]


def test_agents_that_begin_together_greet_apart() -> None:
    first, second = (AgentSession(NODE, BOOT, chance=partial(float, at)) for at in (0.1, 0.9))
    for session in (first, second):
        session.tick(at(0.0))

    moments = [hellos(session, 0.0, 9.0) for session in (first, second)]

    assert moments[0] != moments[1]
    assert all(0.5 <= moment <= 1.125 for moment, *_ in moments)


def test_a_hello_that_nobody_could_hear_does_not_count() -> None:
    session = agent()
    for second in range(5):
        assert session.tick(at(second)) == [SayHello()]
        session.unheard(at(second))


def test_an_agent_that_is_refused_comes_back_seldom() -> None:
    session = agent()
    session.tick(at(0.0))
    session.receive(Refused(code="stale_boot", message="m", hint="h"), at(0.1))

    assert hellos(session, 0.125, 9.0) == [8.125]


def test_the_end_of_a_session_makes_an_agent_greet_at_once_however_often_it_greeted_before() -> (
    None
):
    session = agent()
    hellos(session, 0.0, 10.0)
    session.receive(welcome("2.1"), at(10.0))

    assert hellos(session, 10.0, 20.0) == [16.125, 17.125, 19.125]


def test_a_hello_that_says_nothing_new_is_answered_with_the_session_that_there_is() -> None:
    session = controller(committed=7)
    session.receive(Heartbeat(session="2.1", events_sent=7), at(0.5))
    session.order(delta(A, 2, 1, 1), at(0.5))
    again = hello(BOOT, 9)

    assert session.says_nothing_new(again)
    assert session.greeted_again(again, at(5.0), 1, 2) == [ToNode(welcome("2.1", committed=7))]
    assert session.last_heard == at(0.5)
    assert session.tick(at(5.0)) == [ToNode(delta(A, 2, 1, 1))]


def test_an_agent_that_greets_and_greets_and_hears_nothing_is_silent() -> None:
    session = controller()
    session.receive(Heartbeat(session="2.1", events_sent=0), at(1.0))

    session.greeted_again(hello(BOOT, 0), at(3.0), 1, 2)
    session.greeted(hello(BOOT, 1), 0, at(5.0), 1, 2)

    assert session.last_heard == at(1.0)
    assert session.condition(at(7.0)) is Condition.SUSPECT
    session.receive(Heartbeat(session="2.2", events_sent=0), at(13.5))
    assert session.condition(at(13.5)) is Condition.ALIVE


def test_a_hello_that_repeats_our_word_is_a_sign_of_life_and_no_other_is() -> None:
    session = controller()
    assert session.ask_to_greet() == [ToNode(HelloRequest(term=Term(2), echo="2.1"))]
    assert session.ask_to_greet() == [ToNode(HelloRequest(term=Term(2), echo="2.1"))]

    heard = []
    for second, echo in ((3.0, ""), (4.0, "1.1"), (5.0, "2.1"), (6.0, "2.1")):
        session.greeted_again(hello(BOOT, 0, echo), at(second), 1, 2)
        heard.append(session.last_heard)

    assert heard == [0.0, 0.0, 5.0, 5.0]
    assert session.ask_to_greet() == [ToNode(HelloRequest(term=Term(2), echo="2.2"))]


def test_a_new_life_of_an_agent_is_a_sign_of_life() -> None:
    session = controller()
    session.greeted(hello(OTHER, 0), 0, at(9.0), 1, 2)
    assert session.last_heard == at(9.0)


def test_an_agent_repeats_the_word_that_it_is_asked_for_at_once() -> None:
    session = agent()
    asked = HelloRequest(term=Term(2), echo="2.1")
    session.receive(HelloRequest(term=Term(2)), at(0.0))

    assert session.receive(asked, at(0.25)) == [SayHello()]
    assert session.echo == "2.1"
    assert session.receive(asked, at(0.5)) == [], "it is on its way"


@pytest.mark.parametrize("change", ["boot", "workers", "spec"])
def test_a_hello_with_news_begins_another_session(change: str) -> None:
    session, again = controller(), hello(BOOT, 0)
    seen = WorkerSeen(
        job=A, version=Version(1), rank=Rank(0), slot=0, pid=7, started_ticks=7, ended=False
    )
    news = {
        "boot": OTHER, "workers": (seen,), "spec": replace(again.spec, cores=9)
    }  # fmt: skip

    assert not session.says_nothing_new(replace(again, **{change: news[change]}))


def test_nobody_is_known_who_never_greeted() -> None:
    assert not ControllerSession(NODE, Term(2)).says_nothing_new(hello(BOOT, 0))


def test_a_hello_is_answered_with_a_session_of_this_incarnation() -> None:
    session = ControllerSession(NODE, Term(2))

    outputs = session.greeted(hello(BOOT, 9), 7, at(0.0), 7705, 7700)

    answer = Welcome(
        session="2.1", boot=BOOT, term=Term(2), committed=7, log_port=7705, event_port=7700
    )
    assert outputs == [ToNode(answer)]


def test_every_hello_begins_a_session_of_its_own() -> None:
    session = ControllerSession(NODE, Term(2))

    names = []
    for _ in range(3):
        match session.greeted(hello(BOOT, 0), 0, at(0.0), 1, 2):
            case [ToNode(Welcome(session=name))]:
                names.append(name)

    assert names == ["2.1", "2.2", "2.3"]


def test_a_welcomed_agent_forgets_what_is_committed_and_resends_the_rest() -> None:
    session = agent(said=3)

    outputs = session.receive(welcome(committed=1), at(0.0))

    assert outputs == [
        Welcomed(welcome(committed=1)),
        ToController(Resent(events=events(2, 3))),
    ]
    assert session.spool == list(events(2, 3))


def test_a_welcomed_agent_sends_heartbeats_that_say_how_far_its_events_go() -> None:
    session = welcomed(said=3)

    assert session.tick(at(1.0)) == [
        ToController(Heartbeat(session="2.1", events_sent=3, number=1))
    ]
    assert session.tick(at(1.5)) == []


def test_a_heartbeat_of_this_session_is_answered_with_a_pulse() -> None:
    session = controller(committed=5)

    outputs = session.receive(Heartbeat(session="2.1", events_sent=5), at(1.0))

    assert outputs == [ToNode(HeartbeatAck(session="2.1", term=Term(2), committed=5))]


@pytest.mark.parametrize("unknown", ["1.1", "2.2", ""])
def test_a_heartbeat_of_an_unknown_session_is_answered_with_greet_and_is_no_sign_of_life(
    unknown: str,
) -> None:
    session = controller()

    outputs = session.receive(Heartbeat(session=unknown, events_sent=5), at(7.0))

    assert outputs == [ToNode(HelloRequest(term=Term(2), echo="2.1"))]
    assert session.last_heard == at(0.0)


def test_a_controller_that_was_never_greeted_asks_for_a_hello() -> None:
    session = ControllerSession(NODE, Term(2))

    outputs = session.receive(Heartbeat(session="1.1", events_sent=5), at(1.0))

    assert outputs == [ToNode(HelloRequest(term=Term(2), echo="2.1"))]


def test_an_agent_that_is_asked_to_greet_says_hello_at_once_and_again_a_second_later() -> None:
    session = welcomed()

    assert session.receive(HelloRequest(term=Term(3)), at(4.0)) == [SayHello()]
    assert session.session is None
    assert session.tick(at(4.9)) == []
    assert session.tick(at(5.0)) == [SayHello()]


def test_an_agent_that_greets_already_does_so_again_only_for_a_newer_controller() -> None:
    session = welcomed()
    session.receive(HelloRequest(term=Term(3)), at(4.0))

    assert session.receive(HelloRequest(term=Term(3)), at(4.5)) == []
    assert session.receive(HelloRequest(term=Term(4)), at(4.6)) == [SayHello()]


def test_a_refusal_is_told() -> None:
    refused = Refused(code="no_slots", message="the node offers no slots", hint="set slots")

    assert agent().receive(refused, at(0.0)) == [Rejected(refused)]


# --- silence


def test_a_silent_node_is_suspect_at_six_seconds_and_lost_at_thirty() -> None:
    session = controller()

    assert session.condition(at(5.99)) is Condition.ALIVE
    assert session.condition(at(6.0)) is Condition.SUSPECT
    assert session.condition(at(29.99)) is Condition.SUSPECT
    assert session.condition(at(30.0)) is Condition.LOST


def test_a_heartbeat_makes_a_suspect_alive_again() -> None:
    session = controller()

    session.receive(Heartbeat(session="2.1", events_sent=0), at(10.0))

    assert session.condition(at(15.9)) is Condition.ALIVE
    assert session.condition(at(16.0)) is Condition.SUSPECT


def test_the_intervals_can_be_chosen() -> None:
    session = ControllerSession(NODE, Term(2), SessionTimings(suspect_s=0.5, lost_s=1.0))

    assert [session.condition(at(now)) for now in (0.4, 0.5, 1.0)] == list(Condition)


def test_an_agent_that_hears_nothing_for_six_seconds_greets_again() -> None:
    session = welcomed()

    assert session.tick(at(6.0)) == [
        ToController(Heartbeat(session="2.1", events_sent=0, number=1))
    ]
    assert session.tick(at(7.0)) == [SayHello()]


def test_a_pulse_of_its_session_keeps_an_agent_in_it() -> None:
    session = welcomed()
    session.receive(HeartbeatAck(session="2.1", term=Term(2), committed=0), at(5.0))

    assert session.tick(at(11.0)) == [
        ToController(Heartbeat(session="2.1", events_sent=0, number=1))
    ]


def test_an_agent_is_alone_since_it_said_what_was_answered_last() -> None:
    session = welcomed()
    alone = [session.alone_s(at(0.0))]
    for second in (1.0, 2.0, 3.0):
        session.tick(at(second))
    for number, now in ((2, 5.0), (1, 5.5), (2, 6.0), (7, 6.5)):
        answer = HeartbeatAck(session="2.1", term=Term(2), committed=0, number=number)
        session.receive(answer, at(now))
        alone.append(session.alone_s(at(now)))

    assert alone == [0.0, 3.0, 3.5, 4.0, 4.5], "the second heartbeat was said at 2.0"


def test_a_welcome_is_no_answer_to_a_heartbeat() -> None:
    session = welcomed()
    session.tick(at(1.0))
    session.receive(welcome("2.2"), at(5.0))
    session.receive(HeartbeatAck(session="2.2", term=Term(2), committed=0, number=1), at(5.5))

    assert session.alone_s(at(6.0)) == 5.0


def test_an_older_controller_does_not_say_what_it_answers() -> None:
    session = welcomed()
    session.tick(at(1.0))
    session.receive(HeartbeatAck(session="2.1", term=Term(2), committed=0), at(5.0))

    assert session.alone_s(at(6.0)) == 1.0


def test_a_pulse_of_another_session_changes_nothing() -> None:
    session = welcomed(said=2)

    assert session.receive(HeartbeatAck(session="1.9", term=Term(1), committed=2), at(5.0)) == []
    assert session.spool == list(events(1, 2))
    assert session.tick(at(11.0)) == [SayHello()]


def test_a_pulse_of_a_former_controller_changes_nothing_once_a_newer_one_has_spoken() -> None:
    session = welcomed(said=2)
    session.receive(delta(A, 3, 4, 1), at(1.0))  # its hello or its welcome is still on the way

    assert session.receive(HeartbeatAck(session="2.1", term=Term(2), committed=2), at(5.0)) == []
    assert session.spool == list(events(1, 2))
    assert session.tick(at(6.5)) == [SayHello()]


# --- events up


def test_events_of_another_node_are_passed_over() -> None:
    session = controller()
    others = tuple(replace(one, node=NodeId("another")) for one in events(1, 2))

    assert session.receive(Resent(events=others), at(1.0)) == []
    assert session.published(events(1), at(1.0)) == delivered(1)


def test_what_happens_is_numbered_published_and_kept() -> None:
    session = agent()

    assert session.happened(started(pid=1)) == [Publish(numbered(1))]
    assert session.happened(started(pid=2)) == [Publish(numbered(2))]
    assert session.spool == list(events(1, 2))


def test_events_in_order_are_delivered_at_once() -> None:
    session = controller()

    assert session.published(events(1), at(1.0)) == delivered(1)
    assert session.published(events(2, 3), at(1.0)) == delivered(2, 3)


def test_a_repeated_event_is_delivered_once() -> None:
    session = controller()

    assert session.published(events(1, 1), at(1.0)) == delivered(1)
    assert session.published(events(1), at(1.0)) == []


def test_a_gap_makes_the_controller_ask_for_what_it_misses_and_hold_the_rest() -> None:
    session = controller()
    session.published(events(1), at(1.0))

    outputs = session.published(events(3, 4), at(1.0))

    assert outputs == [ToNode(ResendEvents(boot=BOOT, first=2))]
    assert session.published(events(2), at(1.1)) == delivered(2, 3, 4)


def test_a_gap_is_asked_for_at_most_twice_a_second() -> None:
    session = controller()
    ask = [ToNode(ResendEvents(boot=BOOT, first=1))]

    assert session.published(events(3), at(1.0)) == ask
    assert session.published(events(4), at(1.4)) == []
    assert session.published(events(5), at(1.5)) == ask


def test_right_after_a_welcome_the_agent_resends_unasked() -> None:
    session = controller()

    assert session.published(events(2), at(0.4)) == []
    assert session.published(events(3), at(0.5)) == [ToNode(ResendEvents(boot=BOOT, first=1))]


def test_what_was_resent_is_delivered_in_order_with_what_was_held() -> None:
    session = controller()
    session.published(events(3), at(1.0))

    outputs = session.receive(Resent(events=events(2, 1)), at(1.1))

    assert outputs == delivered(1, 2, 3)


def test_a_lost_tail_is_asked_for_when_a_second_heartbeat_counts_it() -> None:
    session = controller()
    session.published(events(1, 2), at(1.0))
    beat = Heartbeat(session="2.1", events_sent=4)
    ack = ToNode(HeartbeatAck(session="2.1", term=Term(2), committed=0))

    assert session.receive(beat, at(2.0)) == [ack], "its events may be on their way"
    assert session.receive(beat, at(3.0)) == [ack, ToNode(ResendEvents(boot=BOOT, first=3))]


def test_events_that_a_heartbeat_overtook_are_not_asked_for() -> None:
    session = controller()
    session.published(events(1, 2), at(1.0))
    ack = ToNode(HeartbeatAck(session="2.1", term=Term(2), committed=0))
    session.receive(Heartbeat(session="2.1", events_sent=4), at(2.0))

    session.published(events(3, 4), at(2.1))

    assert session.receive(Heartbeat(session="2.1", events_sent=6), at(3.0)) == [ack]


def test_an_agent_resends_what_is_missed() -> None:
    session = welcomed(said=3)

    outputs = session.receive(ResendEvents(boot=BOOT, first=2), at(1.0))

    assert outputs == [ToController(Resent(events=events(2, 3)))]


def test_much_that_is_missed_is_resent_in_pieces() -> None:
    session = welcomed(said=2 * MAX_RESENT + 1)

    outputs = session.receive(ResendEvents(boot=BOOT, first=1), at(1.0))

    sent = [output.message for output in outputs if isinstance(output, ToController)]
    resent = [message.events for message in sent if isinstance(message, Resent)]
    assert [len(events) for events in resent] == [MAX_RESENT, MAX_RESENT, 1]
    assert [event for events in resent for event in events] == session.spool


def test_an_agent_resends_nothing_of_another_boot() -> None:
    session = welcomed(said=3)

    assert session.receive(ResendEvents(boot=OTHER, first=1), at(1.0)) == []


def test_events_of_another_boot_are_not_delivered() -> None:
    session = controller()

    assert session.published(events(1, 2, boot=OTHER), at(1.0)) == []
    assert session.published(events(1), at(1.0)) == delivered(1)


def test_events_before_any_hello_are_not_delivered() -> None:
    assert ControllerSession(NODE, Term(2)).published(events(1), at(1.0)) == []


def test_a_new_boot_counts_from_its_beginning() -> None:
    session = controller(boot=OTHER)
    session.published(events(1, 3, boot=OTHER), at(1.0))  # 3 waits for 2

    session.greeted(hello(BOOT, 1), 0, at(2.0), 1, 2)

    assert session.published(events(1), at(2.0)) == delivered(1)
    assert session.published(events(2), at(2.0)) == delivered(2)


def test_a_hello_of_the_same_boot_delivers_nothing_again() -> None:
    session = controller()
    session.published(events(1, 2, 3), at(1.0))

    session.greeted(hello(BOOT, 3), 1, at(2.0), 1, 2)

    assert session.published(events(2, 3, 4), at(2.0)) == delivered(4)


def test_after_a_restart_the_controller_goes_on_where_its_journal_ends() -> None:
    session = controller(committed=2)

    assert session.published(events(1, 2, 3), at(1.0)) == delivered(3)


def test_commits_are_told_once_and_never_go_back() -> None:
    session = controller()
    session.published(events(1, 2, 3), at(1.0))

    assert session.committed(2) == [ToNode(EventsCommitted(boot=BOOT, through=2))]
    assert session.committed(2) == []
    assert session.committed(1) == []
    assert session.durable == 2


def test_nothing_is_told_as_committed_to_an_agent_that_never_greeted() -> None:
    assert ControllerSession(NODE, Term(2)).committed(1) == []


def test_an_agent_knows_up_to_where_it_cannot_resend() -> None:
    session = agent(said=3)
    assert session.dropped == 0

    for through, dropped in ((2, 2), (3, 3)):
        session.receive(EventsCommitted(boot=BOOT, through=through), at(1.0))
        assert session.dropped == dropped


def test_an_agent_forgets_committed_events_of_its_boot_only() -> None:
    session = welcomed(said=3)

    session.receive(EventsCommitted(boot=OTHER, through=3), at(1.0))
    assert session.spool == list(events(1, 2, 3))
    session.receive(EventsCommitted(boot=BOOT, through=2), at(1.0))
    assert session.spool == list(events(3))
    session.receive(EventsCommitted(boot=BOOT, through=1), at(1.0))
    assert session.spool == list(events(3))


def test_a_pulse_tells_what_is_committed_too() -> None:
    session = welcomed(said=3)

    session.receive(HeartbeatAck(session="2.1", term=Term(2), committed=3), at(1.0))

    assert session.spool == []


def test_a_full_spool_says_so_until_the_controller_catches_up() -> None:
    session = welcomed(said=MAX_SPOOLED - 1)
    assert not session.spool_full

    session.happened(started(pid=MAX_SPOOLED))
    assert session.spool_full

    session.receive(EventsCommitted(boot=BOOT, through=1), at(1.0))
    assert not session.spool_full


def test_events_that_come_too_early_are_held_up_to_a_bound() -> None:
    session = controller()

    session.published(events(*range(3, MAX_HELD + 100)), at(1.0))

    assert len(session._early) == MAX_HELD


# --- deltas down


def test_a_newer_delta_is_applied_and_acknowledged() -> None:
    session = welcomed()

    for order in ((2, 1, 1), (2, 1, 2), (2, 4, 1), (3, 4, 1)):
        assert session.receive(delta(A, *order), at(1.0)) == [
            Apply(delta(A, *order)),
            ToController(acked(*order)),
        ]


def test_a_job_may_be_forgotten_some_time_after_its_end() -> None:
    session = welcomed()
    session.receive(stop(A, 4, stage=1, term=2), at(1.0))
    forgets = stop(A, 4, stage=1, term=2, forget=True)

    assert session.receive(forgets, at(2.0)) == [Apply(forgets), ToController(acked(2, 4, 1))]


def test_an_equal_delta_is_acknowledged_again_and_not_applied() -> None:
    session = welcomed()
    session.receive(delta(A, 2, 4, 1), at(1.0))

    assert session.receive(delta(A, 2, 4, 1), at(2.0)) == [ToController(acked(2, 4, 1))]


@pytest.mark.parametrize("older", [(1, 9, 3), (2, 3, 3), (2, 4, 1)])
def test_an_older_delta_is_refused_with_the_newest_order_that_is_held(
    older: tuple[int, int, int],
) -> None:
    session = welcomed()
    session.receive(delta(A, 2, 4, 2), at(1.0))

    outputs = session.receive(delta(A, *older), at(2.0))

    assert outputs == [ToController(acked(2, 4, 2, applied=False))]
    assert session.held == {A: (2, 4, 2)}


def test_a_delta_of_a_former_controller_is_refused_even_for_a_job_that_is_not_held() -> None:
    session = welcomed()

    outputs = session.receive(delta(A, 1, 9, 3), at(1.0))

    assert outputs == [ToController(acked(2, 0, 0, applied=False))]
    assert session.held == {}


def test_jobs_are_ordered_independently() -> None:
    session = welcomed()
    session.receive(delta("b-2", 2, 9, 3), at(1.0))

    assert session.receive(delta(A, 2, 1, 1), at(1.0))[0] == Apply(delta(A, 2, 1, 1))


def test_a_job_of_which_nothing_is_left_holds_no_order() -> None:
    session = welcomed()
    session.receive(delta(A, 2, 4, 2), at(1.0))

    session.receive(sweep_delta(A, 2, 7), at(1.0))

    session.forget_job(A)

    assert (session.held, session.held_sweeps) == ({}, {})


def test_a_delta_is_repeated_until_it_is_acknowledged() -> None:
    session = controller()
    first = delta(A, 2, 1, 1)

    assert session.order(first, at(1.0)) == [ToNode(first)]
    assert session.tick(at(2.9)) == []
    assert session.tick(at(3.0)) == [ToNode(first)]
    assert session.tick(at(4.9)) == []
    assert session.tick(at(5.0)) == [ToNode(first)]
    session.receive(acked(2, 1, 1), at(5.1))
    assert session.tick(at(60.0)) == []


def test_only_the_newest_delta_of_a_job_is_repeated() -> None:
    session = controller()
    session.order(delta(A, 2, 1, 1), at(1.0))
    session.order(delta(A, 2, 1, 2), at(2.0))
    session.order(delta("b-2", 2, 7, 1), at(2.0))

    assert session.tick(at(4.0)) == [
        ToNode(delta(A, 2, 1, 2)),
        ToNode(delta("b-2", 2, 7, 1)),
    ]


def test_the_ack_of_an_older_delta_does_not_end_the_repetition_of_a_newer_one() -> None:
    session = controller()
    session.order(delta(A, 2, 1, 2), at(1.0))

    session.receive(acked(2, 1, 1), at(1.1))

    assert session.tick(at(3.0)) == [ToNode(delta(A, 2, 1, 2))]


def test_an_agent_that_holds_something_newer_is_not_asked_again() -> None:
    session = controller()
    session.order(delta(A, 2, 1, 1), at(1.0))

    session.receive(acked(3, 1, 1, applied=False), at(1.1))

    assert session.tick(at(9.0)) == []


def test_a_refusal_with_an_older_order_does_not_end_the_repetition() -> None:
    session = controller()
    session.order(delta(A, 2, 1, 1), at(1.0))

    session.receive(acked(2, 0, 0, applied=False), at(1.1))

    assert session.tick(at(3.0)) == [ToNode(delta(A, 2, 1, 1))]


def test_nothing_is_ordered_from_a_node_that_has_not_greeted() -> None:
    session = ControllerSession(NODE, Term(2))

    assert session.order(delta(A, 2, 1, 1), at(1.0)) == []
    assert session.tick(at(9.0)) == []


def test_a_new_session_starts_without_orders_of_the_last_one() -> None:
    session = controller()
    session.order(delta(A, 2, 1, 1), at(1.0))

    session.greeted(hello(BOOT, 0), 0, at(2.0), 1, 2)

    assert session.tick(at(9.0)) == []


# --- deltas of sweeps


def test_a_newer_delta_of_a_sweep_is_applied_an_equal_one_acknowledged() -> None:
    session = welcomed()

    for order in ((2, 1), (2, 9), (3, 2)):
        applied = [Apply(sweep_delta(A, *order)), ToController(sweep_acked(*order))]
        assert session.receive(sweep_delta(A, *order), at(1.0)) == applied
        again = session.receive(sweep_delta(A, *order), at(1.0))
        assert again == [ToController(sweep_acked(*order))]


@pytest.mark.parametrize("older", [(1, 9), (2, 3)])
def test_an_older_delta_of_a_sweep_is_answered_with_what_is_held(older: tuple[int, int]) -> None:
    session = welcomed()
    session.receive(sweep_delta(A, 2, 4), at(1.0))

    assert session.receive(sweep_delta(A, *older), at(2.0)) == [ToController(sweep_acked(2, 4))]
    assert session.held_sweeps == {A: (2, 4)}


def test_a_job_and_its_sweep_are_ordered_apart() -> None:
    session = welcomed()
    session.receive(delta(A, 2, 9, 3), at(1.0))

    assert session.receive(sweep_delta(A, 2, 1), at(1.0))[0] == Apply(sweep_delta(A, 2, 1))


def test_both_deltas_of_a_sweep_are_repeated_until_each_is_acknowledged() -> None:
    session = controller()
    group, sweep = delta(A, 2, 1, 1), sweep_delta(A, 2, 5)
    session.order(group, at(1.0))
    session.order(sweep_delta(A, 2, 4), at(1.0))
    session.order(sweep, at(1.0))

    session.receive(sweep_acked(2, 4), at(1.1))
    assert session.tick(at(3.0)) == [ToNode(group), ToNode(sweep)]
    session.receive(sweep_acked(2, 5), at(3.1))
    assert session.tick(at(5.0)) == [ToNode(group)]
    session.receive(acked(2, 1, 1), at(5.1))
    assert session.tick(at(60.0)) == []


# --- a lower term


def test_a_lower_term_changes_nothing() -> None:
    session = welcomed(said=2)

    assert session.receive(welcome("1.7", committed=2), at(1.0)) == []
    assert session.receive(HelloRequest(term=Term(1)), at(1.0)) == []
    assert session.receive(HeartbeatAck(session="1.7", term=Term(1), committed=2), at(1.0)) == []

    assert session == welcomed(said=2)


def test_a_higher_term_takes_over() -> None:
    session = welcomed()

    assert session.receive(welcome("3.1"), at(1.0)) == [Welcomed(welcome("3.1"))]
    assert (session.session, session.term) == ("3.1", Term(3))
