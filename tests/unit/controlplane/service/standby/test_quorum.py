"""Acknowledgement: whoever may claim the lease has every acknowledged input."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from controlplane.service.standby.lease import Held, Record, claim
from controlplane.service.standby.quorum import Quorum

A, B, C = "a", "b", "c"
SILENCE_S = 2.0


def following(quorum: Quorum, host: str, after: int, **how: object) -> None:
    said = {"files": 0, "mirrored": True, "now": 0.0, **how}
    quorum.heard(host, after=after, **said)  # type: ignore[arg-type]


def test_a_commit_waits_for_the_required_standby() -> None:
    quorum = Quorum(A, SILENCE_S, 0)
    quorum.listed = frozenset({A, B})

    following(quorum, B, 7)

    assert quorum.through(9) == 7


def test_a_standby_that_was_never_heard_holds_up_everything() -> None:
    quorum = Quorum(A, SILENCE_S, 0)
    quorum.listed = frozenset({A, B})

    assert quorum.through(9) == 0


def test_a_standby_is_listed_once_it_has_the_files_and_all_acknowledged_inputs() -> None:
    quorum = Quorum(A, SILENCE_S, 5000)
    following(quorum, B, 5000, mirrored=False)
    following(quorum, C, 10)

    assert quorum.wanted(5000, now=1.0) == {A}
    following(quorum, B, 5000)
    assert quorum.wanted(5000, now=1.0) == {A, B}
    assert quorum.wanted(5000, now=SILENCE_S) == {A}


def test_commits_wait_for_a_standby_that_lacks_little() -> None:
    quorum = Quorum(A, SILENCE_S, 5000)
    following(quorum, B, 4990)

    assert quorum.wanted(5010, now=1.0) == {A}
    assert quorum.through(5010) == 4990
    following(quorum, B, 5000)
    assert quorum.wanted(5010, now=1.0) == {A, B}


def test_an_input_waits_for_the_copies_of_files_that_it_needs() -> None:
    quorum = Quorum(A, SILENCE_S, 0)
    quorum.listed = frozenset({A, B})
    quorum.before.append((7, 1))  # inputs after number 7 need file 1

    following(quorum, B, 9)
    assert quorum.through(9) == 7
    following(quorum, B, 9, files=1)
    assert quorum.through(9) == 9


class Takeovers(RuleBasedStateMachine):
    """Three hosts and a store, whose replies get lost. Hosts crash, fall silent and take over."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = {A: 0, B: 0, C: 0}  # durable inputs of each host
        self.acknowledged = 0
        self.stored, self.version = Record(), 0
        self.clock = 0.0
        self._begin(A)

    def _begin(self, host: str) -> None:
        record = claim(
            Held(record=self.stored, version=self.version, expired=True),
            host, has_inputs=self.inputs[host] > 0, is_first=host == A,
        )  # fmt: skip
        assert isinstance(record, Record)
        self.stored, self.version = record, self.version + 1
        self.active, self.seen = host, self.version
        self.quorum = Quorum(host, SILENCE_S, self.inputs[host])
        self.inputs[host] += 1  # its start

    @rule(count=st.integers(1, 3))
    def the_active_controller_commits(self, count: int) -> None:
        self.inputs[self.active] += count

    @rule(host=st.sampled_from([A, B, C]), most=st.integers(0, 5))
    def a_standby_follows(self, host: str, most: int) -> None:
        if host != self.active:
            there = self.inputs[self.active]
            if self.inputs[host] > there:
                self.inputs[host] = 0  # it copies the journal
            self.inputs[host] = min(there, self.inputs[host] + most)
            if self.inputs[host]:  # else it asks for a copy
                following(self.quorum, host, self.inputs[host], now=self.clock)

    @rule(seconds=st.floats(0.0, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.clock += seconds

    @rule(reaches=st.booleans(), replies=st.booleans())
    def the_record_is_replaced(self, *, reaches: bool, replies: bool) -> None:
        wanted = self.quorum.wanted(self.inputs[self.active], self.clock)
        record = Record(holder=self.active, term=self.stored.term, complete=tuple(sorted(wanted)))
        self.quorum.listed |= wanted
        same = self.seen == self.version
        if reaches and same:
            self.stored, self.version = record, self.version + 1
        if reaches and replies:
            if same:
                self.quorum.listed = wanted
            else:
                self.quorum.listed |= frozenset(self.stored.complete)
            self.seen = self.version

    @rule()
    def inputs_are_acknowledged(self) -> None:
        through = self.quorum.through(self.inputs[self.active])
        self.acknowledged = max(self.acknowledged, through)

    @precondition(lambda self: self.stored.complete)
    @rule(data=st.data())
    def another_host_takes_over(self, data: st.DataObject) -> None:
        self._begin(data.draw(st.sampled_from(self.stored.complete)))

    @invariant()
    def hosts_that_may_claim_the_lease_have_all_acknowledged_inputs(self) -> None:
        for host in self.stored.complete:
            assert self.inputs[host] >= self.acknowledged, (host, self.stored)


TestTakeovers = Takeovers.TestCase
