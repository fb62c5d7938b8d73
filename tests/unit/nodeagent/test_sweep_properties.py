"""Property test of units: each is sent once per connection, and no withdrawn unit is trained."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nodeagent.reconciler import (
    Action,
    Adopted,
    AwaitExit,
    Connected,
    Desired,
    Ended,
    Event,
    KeepStates,
    Kill,
    OrderUnit,
    Reconciler,
    ReportRead,
    Started,
    SweepDesired,
    Terminate,
)
from schemas.ids import Rank, Term, Version, WorkerId
from schemas.wire.agent import UnitEnded, UnitStarted
from schemas.wire.sweeps import StateRef, SweepDelta, UnitOrder
from tests.support.builders import N1, S1, A, assignment, group, run, settle, switch
from tests.support.reconciler_events import BOTH, laid_out, worker
from tests.support.sizes import examples

WORKERS = (worker(A, rank=0), worker(A, rank=1))
PLACES = st.sampled_from([0, 1])
STATES = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


class Agent(RuleBasedStateMachine):
    """One node with two workers of a sweep."""

    def __init__(self) -> None:
        super().__init__()
        self.reconciler = Reconciler(N1)
        self.attempts = 0
        self.revision = 0
        self.ordered: dict[WorkerId, UnitOrder] = {}  # by the newest delta
        self.training: dict[WorkerId, int] = {}  # what a living worker trains
        self.received: dict[WorkerId, list[int]] = {name: [] for name in WORKERS}  # by connection
        self.alive = set(WORKERS)
        self.connected = set(WORKERS)  # others receive nothing
        self.reports = dict.fromkeys(WORKERS, 0)
        self.timed: set[WorkerId] = set()
        self.version = 1
        self.handle(Desired(run(A, on=BOTH)))
        self.handle(laid_out(A))
        for pid, name in enumerate(WORKERS):
            self.handle(Started(name, pid, 7))
        self.handle(Desired(settle(A, on=BOTH)))

    # --- orders

    @rule(place=PLACES)
    def a_unit_is_ordered(self, place: int) -> None:
        name = WORKERS[place]
        if name not in self.ordered and name in self.alive:
            self.attempts += 1
            self.ordered[name] = UnitOrder(
                attempt=self.attempts, worker=name, trial=0, values={}, state=None, sources=(),
                result=StateRef(trial=0, version=1), epoch=1, partition=0, evaluate=False,
            )  # fmt: skip
            self.order()

    @rule(place=PLACES)
    def a_unit_is_withdrawn(self, place: int) -> None:
        if self.ordered.pop(WORKERS[place], None) is not None:
            self.order()

    @rule()
    def the_first_leaves_its_group(self) -> None:
        if self.version == 1:
            self.version = 2
            leaver = group(A, BOTH).members[:1]
            change = {"on": {S1: 64}, "born": [(1, 1)]}
            self.handle(Desired(switch(A, 2, kind="join", former=leaver, **change)))
            self.handle(Desired(settle(A, 2, **change)))

    # --- events

    @rule(place=PLACES)
    def a_unit_ends(self, place: int) -> None:
        name = WORKERS[place]
        attempt = self.training.pop(name, None)
        if attempt is None or name not in self.alive:
            return
        if (unit := self.ordered.get(name)) is not None and unit.attempt == attempt:
            del self.ordered[name]
        ended = {"metrics": {}, "samples": 1, "seconds": 1.0, "scores": {}, "digest": "", "size": 1}
        self.report(name, UnitEnded, attempt, **ended)

    @rule(place=PLACES)
    def a_unit_begins(self, place: int) -> None:
        name = WORKERS[place]
        if name in self.training and name in self.alive:
            self.begin(name)

    @rule(place=PLACES)
    def a_worker_reconnects(self, place: int) -> None:
        name = WORKERS[place]
        if name in self.alive:
            self.connect(name)

    @rule(place=PLACES)
    def a_worker_dies(self, place: int) -> None:
        self.die(WORKERS[place])

    @rule(withdrawn=st.sampled_from([None, 0, 1]))
    def the_agent_restarts(self, withdrawn: int | None) -> None:
        """The new agent finds its workers, reads their reports, and receives all orders again."""
        self.reconciler = Reconciler(N1)
        self.connected.clear()
        self.timed.clear()
        for rank, name in enumerate(WORKERS):
            if name in self.alive:
                self.handle(Adopted(name, assignment(run(A, on=BOTH), rank), rank, 7))
        for name in sorted(self.alive & set(self.training)):
            self.begin(name)
        change = {"on": {S1: 64}, "born": [(1, 1)]}
        first = self.version == 1
        self.handle(Desired(settle(A, on=BOTH) if first else settle(A, 2, **change)))
        if withdrawn is not None:  # meanwhile
            self.ordered.pop(WORKERS[withdrawn], None)
        self.order()
        for name in sorted(self.alive):
            self.connect(name)

    # --- steps

    def begin(self, name: WorkerId) -> None:
        times = {"samples": 1, "waited_s": 0.0, "staged_s": 0.0}
        self.report(name, UnitStarted, self.training[name], **times)

    def connect(self, name: WorkerId) -> None:
        self.received[name].clear()
        self.connected.add(name)
        self.handle(Connected(name))

    def order(self) -> None:
        self.revision += 1
        self.handle(SweepDesired(SweepDelta(
            job=A, term=Term(1), revision=self.revision, attempts=self.attempts,
            units=tuple(self.ordered.values()), wanted=(),
        )))  # fmt: skip

    def report(self, name: WorkerId, kind: type, attempt: int, **fields: object) -> None:
        self.reports[name] += 1
        rank = Rank(WORKERS.index(name))
        self.handle(ReportRead(name, kind(
            job=A, version=Version(1), rank=rank, index=self.reports[name], attempt=attempt, **fields
        )))  # fmt: skip

    def die(self, name: WorkerId) -> None:
        if name in self.alive:
            self.alive.remove(name)
            self.training.pop(name, None)
            self.ordered.pop(name, None)
            self.handle(Ended(name, None, 9, unseen=False))

    def handle(self, event: Event) -> None:
        for action in self.reconciler.handle(event):
            self.perform(action)

    def perform(self, action: Action) -> None:
        match action:
            case OrderUnit(worker=name, unit=unit):
                assert unit == self.ordered[name]
                if name not in self.connected:
                    return
                assert unit.attempt not in self.received[name]
                self.received[name].append(unit.attempt)
                self.training[name] = unit.attempt  # a repeated one is the one that it trains
            case Kill(worker=name) | Terminate(worker=name):
                wanted = self.ordered.get(name)
                trains = self.training.get(name)
                if isinstance(action, Kill):
                    assert trains is not None
                    assert wanted is None or wanted.attempt != trains
                self.die(name)
            case AwaitExit(worker=name):
                assert name not in self.training
                assert name not in self.timed
                self.timed.add(name)
            case KeepStates(delta=delta):
                assert delta.revision == self.revision

    @invariant()
    def no_worker_trains_a_withdrawn_unit(self) -> None:
        for name, attempt in self.training.items():
            assert self.ordered[name].attempt == attempt

    @invariant()
    def every_ordered_unit_is_trained(self) -> None:
        for name, unit in self.ordered.items():
            assert self.training[name] == unit.attempt


TestAgent = Agent.TestCase
TestAgent.settings = STATES
