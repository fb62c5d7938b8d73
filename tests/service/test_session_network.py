from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from schemas.ids import JobId
from schemas.session import key_of, order_of
from tests.support.sizes import examples
from tests.unit.schemas.session_network import Delta, Network, delta, sweep_delta

CHOICE = st.integers(0, 1 << 12)
JOBS = (JobId("a-1"), JobId("b-2"))


class Delivery(RuleBasedStateMachine):
    """Any loss, order and restart; at last a network that delivers everything."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Network()

    # --- events

    @rule(lost=st.lists(st.booleans(), min_size=1, max_size=4))
    def events_occur(self, lost: list[bool]) -> None:
        for gone in lost:
            self.net.record()
            if gone:
                self.net.up.pop()

    @rule(
        job=st.sampled_from(JOBS),
        version=st.integers(0, 2),
        stage=st.integers(1, 3),
        lost=st.booleans(),
    )
    def a_newer_group_is_ordered(self, job: JobId, version: int, stage: int, *, lost: bool) -> None:
        held = self.net.wanted.get((job, False))
        now = order_of(held)[1:] if held else (0, 0)
        newer = (now[0] + version, stage)
        if newer > now:
            self.want(delta(job, 0, *newer), lost=lost)

    @rule(job=st.sampled_from(JOBS), more=st.integers(1, 2), lost=st.booleans())
    def a_newer_sweep_is_ordered(self, job: JobId, more: int, *, lost: bool) -> None:
        held = self.net.wanted.get((job, True))
        self.want(sweep_delta(job, 0, (order_of(held)[1] if held else 0) + more), lost=lost)

    def want(self, new: Delta, *, lost: bool) -> None:
        before = len(self.net.down)
        self.net.want(new)
        if lost:
            del self.net.down[before:]

    @rule(seconds=st.sampled_from((0.25, 1.0, 2.5, 7.0)))
    def time_passes(self, seconds: float) -> None:
        self.net.pass_time(seconds)

    @rule(times=st.integers(1, 5))
    def the_journal_commits(self, times: int) -> None:
        for _ in range(times):
            self.net.commit()

    @rule()
    def the_agent_restarts(self) -> None:
        self.net.start_agent()

    @rule()
    def the_controller_restarts(self) -> None:
        self.net.start_controller()

    @rule()
    def everything_arrives(self) -> None:
        self.net.deliver_all()

    # --- network

    @precondition(lambda self: self.net.up)
    @rule(choice=CHOICE, lost=st.booleans())
    def a_message_goes_up(self, choice: int, *, lost: bool) -> None:
        sent = self.net.up.pop(choice % len(self.net.up))
        if not lost:
            self.net.arrive_up(sent)

    @precondition(lambda self: self.net.down)
    @rule(choice=CHOICE, lost=st.booleans())
    def a_message_goes_down(self, choice: int, *, lost: bool) -> None:
        sent = self.net.down.pop(choice % len(self.net.down))
        if not lost:
            self.net.arrive_down(sent)

    @rule(up=st.booleans(), down=st.booleans())
    def all_messages_in_transit_are_lost(self, *, up: bool, down: bool) -> None:
        if up:
            self.net.up.clear()
        if down:
            self.net.down.clear()

    @precondition(lambda self: self.net.sent_up)
    @rule(choice=CHOICE)
    def an_old_message_arrives_up(self, choice: int) -> None:
        self.net.arrive_up(self.net.sent_up[choice % len(self.net.sent_up)])

    @precondition(lambda self: self.net.sent_down)
    @rule(choice=CHOICE)
    def an_old_message_arrives_down(self, choice: int) -> None:
        self.net.arrive_down(self.net.sent_down[choice % len(self.net.sent_down)])

    @precondition(lambda self: self.net.former and self.net.sent_up)
    @rule(choice=CHOICE)
    def a_former_controller_receives(self, choice: int) -> None:
        former = self.net.former[choice % len(self.net.former)]
        self.net.arrive_up(self.net.sent_up[choice % len(self.net.sent_up)], former)

    @precondition(lambda self: self.net.former)
    @rule(choice=CHOICE, job=st.sampled_from(JOBS), version=st.integers(1, 9))
    def a_former_controller_orders(self, choice: int, job: JobId, version: int) -> None:
        former = self.net.former[choice % len(self.net.former)]
        self.net.order(former, delta(job, 0, version, 1))
        self.net.order(former, sweep_delta(job, 0, version))

    # --- invariants

    @invariant()
    def committed_events_are_the_recorded_ones_in_order(self) -> None:
        for boot, events in self.net.journal.items():
            assert events == self.net.recorded[boot][: len(events)]

    @invariant()
    def the_agent_keeps_uncommitted_events(self) -> None:
        boot = self.net.agent.boot
        kept = len(self.net.recorded[boot]) - len(self.net.agent.spool)
        assert self.net.agent.spool == self.net.recorded[boot][kept:]
        assert kept <= len(self.net.journal[boot])

    @invariant()
    def durable_events_were_delivered(self) -> None:
        for controller in (self.net.controller, *self.net.former):
            session = controller.session
            assert session.durable <= session.received
            if session.boot is not None:
                assert session.durable <= len(self.net.journal[session.boot])

    @invariant()
    def a_confirmation_is_no_newer_than_the_last_receipt(self) -> None:
        agent, every = self.net.agent, (self.net.controller, *self.net.former)
        heard = max(controller.session.last_received_at for controller in every)
        assert self.net.now - agent.unconfirmed_s(self.net.now) <= max(
            heard, self.net.began or self.net.now
        )

    @invariant()
    def a_newer_delta_is_never_followed_by_an_older_one(self) -> None:
        for orders in self.net.orders.values():
            assert orders == sorted(set(orders))

    # --- eventually

    @rule()
    def everything_is_delivered(self) -> None:
        self.net.settle()

        agent, session = self.net.agent, self.net.controller.session
        assert self.net.journal[agent.boot] == self.net.recorded[agent.boot]
        assert agent.spool == []
        assert session.durable == agent.sent
        assert session.outstanding == {}
        for wish in self.net.wanted.values():
            assert self.net.orders[agent.boot, key_of(wish)][-1] == order_of(wish)
            assert agent.held[key_of(wish)] == order_of(wish)

    def teardown(self) -> None:
        self.everything_is_delivered()


TestDelivery = Delivery.TestCase
TestDelivery.settings = settings(max_examples=examples(400), stateful_step_count=50, deadline=None)
