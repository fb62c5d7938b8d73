"""Whatever happens in whatever order: one owner for each slot, one history, and every job ends.

Groups change their size, members and nodes are lost in every phase of that, controllers and agents
begin anew; and as soon as the world behaves again, everything that was asked for comes about.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from signal import SIGKILL, SIGSEGV, SIGTERM
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from controlplane.core.commands import Command, SendDelta
from controlplane.core.inputs import (
    DrainRequested,
    Input,
    JoinStalled,
    NodeGreeted,
    NodeHeard,
    NodeLost,
    NodeReported,
    NodeSuspected,
    PlanProposed,
    RescaleExpired,
    Straggler,
    UndrainRequested,
)
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import Phase
from controlplane.core.model.node import NodePhase
from controlplane.core.plan_check import check, difference
from controlplane.core.state import PREPARE_LIMIT_S, RETRY_LONGEST_S, START_LIMIT_S
from controlplane.policy.api import ClusterView, JobView, Plan, Reason
from controlplane.policy.baselines.fifo import Fifo
from controlplane.service.api.changes import check_resize
from schemas.errors import BadFieldError
from schemas.ids import (
    JobId,
    NodeId,
    Seconds,
    SlotId,
    WorkerId,
    index_of,
    node_of,
    slot_id,
    worker_id,
)
from schemas.relations import WAITS_TO
from schemas.wire.agent import GroupDelta
from schemas.wire.client import ResizeJob
from tests.support.builders import (
    BATCH,
    N1,
    N2,
    S0,
    S1,
    T0,
    T1,
    cancelled,
    held,
    paused,
    proposal,
    released,
    resized,
    resumed,
    submission,
)
from tests.support.controller import Controller
from tests.support.sizes import examples
from tests.support.world import Groups, Node, haunt

T = TypeVar("T")
EPOCHS = 2
MAX_JOBS = 6
GHOST = JobId("ghost-9")
ENDS: tuple[dict[str, int], ...] = (
    {"code": 0},
    {"code": 3},
    {"signal": SIGKILL},
    {"signal": SIGTERM},
    {"signal": SIGSEGV},
    {},  # nobody saw it
)
NODES = st.sampled_from((N1, N2))
SLOTS = st.sampled_from((S0, S1, T0, T1))
NO_SLOT, NO_NODE = SlotId("n1/7"), SlotId("n9/0")
PLACED = st.dictionaries(
    st.sampled_from((S0, S1, T0, T1, S0, S1, T0, T1, NO_SLOT, NO_NODE)),
    st.sampled_from((BATCH, BATCH // 2, BATCH // 4, 1, 0, BATCH + 1)),
    max_size=4,
)
MANY = 2000  # rounds: enough for everything to come about
ANY = st.integers(0, 9)  # one of what there is, round and round
SIZE = settings(
    max_examples=examples(150),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class Cluster(RuleBasedStateMachine):
    """A controller, two nodes, and links between them that lose, hold back and repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.controller = Controller()
        self.controller.start()
        self.world = Groups()
        self.nodes = {name: Node(name, 2, self.world) for name in (N1, N2)}
        self.linked: set[NodeId] = set()
        self.greetings: dict[NodeId, list[NodeGreeted]] = {N1: [], N2: []}  # under way
        self.orders: dict[NodeId, list[GroupDelta]] = {N1: [], N2: []}  # under way
        self.heard: list[NodeReported] = []
        self.closed: dict[JobId, int] = {}  # versions of jobs that must not start
        self.views: list[ClusterView] = [self.controller.view()]
        self.wake_at: Seconds | None = None
        self.passed_over: set[WorkerId] = set()  # by a greeting that came late
        self.the_links_hold_again()

    @initialize(sizes=st.lists(st.integers(1, 3), max_size=3))
    def jobs_train_already(self, sizes: list[int]) -> None:
        for size in sizes:
            self.submit("a", retries=1, wanted=size)
        self.all_goes_well_for_a_moment(5 if sizes else 0)

    # --- users and policies

    @precondition(lambda self: len(self.controller.names) < MAX_JOBS)
    @rule(
        name=st.sampled_from("ab"),
        key=st.sampled_from(["", "k", "l"]),
        retries=st.integers(0, 2),
        wanted=st.integers(1, 3),
    )
    def a_user_submits(self, name: str, key: str, retries: int, wanted: int) -> None:
        self.submit(name, key=key, retries=retries, wanted=wanted)

    @precondition(lambda self: self.controller.state.active)
    @precondition(lambda self: len(self.controller.names) < MAX_JOBS)
    @rule(which=ANY, condition=st.sampled_from([*WAITS_TO]), wanted=st.integers(1, 3))
    def a_user_submits_a_job_that_waits(self, which: int, condition: str, wanted: int) -> None:
        after = (f"{condition}:{self.one_job(which)}",)
        self.submit("w", retries=0, wanted=wanted, after=after)

    @precondition(lambda self: self.controller.state.active)
    @rule(which=ANY, hold=st.booleans(), rounds=st.integers(0, 4))
    def a_user_holds_or_releases(self, which: int, rounds: int, *, hold: bool) -> None:
        job = self.one_job(which)
        self.take(held(job) if hold else released(job))
        self.all_goes_well_for_a_moment(rounds)

    @invariant()
    def no_job_starts_behind_a_gate(self) -> None:
        for job in self.controller.state.jobs.values():
            if not job.gated or job.ended:
                self.closed.pop(job.job, None)
            elif job.withheld:
                assert self.closed.setdefault(job.job, job.version) == job.version
            else:
                assert job.job not in self.closed  # it had its slots before

    @precondition(lambda self: self.controller.names)
    @rule(which=ANY)
    def a_user_cancels(self, which: int) -> None:
        self.take(cancelled(one_of(self.controller.names, which)))

    @precondition(lambda self: self.controller.state.active)
    @rule(
        which=ANY,
        slots=st.sampled_from([None, 0, 1, 2, 2, 3, 3]),
        batch=st.sampled_from([None, None, None, 16, 128]),
        rounds=st.integers(0, 4),
    )
    def a_user_resizes(self, which: int, slots: int | None, batch: int | None, rounds: int) -> None:
        self.resize(which, ResizeJob(job=self.one_job(which), slots=slots, batch=batch))
        self.all_goes_well_for_a_moment(rounds)

    @precondition(lambda self: self.controller.state.active)
    @rule(which=ANY, on=st.sets(SLOTS, min_size=1, max_size=3), rounds=st.integers(0, 4))
    def a_user_moves(self, which: int, on: set[SlotId], rounds: int) -> None:
        self.resize(which, ResizeJob(job=self.one_job(which), on=tuple(sorted(on))))
        self.all_goes_well_for_a_moment(rounds)

    @precondition(lambda self: self.controller.state.active)
    @rule(which=ANY, rounds=st.integers(0, 4))
    def a_user_pauses(self, which: int, rounds: int) -> None:
        self.take(paused(self.one_job(which)))
        self.all_goes_well_for_a_moment(rounds)

    @precondition(lambda self: self.controller.state.overrides)
    @rule(which=ANY, auto=st.booleans())
    def a_user_resumes(self, which: int, *, auto: bool) -> None:
        self.take(resumed(one_of(list(self.controller.state.overrides), which), auto=auto))

    @rule(age=st.integers(0, 8))
    def a_plan_of_an_older_view_arrives(self, age: int) -> None:
        view = self.views[-1 - min(age, len(self.views) - 1)]
        self.take(PlanProposed(plan=Fifo().plan(view, self.now)))

    @precondition(lambda self: self.controller.state.active)
    @rule(slots=st.lists(SLOTS, min_size=1, max_size=3))
    def a_plan_of_a_strange_policy_arrives(self, slots: list[SlotId]) -> None:
        waiting = self.controller.names
        self.take(
            proposal({job: {slot: BATCH} for job, slot in zip(waiting[-3:], slots, strict=False)})
        )

    @precondition(lambda self: self.controller.state.active)
    @rule(
        order=st.permutations((S0, S1, T0, T1)),
        sizes=st.lists(st.integers(0, 3), min_size=1, max_size=4),
        batch=st.sampled_from((BATCH, BATCH // 2, 1)),
        rounds=st.integers(0, 4),
    )
    def a_policy_deals_all_slots_anew(
        self, order: list[SlotId], sizes: list[int], batch: int, rounds: int
    ) -> None:
        placed: dict[JobId, dict[SlotId, int]] = {}
        for job, size in zip(self.controller.view().jobs, sizes, strict=False):
            placed[job], order = dict.fromkeys(order[:size], batch), order[size:]
        plan = Plan(based_on=self.controller.state.version, local_batch=placed)
        self.follow(difference(plan, self.controller.state, self.now))
        self.all_goes_well_for_a_moment(rounds)

    @precondition(lambda self: any(job.running_on for job in self.views[-1].jobs.values()))
    @rule(which=ANY, placed=PLACED, rounds=st.integers(0, 4))
    def a_plan_moves_one_job(self, which: int, placed: dict[SlotId, int], rounds: int) -> None:
        training = [job for job, view in self.views[-1].jobs.items() if view.running_on]
        plan = {one_of(training, which): placed}
        self.follow(Plan(based_on=self.controller.state.version, local_batch=plan))
        self.all_goes_well_for_a_moment(rounds)

    @precondition(lambda self: len(self.controller.state.jobs_with_processes) > 1)
    @rule(which=ANY, to=ANY, rounds=st.integers(0, 4), late=st.sampled_from((False, False, True)))
    def a_plan_hands_a_slot_over(self, which: int, to: int, rounds: int, *, late: bool) -> None:
        """And if that comes too late, once more, a while after it was given up."""
        placed = self.handed_over(which, to)
        self.follow(Plan(based_on=self.controller.state.version, local_batch=placed))
        if late:
            self.deadlines_are_looked_at(PREPARE_LIMIT_S)
            self.time_passes(RETRY_LONGEST_S)
            self.follow(Plan(based_on=self.controller.state.version, local_batch=placed))
        self.all_goes_well_for_a_moment(rounds)

    @precondition(lambda self: self.controller.names)
    @rule(entries=st.dictionaries(ANY, PLACED, max_size=4), age=st.sampled_from((0, 0, 1, 2, 9)))
    def a_plan_of_a_mad_policy_arrives(
        self, entries: dict[int, dict[SlotId, int]], age: int
    ) -> None:
        names = [*self.controller.names, GHOST]
        placed = {one_of(names, which): slots for which, slots in entries.items()}
        self.follow(Plan(based_on=self.controller.state.version - age, local_batch=placed))

    @precondition(lambda self: self.controller.names)
    @rule(
        rejects=st.sets(ANY, max_size=2),
        promises=st.dictionaries(ANY, st.sampled_from((900.0, 2000.0, 3000.0)), max_size=3),
        entries=st.dictionaries(ANY, PLACED, max_size=2),
    )
    def a_plan_rejects_and_promises(
        self, rejects: set[int], promises: dict[int, float], entries: dict[int, dict[SlotId, int]]
    ) -> None:
        names, jobs = [*self.controller.names, GHOST], self.controller.state.jobs
        first = {name: job.promised_end.first for name, job in jobs.items() if job.promised_end}
        never = {name for name, job in jobs.items() if job.phase is Phase.QUEUED} - first.keys()
        gone = {name for name, job in jobs.items() if job.phase is Phase.REJECTED}
        self.follow(
            Plan(
                based_on=self.controller.state.version,
                local_batch={one_of(names, which): placed for which, placed in entries.items()},
                rejected={one_of(names, which): Reason("no", "no") for which in rejects},
                promised={one_of(names, which): Seconds(end) for which, end in promises.items()},
            )
        )
        rejected = {name for name, job in jobs.items() if job.phase is Phase.REJECTED} - gone
        assert rejected <= never & {one_of(names, which) for which in rejects}
        for name, end in first.items():
            if name not in jobs:
                continue  # it has left the state with this input
            kept = jobs[name].promised_end
            assert kept is not None
            assert kept.first == end

    @rule()
    def the_policy_is_asked(self) -> None:
        self.plan()

    @precondition(lambda self: self.controller.state.active)
    @rule(rounds=st.integers(1, 5), epochs=st.sampled_from([None, EPOCHS]))
    def all_goes_well_for_a_moment(self, rounds: int, epochs: int | None = None) -> None:
        for _ in range(rounds):
            self.plan_if_asked()
            self.nodes_go_on(epochs)

    @precondition(lambda self: len(self.controller.names) < MAX_JOBS)
    @rule(retries=st.integers(0, 2), wanted=st.integers(1, 3), rounds=st.integers(1, 5))
    def a_job_arrives_and_all_goes_well(self, retries: int, wanted: int, rounds: int) -> None:
        self.submit("c", retries=retries, wanted=wanted)
        self.all_goes_well_for_a_moment(rounds)

    @precondition(lambda self: len(self.linked) < len(self.nodes))
    @rule()
    def the_links_hold_again(self) -> None:
        for name in self.nodes.keys() - self.linked:
            self.greeted(self.nodes[name].hello())

    # --- time and silence

    @rule(seconds=st.sampled_from([0.5, 2.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.controller.now += seconds

    @precondition(lambda self: self.controller.state.jobs_with_processes)
    @rule(passed=st.sampled_from([0.0, 0.0, 0.0, 2.0, 600.0, START_LIMIT_S]))
    def deadlines_are_looked_at(self, passed: float) -> None:
        self.controller.now += passed
        for event in self.controller.reactor.due(self.now):
            self.take(event)

    @precondition(lambda self: self.changing())
    @rule(which=ANY, ranks=st.sets(st.integers(0, 3)), late=st.booleans(), rounds=st.integers(0, 4))
    def telemetry_names_stragglers(
        self, which: int, ranks: set[int], rounds: int, *, late: bool
    ) -> None:
        """Which may be any members, at any time."""
        job = one_of(self.changing(), which)
        assert job.change is not None
        stragglers = tuple(
            Straggler(worker=member.worker, rank=member.rank, idle_s=60.0, answers=False)
            for member in job.members()
            if member.rank in ranks
        )
        kind = RescaleExpired if late else JoinStalled
        self.take(kind(job=job.job, version=job.change.group.version, stragglers=stragglers))
        self.all_goes_well_for_a_moment(rounds)

    @precondition(lambda self: self.linked)
    @rule(node=NODES, keeps=st.booleans())
    def a_link_breaks(self, node: NodeId, *, keeps: bool) -> None:
        self.linked.discard(node)
        if not keeps:
            self.orders[node].clear()
            self.greetings[node].clear()

    @precondition(lambda self: len(self.linked) < len(self.nodes))
    @rule(node=NODES, lost=st.booleans())
    def a_node_is_silent(self, node: NodeId, *, lost: bool) -> None:
        phase = self.phase_of(node)
        if node in self.linked or phase in {None, NodePhase.LOST}:
            return
        if lost:
            self.take(NodeLost(node=node, silent_s=30.0))
        elif phase is not NodePhase.SUSPECT:
            self.take(NodeSuspected(node=node, silent_s=6.0))

    @precondition(lambda self: self.linked)
    @rule(node=NODES)
    def a_suspect_node_is_heard(self, node: NodeId) -> None:
        if node in self.linked and self.phase_of(node) is NodePhase.SUSPECT:
            self.take(NodeHeard(node=node))

    @rule(node=NODES)
    def a_linked_node_is_suspected(self, node: NodeId) -> None:
        if node in self.linked and self.phase_of(node) is NodePhase.UP:
            self.take(NodeSuspected(node=node, silent_s=6.0))

    @rule(node=NODES, within_s=st.sampled_from((None, 0.0, 100.0)), back=st.booleans())
    def an_operator_drains_a_node(
        self, node: NodeId, within_s: float | None, *, back: bool
    ) -> None:
        if back:
            self.take(UndrainRequested(node=node, user="ann"))
        else:
            self.take(DrainRequested(node=node, user="ann", reason="", within_s=within_s))

    # --- what travels

    @rule(node=NODES)
    def an_agent_greets(self, node: NodeId) -> None:
        self.greetings[node].append(self.nodes[node].hello())

    @precondition(lambda self: any(self.greetings.values()))
    @rule(node=NODES)
    def a_greeting_arrives(self, node: NodeId) -> None:
        if self.greetings[node]:
            self.greeted(self.greetings[node].pop(0))

    @precondition(lambda self: any(self.orders.values()))
    @rule(node=NODES, count=st.integers(1, 4))
    def orders_arrive(self, node: NodeId, count: int) -> None:
        self.deliver_orders(node, count)

    @precondition(lambda self: any(node.session.spool for node in self.nodes.values()))
    @rule(node=NODES, count=st.integers(1, 6))
    def events_arrive(self, node: NodeId, count: int) -> None:
        if node in self.linked:
            self.deliver_events(node, count)

    @precondition(lambda self: self.heard)
    @rule(which=st.integers(0, 999))
    def an_old_event_arrives_again(self, which: int) -> None:
        before = len(self.controller.view().jobs)
        state = self.controller.state
        due = bool(
            state.overrides or state.swaps or state.draining
        )  # may do something at any input
        assert self.take(one_of(self.heard, which)) == [] or due
        assert len(self.controller.view().jobs) == before

    # --- what happens on nodes

    @precondition(lambda self: any(node.work for node in self.nodes.values()))
    @rule(node=NODES, which=ANY, well=st.sampled_from([True, True, True, False]))
    def an_agent_finishes_something(self, node: NodeId, which: int, *, well: bool) -> None:
        if self.nodes[node].work:
            self.nodes[node].finish(one_of(self.nodes[node].work, which), well=well)

    @precondition(lambda self: any(node.processes for node in self.nodes.values()))
    @rule(node=NODES, which=ANY, steps=st.integers(1, 4))
    def a_worker_goes_on(self, node: NodeId, which: int, steps: int) -> None:
        for _ in range(steps):
            if worker := self.worker_on(node, which):
                self.nodes[node].processes[worker].act(EPOCHS)
                self.nodes[node].look(worker)

    @precondition(lambda self: any(node.processes for node in self.nodes.values()))
    @rule(node=NODES, which=ANY)
    def a_worker_cannot_join(self, node: NodeId, which: int) -> None:
        if worker := self.worker_on(node, which):
            self.nodes[node].processes[worker].fail_to_join()

    @precondition(lambda self: any(node.processes for node in self.nodes.values()))
    @rule(which=ANY, end=st.sampled_from(ENDS), seen=st.booleans(), rounds=st.integers(0, 4))
    def a_worker_dies(self, which: int, end: dict[str, int], *, seen: bool, rounds: int) -> None:
        for node in self.nodes.values():
            if node.living():
                worker = one_of(node.living(), which)
                node.processes[worker].die(**end)
                if seen:
                    node.look(worker)
                    self.all_goes_well_for_a_moment(rounds)
                return

    @precondition(lambda self: any(node.processes for node in self.nodes.values()))
    @rule(node=NODES, which=ANY)
    def an_agent_looks(self, node: NodeId, which: int) -> None:
        if self.nodes[node].processes:
            self.nodes[node].look(one_of(list(self.nodes[node].processes), which))

    @rule(node=NODES, reboots=st.booleans())
    def an_agent_begins_anew(self, node: NodeId, *, reboots: bool) -> None:
        self.a_link_breaks(node, keeps=False)
        if reboots:
            self.nodes[node].reboot()
        else:
            self.nodes[node].restart()

    @rule()
    def a_new_controller_takes_over(self) -> None:
        for node in self.nodes:
            self.a_link_breaks(node, keeps=False)
        self.controller.start()

    # --- what holds

    @invariant()
    def no_device_has_two_processes(self) -> None:
        for node in self.nodes.values():
            for slot in range(node.slots):
                assert len(node.granted(slot)) <= 1, node.granted(slot)

    @invariant()
    def no_slot_is_given_away_while_a_process_may_live_on_it(self) -> None:
        usable = {slot.slot for slot in self.controller.view().slots if slot.usable}
        for name, node in self.nodes.items():
            for worker in node.living():
                slot = slot_id(name, node.processes[worker].assignment.slot)
                assert slot not in usable or worker in self.passed_over, worker

    @invariant()
    def what_the_view_offers_a_plan_may_take(self) -> None:
        view, state = self.controller.view(), self.controller.state
        usable = [slot.slot for slot in view.slots if slot.usable]
        for job in view.jobs.values():
            if not job.movable:
                continue
            for placed in wishes(job, usable, self.now):
                plan = Plan(based_on=view.version, local_batch={job.job: placed})
                verdict = check(plan, state, self.now)
                moves = {move.job: move.local_batch for move in verdict.moves}
                assert (moves, verdict.refused) == ({job.job: placed}, {})

    @invariant()
    def every_decision_but_the_one_under_way_has_its_outcome(self) -> None:
        for job in self.controller.state.jobs.values():
            under_way = job.phase in {Phase.STARTING, Phase.RESCALING}
            decisions = self.controller.history_of(job.job).decisions
            decisions = [decision for decision in decisions if decision.version]
            versions = [decision.version for decision in decisions]
            open_ = [decision.version for decision in decisions if not decision.outcome]
            assert versions == sorted(set(versions))
            assert open_ == versions[-1:] * under_way, (job.phase, decisions)
            for decision in decisions:
                assert decision.to.batch <= job.spec.batch_limit or decision.by == "operator"

    def teardown(self) -> None:
        for job in list(self.controller.state.active):
            self.take(released(job))
        self.everything_gets_well(epochs=None)
        for job in self.controller.state.active:
            self.is_where_it_should_be(self.controller.job(job))
        self.every_slot_that_is_owned_has_a_process()
        assert self.controller.state.swaps == []
        self.everything_gets_well(EPOCHS)
        for job in list(self.controller.state.overrides):
            self.take(resumed(job, auto=True))
        self.everything_gets_well(EPOCHS)
        unfinished = {
            job: self.controller.history_of(job).changes[-1:]
            for job in self.controller.state.active
        }
        assert unfinished == {}
        assert self.controller.state.jobs_with_processes == {}
        assert self.controller.replayed() == self.controller.state

    def is_where_it_should_be(self, job: Job) -> None:
        """Nothing goes on any more, so nothing is under way: what was asked for is there."""
        changes = self.controller.history_of(job.job).changes
        story = [change.reason for change in changes[-6:]], job.change, job.workers
        assert job.phase not in {Phase.STARTING, Phase.RESCALING}, story
        override = job.override
        if override is None or job.override_wait_reason:
            return
        if override.paused:
            assert job.phase in {Phase.PAUSED, Phase.QUEUED}, story
            return
        assert job.phase is Phase.RUNNING, story
        assert job.group is not None
        slots = [member.slot for member in job.group.members]
        assert override.slots in {None, len(slots)} or override.on, (override, story)
        assert not override.on or set(override.on) == set(slots), (override, story)
        assert override.batch in {None, job.group.global_batch}, (override, story)

    def every_slot_that_is_owned_has_a_process(self) -> None:
        living = {
            slot_id(name, node.processes[worker].assignment.slot)
            for name, node in self.nodes.items()
            for worker in node.living()
        }
        owners, claims = (
            self.controller.state.slot_index.owners(),
            self.controller.state.slot_index.reservations(),
        )
        assert set(owners) == living
        assert claims == {}

    def everything_gets_well(self, epochs: int | None) -> None:
        """Links hold, starts succeed, workers finish; plans are made when they are asked for."""
        for name, node in self.nodes.items():
            self.a_link_breaks(name, keeps=False)
            self.greeted(node.hello())
            self.take(UndrainRequested(node=name, user="ann"))
        for _ in range(MANY):
            went_on = self.plan_if_asked() or self.nodes_go_on(epochs) or self.joins_time_out()
            if not went_on and not self.plan_in_time() and not self.an_override_is_due():
                return
        story = {
            job: self.controller.history_of(job).changes[-8:]
            for job in self.controller.state.active
        }
        raise AssertionError(story)

    def nodes_go_on(self, epochs: int | None) -> bool:
        gone_on = False
        for name in sorted(self.linked):
            node = self.nodes[name]
            gone_on |= self.deliver_orders(name, 999)
            gone_on |= node.go_on(epochs)
            gone_on |= self.deliver_events(name, 999)
        return gone_on

    def joins_time_out(self) -> bool:
        """Nothing else goes on, and so the library's limit for meeting the others is over."""
        waits = [
            process
            for node in self.nodes.values()
            for process in node.processes.values()
            if process.waits_in_vain()
        ]
        for process in waits:
            process.fail_to_join()
        return bool(waits)

    def plan_if_asked(self) -> bool:
        return self.controller.asked and self.plan()

    def plan_in_time(self) -> bool:
        if self.wake_at is None:
            return False
        self.controller.now = max(self.controller.now, self.wake_at)
        return self.plan()

    def an_override_is_due(self) -> bool:
        due = [
            job.attempts.next_change_at
            for job in map(self.controller.job, self.controller.state.overrides)
        ]
        later = [at for at in due if at > 0]
        if not later:
            return False
        self.controller.now = max(self.controller.now, *later)
        for event in self.controller.reactor.due(self.now):
            self.take(event)
        return True

    # --- steps

    def changing(self) -> list[Job]:
        jobs = self.controller.state.jobs
        return [jobs[name] for name in self.controller.names if jobs[name].change is not None]

    def handed_over(self, which: int, to: int) -> dict[JobId, dict[SlotId, int]]:
        """What trains, with one slot of one job given to another; nothing if none has two."""
        jobs = self.controller.view().jobs.values()
        training = {job.job: dict(job.running_on) for job in jobs if job.running_on and job.movable}
        givers = [job for job, on in training.items() if len(on) > 1]
        if not givers or len(training) == 1:
            return {}
        giver = one_of(givers, which)
        taker = one_of([job for job in training if job != giver], to)
        slot, batch = training[giver].popitem()
        training[taker][slot] = batch
        return training

    def submit(
        self, name: str, *, key: str = "", retries: int, wanted: int, after: tuple[str, ...] = ()
    ) -> None:
        spec: dict[str, Any] = {
            "slots": (1, 3),
            "slots_wanted": wanted,
            "max_batch_size": 4 * BATCH,
            **({"after": after} if after else {}),
        }
        self.take(submission(name, key=key, retries=retries, **spec))

    def one_job(self, which: int) -> JobId:
        return one_of(list(self.controller.state.active), which)

    def resize(self, which: int, request: ResizeJob) -> None:
        """Ask for it if the service would let it through."""
        job = self.controller.job(request.job)
        try:
            check_resize(self.controller.state, job, request)
        except BadFieldError:
            return
        self.take(resized(job.job, request.slots, batch=request.batch, on=request.on))

    @property
    def now(self) -> Seconds:
        return Seconds(self.controller.now)

    def take(self, event: Input) -> list[Command]:
        commands = self.controller.take(event)
        for command in commands:
            if isinstance(command, SendDelta) and command.node in self.linked:
                self.orders[command.node].append(command.delta)
        self.views.append(self.controller.view())
        return commands

    def plan(self) -> bool:
        """Ask the policy about the present, as the service does."""
        plan: Plan = Fifo().plan(self.controller.view(), self.now)
        self.controller.asked, self.wake_at = False, plan.wake_at
        verdict = check(plan, self.controller.state, self.now)
        assert not verdict.refused, "what fits the view fits the state"
        changed = difference(plan, self.controller.state, self.now)
        assert all(changed.local_batch.values()), "it pauses nobody"
        if changed.local_batch:
            self.take(PlanProposed(plan=changed))
        return bool(changed.local_batch)

    def follow(self, plan: Plan) -> None:
        """Propose `plan`; it orders something only of jobs that it names and that it knew of."""
        jobs = [self.controller.job(name) for name in self.controller.names]
        overridden = dict(self.controller.state.overrides)
        trading = {name for swap in self.controller.state.swaps for name in swap.targets}
        on = self.controller.state.slot_index.jobs_on
        drained = {job.job for node in self.controller.state.draining for job in on(node)}
        before = {job.job: job.version for job in jobs}
        known = {job.job for job in jobs if job.changed_version <= plan.based_on}
        rejected, children = list(plan.rejected), dict(self.controller.state.children)
        for name in rejected:  # and jobs that wait for them in vain
            rejected += children.get(name, {})

        self.take(PlanProposed(plan=plan))

        ordered = {job.job for job in jobs if job.version != before[job.job]}
        ordered -= overridden.keys() | trading | drained
        assert ordered <= (plan.local_batch.keys() & known) | set(rejected)

    def greeted(self, greeting: NodeGreeted) -> None:
        named = {worker_id(seen.job, seen.version, seen.rank) for seen in greeting.workers}
        self.passed_over.update(set(self.nodes[greeting.node].living()) - named)
        self.linked.add(greeting.node)
        self.take(greeting)
        known = self.controller.state.nodes[greeting.node]
        self.nodes[greeting.node].welcome(self.controller.state.term, known.committed)

    def deliver_orders(self, node: NodeId, count: int) -> bool:
        arrived, self.orders[node] = self.orders[node][:count], self.orders[node][count:]
        for delta in arrived:
            self.nodes[node].receive(delta)
        return bool(arrived)

    def deliver_events(self, node: NodeId, count: int) -> bool:
        known = self.controller.state.nodes[node]
        after = known.committed if known.boot == self.nodes[node].boot else 0
        arrived = self.nodes[node].said_after(after)[:count]
        for event in arrived:
            self.take(event)
            self.heard.append(event)
        return bool(arrived)

    def phase_of(self, node: NodeId) -> NodePhase | None:
        known = self.controller.state.nodes.get(node)
        return known.phase if known else None

    def worker_on(self, node: NodeId, which: int) -> WorkerId | None:
        living = self.nodes[node].living()
        return one_of(living, which) if living else None


class HauntedCluster(Cluster):
    """The same, with a worker of a job that the controller does not know."""

    @initialize(slots=st.sets(SLOTS, min_size=1))
    def workers_of_an_unknown_job_run(self, slots: set[SlotId]) -> None:
        empty = [slot for slot in slots if not self.nodes[node_of(slot)].living(index_of(slot))]
        for version, slot in enumerate(sorted(empty), start=1):
            self.a_link_breaks(node_of(slot), keeps=False)
            haunt(self.nodes[node_of(slot)], GHOST, version, slot)
        self.the_links_hold_again()


def wishes(job: JobView, usable: list[SlotId], now: Seconds) -> Iterator[dict[SlotId, int]]:
    """What a plan may ask for `job`, as it is in a view, if nothing but the view is known."""
    now_on = dict(job.running_on)
    if now_on and job.retry_at > now:
        return
    if now_on:
        yield {}
        if job.least < len(now_on) <= job.most + 1:  # on its way it may be larger than it may be
            yield {slot: min(now_on[slot], job.local_limit) for slot in [*now_on][:-1]}
        if len(now_on) <= job.most and max(now_on.values()) > 1:
            yield dict.fromkeys(now_on, 1)
    if (now_on or job.ready_at <= now) and usable and len(now_on) < job.most:
        yield dict.fromkeys([*now_on, usable[0]], 1)


def one_of(choices: Sequence[T], which: int) -> T:
    return choices[which % len(choices)]


def test_whatever_happens_slots_have_one_owner_history_is_whole_and_every_job_ends() -> None:
    run_state_machine_as_test(Cluster, settings=SIZE)


@pytest.mark.slow
def test_the_same_beside_a_worker_of_an_unknown_job() -> None:
    run_state_machine_as_test(HauntedCluster, settings=SIZE)
