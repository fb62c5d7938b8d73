"""Property test of the reconciler: in any order of events, each device has one owner."""

from __future__ import annotations

from collections.abc import Sequence
from signal import SIGKILL
from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nodeagent.reconciler import FetchWorkspace, StartWorker
from schemas.ids import JobId, SlotId, WorkerId, node_of, worker_id
from schemas.nodes import Member
from schemas.session import key_of
from schemas.wire.agent import (
    JOIN,
    PREPARE,
    SETTLED,
    START,
    SUSPEND,
    SWITCH,
    GroupDelta,
    ScriptReport,
    WorkerExited,
    WorkerRefused,
    WorkerStarted,
)
from tests.support.builders import N1, S0, S1, T0, A, B, C, run, settle, stop, switch
from tests.support.sizes import examples
from tests.support.world import Node

T = TypeVar("T")
ANY = st.integers(0, 9)
SLOTS = st.sampled_from([S0, S1, T0])
JOBS = st.sampled_from([A, B, C])
EPOCHS = 3
SIZE = settings(
    max_examples=examples(200),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class Agent(RuleBasedStateMachine):
    """One node with two slots that receives orders."""

    def __init__(self) -> None:
        super().__init__()
        self.node = Node(N1, slots=2)
        self.newest: dict[JobId, GroupDelta] = {}
        self.trained: dict[JobId, GroupDelta] = {}  # restored if a change is withdrawn
        self.ordered_last: set[WorkerId] = set()  # born with the newest order of their job
        self.under_way: list[GroupDelta] = []
        self.arrived: list[GroupDelta] = []

    # --- orders: only newer ones are made, and no slot is promised to more than one beside its owner

    @rule(
        job=JOBS,
        on=st.sampled_from([S0, S1, S0, S1, T0, None]),
        snapshot=st.sampled_from(["5", "6"]),
    )
    def a_new_version_is_ordered(self, job: JobId, on: SlotId | None, snapshot: str) -> None:
        version = self.newest[job].version + 1 if job in self.newest else 1
        if on is None or on in self.promised(but=job):
            self.order(stop(job, version))
        else:
            self.order(run(job, version, on=on, snapshot=snapshot))

    @rule(job=JOBS, add=SLOTS)
    def a_group_grows(self, job: JobId, add: SlotId) -> None:
        settled = self.settled(job)
        if settled is None or add in self.promised(but=job) or add in slots_of(settled):
            return
        version = settled.version + 1
        on = {**shares(settled), add: 16}
        born = [*births(settled), (version, len(on) - 1)]
        self.order(run(job, version, on=on, born=born, kind=JOIN, snapshot=settled.snapshot))

    @rule(job=JOBS, leaving=ANY, suspends=st.booleans())
    def a_group_shrinks(self, job: JobId, leaving: int, *, suspends: bool) -> None:
        settled = self.settled(job)
        if settled is None or settled.group is None:
            return
        who = one_of(settled.group.members, leaving)
        stay = [m for m in settled.group.members if m is not who and not suspends]
        former = tuple(m for m in settled.group.members if m not in stay)
        on = {member.slot: 16 for member in stay}
        born = [
            birth
            for birth, m in zip(births(settled), settled.group.members, strict=True)
            if m in stay
        ]
        kind = JOIN if stay else SUSPEND
        changes = {"kind": kind, "former": former, "snapshot": settled.snapshot}
        self.order(switch(job, settled.version + 1, on=on, born=born, **changes))

    @rule(job=JOBS, gives_up=st.sampled_from([False, False, True]))
    def the_next_stage_is_ordered(self, job: JobId, *, gives_up: bool = False) -> None:
        delta = self.newest.get(job)
        if delta is None or delta.group is None or delta.stage >= SETTLED:
            return
        began = all(
            member.worker in self.node.world.processes
            for member in members_of(delta)
            if node_of(member.slot) == N1
        )
        changes = {"on": shares(delta), "born": births(delta), "snapshot": delta.snapshot}
        before = self.trained.get(job)
        if gives_up and before is not None and delta.kind != START:
            kept = {"on": shares(before), "born": births(before), "snapshot": before.snapshot}
            self.order(settle(job, delta.version, of=before.version, **kept))
        elif not began and (delta.kind != START or delta.stage == SWITCH):
            return  # nobody switches before all are ready
        elif delta.stage == PREPARE:
            self.order(switch(job, delta.version, kind=delta.kind, former=delta.former, **changes))
        elif delta.group.members:
            self.order(settle(job, delta.version, **changes))
        else:
            self.order(stop(job, delta.version))

    @rule(job=JOBS)
    def a_job_ends(self, job: JobId) -> None:
        if job in self.newest and not self.newest[job].forget:
            self.order(stop(job, self.newest[job].version + 1, forget=True))

    @precondition(lambda self: self.under_way)
    @rule(count=st.integers(1, 3))
    def orders_arrive(self, count: int) -> None:
        for _ in range(min(count, len(self.under_way))):
            self.arrived.append(self.under_way.pop(0))
            self.node.receive(self.arrived[-1])

    @precondition(lambda self: self.arrived)
    @rule(which=ANY)
    def an_older_order_arrives_again(self, which: int) -> None:
        again = one_of(self.arrived, which)
        if key_of(again) in self.node.session.held:
            self.node.receive(again)

    # --- processes

    @precondition(lambda self: self.node.work)
    @rule(which=ANY, well=st.sampled_from([True, True, False]))
    def work_finishes(self, which: int, *, well: bool) -> None:
        self.node.finish(one_of(self.node.work, which), well=well)

    @precondition(lambda self: self.node.work)
    @rule()
    def all_starts_fail(self) -> None:
        for work in [work for work in self.node.work if isinstance(work, StartWorker)]:
            self.node.finish(work, well=False)

    @precondition(lambda self: self.node.living())
    @rule(which=ANY, steps=st.integers(1, 4))
    def a_worker_acts(self, which: int, steps: int) -> None:
        worker = one_of(self.node.living(), which)
        for _ in range(steps):
            if self.node.processes[worker].alive:
                self.node.processes[worker].act(EPOCHS)

    @precondition(lambda self: self.node.living())
    @rule(which=ANY, code=st.sampled_from([0, 1, None]))
    def a_worker_dies(self, which: int, code: int | None) -> None:
        worker = one_of(self.node.living(), which)
        self.node.processes[worker].die(code, None if code is not None else SIGKILL)

    @precondition(lambda self: self.node.processes)
    @rule(which=ANY)
    def the_agent_checks_a_process(self, which: int) -> None:
        self.node.look(one_of(list(self.node.processes), which))

    @rule()
    def the_agent_restarts(self) -> None:
        self.reports_are_published_once_in_order_and_exits_last()
        self.node.restart()
        self.arrived.clear()
        self.under_way = list(self.newest.values())

    @rule(rounds=st.integers(1, 4), acts=st.integers(0, 2))
    def everything_succeeds(self, rounds: int, acts: int) -> None:
        for _ in range(rounds):
            self.orders_arrive(len(self.under_way))
            self.finish_all_work()
            for worker in self.node.living():
                for _ in range(acts):
                    if self.node.processes[worker].alive:
                        self.node.processes[worker].act(EPOCHS)

    @rule(job=JOBS, on=st.sampled_from([S0, S1]), rounds=st.integers(0, 3), switches=st.booleans())
    def a_job_is_run(self, job: JobId, on: SlotId, rounds: int, *, switches: bool) -> None:
        self.a_new_version_is_ordered(job, on, "5")
        if switches:
            self.the_next_stage_is_ordered(job)
        self.orders_arrive(len(self.under_way))
        self.everything_succeeds(rounds, acts=2 * switches)

    @rule(
        job=JOBS, on=st.sampled_from([S0, S1]), starts=st.sampled_from(["well", "badly", "not yet"])
    )
    def a_slot_goes_to_another_job(self, job: JobId, on: SlotId, starts: str) -> None:
        for holder, delta in list(self.newest.items()):
            if delta.group and on in {member.slot for member in delta.group.members}:
                self.order(stop(holder, delta.version + 1))
        self.a_new_version_is_ordered(job, on, "5")
        self.orders_arrive(len(self.under_way))
        for work in [work for work in self.node.work if isinstance(work, FetchWorkspace)]:
            self.node.finish(work)
        for start in [work for work in self.node.work if isinstance(work, StartWorker)]:
            if starts != "not yet":
                self.node.finish(start, well=starts == "well")

    # --- invariants

    @invariant()
    def no_device_has_two_processes(self) -> None:
        for slot in range(self.node.slots):
            assert len(self.node.granted(slot)) <= 1, self.node.granted(slot)

    def reports_are_published_once_in_order_and_exits_last(self) -> None:
        said: dict[WorkerId, list[int]] = {}
        exited = set()
        for numbered in self.node.session.spool:
            event = numbered.event
            if isinstance(event, ScriptReport | WorkerStarted | WorkerExited | WorkerRefused):
                worker = worker_id(event.job, event.version, event.rank)
                assert worker not in exited, f"{worker} said {event} after its end"
                if isinstance(event, ScriptReport):
                    said.setdefault(worker, []).append(event.index)
                if isinstance(event, WorkerExited | WorkerRefused):
                    exited.add(worker)
        for worker, indices in said.items():
            assert indices == list(range(1, len(indices) + 1)), worker

    def teardown(self) -> None:
        """When all work is finished, exactly the wanted workers live, or are reported as ended."""
        self.orders_arrive(len(self.under_way))
        while self.finish_all_work():
            pass
        self.reports_are_published_once_in_order_and_exits_last()
        ended = {
            worker_id(e.job, e.version, e.rank)
            for e in (numbered.event for numbered in self.node.session.spool)
            if isinstance(e, WorkerExited | WorkerRefused)
        }
        wanted = {
            member.worker
            for delta in self.newest.values()
            for member in (*(delta.group.members if delta.group else ()), *delta.former)
            if node_of(member.slot) == N1
        }
        # One whose order was overtaken by one that counts on it was never started.
        assert set(self.node.living()) == (wanted - ended) & self.node.processes.keys()
        born = {name for name in wanted - ended if name in self.ordered_last}
        assert born <= set(self.node.living())
        for slot in range(self.node.slots):
            assert bool(self.node.granted(slot)) == bool(self.node.living(slot))
        assert set(self.node.processes) <= wanted, "folders of others are gone"
        forgotten = {job for job, delta in self.newest.items() if delta.forget}
        assert set(self.node.reconciler.jobs) == self.newest.keys() - forgotten

    def finish_all_work(self) -> bool:
        busy = bool(self.node.work)
        for work in list(self.node.work):
            self.node.finish(work)
        for worker in list(self.node.processes):
            before = len(self.node.session.spool)
            self.node.look(worker)
            busy |= len(self.node.session.spool) > before
        return busy

    # --- steps

    def order(self, delta: GroupDelta) -> None:
        before = self.newest.get(delta.job)
        if before is not None and before.stage >= SETTLED and before.group is not None:
            self.trained[delta.job] = before
        self.newest[delta.job] = delta
        version = delta.version
        members = delta.group.members if delta.group else ()
        new = {m.worker for m in members if m.worker == worker_id(delta.job, version, m.rank)}
        self.ordered_last = {
            name for name in self.ordered_last if not name.startswith(f"{delta.job}.")
        } | new
        self.under_way.append(delta)

    def promised(self, but: JobId) -> set[SlotId]:
        return {
            member.slot
            for delta in self.newest.values()
            if delta.group and delta.job != but
            for member in delta.group.members
        }

    def settled(self, job: JobId) -> GroupDelta | None:
        """The order that made a group train which does not change at the moment."""
        delta = self.newest.get(job)
        return delta if delta and delta.group and delta.stage >= SETTLED else None


def slots_of(delta: GroupDelta) -> list[SlotId]:
    return list(shares(delta))


def shares(delta: GroupDelta) -> dict[SlotId, int]:
    return {member.slot: member.local_batch for member in members_of(delta)}


def births(delta: GroupDelta) -> list[tuple[int, int]]:
    """The version and rank that each member was born with, as its name says."""
    names = [member.worker.rpartition(".v")[2].split(".r") for member in members_of(delta)]
    return [(int(version), int(rank)) for version, rank in names]


def members_of(delta: GroupDelta) -> tuple[Member, ...]:
    return delta.group.members if delta.group else ()


def one_of(choices: Sequence[T], which: int) -> T:
    return choices[which % len(choices)]


def test_exactly_the_wanted_workers_live_and_one_on_each_slot() -> None:
    run_state_machine_as_test(Agent, settings=SIZE)
