from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from schemas.ids import JobId
from schemas.session import key_of, order_of
from tests.support.schemas_network import Delta, Network, delta, sweep_delta
from tests.support.sizes import examples

CHOICE = st.integers(0, 1 << 12)
JOBS = (JobId("a-1"), JobId("b-2"))


class Delivery(RuleBasedStateMachine):
    """Any network, any restart, at any moment; then a fair one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Network()

    # --- what happens

    @rule(lost=st.lists(st.booleans(), min_size=1, max_size=4))
    def something_happens(self, lost: list[bool]) -> None:
        for gone in lost:
            self.net.happen()
            if gone:
                self.net.up.pop()

    @rule(
        job=st.sampled_from(JOBS),
        version=st.integers(0, 2),
        stage=st.integers(1, 3),
        lost=st.booleans(),
    )
    def the_core_wants_something_newer(
        self, job: JobId, version: int, stage: int, *, lost: bool
    ) -> None:
        held = self.net.wanted.get((job, False))
        now = order_of(held)[1:] if held else (0, 0)
        newer = (now[0] + version, stage)
        if newer > now:
            self.want(delta(job, 0, *newer), lost=lost)

    @rule(job=st.sampled_from(JOBS), more=st.integers(1, 2), lost=st.booleans())
    def the_core_wants_something_newer_of_a_sweep(
        self, job: JobId, more: int, *, lost: bool
    ) -> None:
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
    def a_calm_moment(self) -> None:
        self.net.be_calm()

    # --- what the network does

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
    def all_that_is_under_way_is_lost(self, *, up: bool, down: bool) -> None:
        if up:
            self.net.up.clear()
        if down:
            self.net.down.clear()

    @precondition(lambda self: self.net.sent_up)
    @rule(choice=CHOICE)
    def a_message_of_the_past_comes_up(self, choice: int) -> None:
        self.net.arrive_up(self.net.sent_up[choice % len(self.net.sent_up)])

    @precondition(lambda self: self.net.sent_down)
    @rule(choice=CHOICE)
    def a_message_of_the_past_comes_down(self, choice: int) -> None:
        self.net.arrive_down(self.net.sent_down[choice % len(self.net.sent_down)])

    @precondition(lambda self: self.net.former and self.net.sent_up)
    @rule(choice=CHOICE)
    def a_former_controller_hears_something(self, choice: int) -> None:
        former = self.net.former[choice % len(self.net.former)]
        self.net.arrive_up(self.net.sent_up[choice % len(self.net.sent_up)], former)

    @precondition(lambda self: self.net.former)
    @rule(choice=CHOICE, job=st.sampled_from(JOBS), version=st.integers(1, 9))
    def a_former_controller_orders_something(self, choice: int, job: JobId, version: int) -> None:
        former = self.net.former[choice % len(self.net.former)]
        self.net.order(former, delta(job, 0, version, 1))
        self.net.order(former, sweep_delta(job, 0, version))

    # --- what is always true

    @invariant()
    def committed_events_are_what_was_said_once_and_in_order(self) -> None:
        for boot, events in self.net.journal.items():
            assert events == self.net.said[boot][: len(events)]

    @invariant()
    def the_agent_keeps_what_is_not_committed(self) -> None:
        boot = self.net.agent.boot
        kept = len(self.net.said[boot]) - len(self.net.agent.spool)
        assert self.net.agent.spool == self.net.said[boot][kept:]
        assert kept <= len(self.net.journal[boot])

    @invariant()
    def nothing_is_durable_that_was_not_delivered(self) -> None:
        for controller in (self.net.controller, *self.net.former):
            session = controller.session
            assert session.durable <= session.received
            if session.boot is not None:
                assert session.durable <= len(self.net.journal[session.boot])

    @invariant()
    def an_agent_that_counts_on_a_controller_was_heard_by_it_since(self) -> None:
        agent, every = self.net.agent, (self.net.controller, *self.net.former)
        heard = max(controller.session.last_received_at for controller in every)
        assert self.net.now - agent.unconfirmed_s(self.net.now) <= max(
            heard, self.net.began or self.net.now
        )

    @invariant()
    def a_newer_delta_is_never_followed_by_an_older_one(self) -> None:
        for orders in self.net.orders.values():
            assert orders == sorted(set(orders))

    # --- what becomes true

    @rule()
    def a_fair_while(self) -> None:
        self.net.be_fair()

        agent, session = self.net.agent, self.net.controller.session
        assert self.net.journal[agent.boot] == self.net.said[agent.boot]
        assert agent.spool == []
        assert session.durable == agent.sent
        assert session.outstanding == {}
        for wish in self.net.wanted.values():
            assert self.net.orders[agent.boot, key_of(wish)][-1] == order_of(wish)
            assert agent.held[key_of(wish)] == order_of(wish)

    def teardown(self) -> None:
        self.a_fair_while()


TestDelivery = Delivery.TestCase
TestDelivery.settings = settings(max_examples=examples(400), stateful_step_count=50, deadline=None)
