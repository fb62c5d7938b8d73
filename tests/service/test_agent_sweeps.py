"""Real agents with real workers of a sweep: states hop between nodes, over deaths of everybody."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from schemas.host.state_files import find_state
from schemas.ids import JobId, NodeId, Rank, SlotId, Term, Version, WorkerId, worker_id
from schemas.nodes import Group, Member
from schemas.wire.agent import (
    SETTLED,
    START,
    SWITCH,
    GroupDelta,
    GroupFormed,
    SweepWorkerReady,
    UnitEnded,
    UnitStarted,
    WorkerExited,
    WorkerStarted,
)
from schemas.wire.sweeps import (
    StateCopied,
    StateRef,
    StateSource,
    SweepDelta,
    UnitOrder,
    WantedState,
)
from tests.service.scripted_controller import SNAPSHOT, Node, ScriptedController
from tests.training.sweep_crew import FUNCTIONS, VALUES, alone, job_spec, sweep_spec

JOB = JobId("search-1")
VISITS = [(1, 2), (1, 0), (1, 3), (1, 1), (2, 0)]
FIRST, SECOND, THIRD = (worker_id(JOB, Version(1), Rank(rank)) for rank in range(3))
SLOTS = {FIRST: SlotId("n1/0"), SECOND: SlotId("n1/1"), THIRD: SlotId("n2/0")}


@dataclass
class Site:
    """Two nodes, a sweep's workers on both, and what a controller would order."""

    controller: ScriptedController
    near: Node
    far: Node
    attempts: int = 0
    revision: int = 0
    units: dict[WorkerId, UnitOrder] = field(default_factory=dict)
    wanted: dict[NodeId, tuple[WantedState, ...]] = field(default_factory=dict)

    def node_of(self, worker: WorkerId) -> Node:
        return self.far if worker == THIRD else self.near

    async def start(self) -> None:
        """All three workers, in their group."""
        group = Group(
            version=Version(1),
            members=tuple(
                Member(rank=Rank(rank), slot=slot, local_batch=8, worker=worker)
                for rank, (worker, slot) in enumerate(SLOTS.items())
            ),
            lr=None,
        )
        for stage, kind in ((1, SweepWorkerReady), (SWITCH, GroupFormed), (SETTLED, GroupFormed)):
            for node in (self.near, self.far):
                delta = GroupDelta(
                    job=JOB, term=Term(1), version=Version(1), stage=stage, group=group,
                    spec=job_spec(sweep_spec()), snapshot=SNAPSHOT, kind=START,
                )  # fmt: skip
                self.controller.order(node, delta)
            for worker in SLOTS:
                await self.heard(worker, kind)

    async def heard(self, worker: WorkerId, kind: type, attempt: int | None = None) -> object:
        rank = int(worker.rpartition(".r")[2])
        return await self.controller.heard(
            self.node_of(worker),
            kind,
            lambda one: one.rank == rank and attempt in {None, getattr(one, "attempt", None)},
        )

    async def address(self, worker: WorkerId) -> str:
        opened = await self.heard(worker, SweepWorkerReady)
        assert isinstance(opened, SweepWorkerReady)
        return opened.address

    def served(self, node: Node) -> str:
        assert node.hello is not None
        return f"127.0.0.1:{node.hello.spec.states_port}"

    def order(self, node: Node) -> None:
        """What is wanted there now."""
        self.revision += 1
        mine = [unit for worker, unit in self.units.items() if self.node_of(worker) is node]
        delta = SweepDelta(
            job=JOB, term=Term(1), revision=self.revision, attempts=self.attempts,
            units=tuple(mine), wanted=self.wanted.get(node.node, ()),
        )  # fmt: skip
        self.controller.order(node, delta)

    def unit(self, worker: WorkerId, version: int, before: UnitEnded | None, *at: str) -> int:
        """Order the visit that leads to a version; returns its attempt."""
        self.attempts += 1
        epoch, partition = VISITS[version - 1]
        self.units[worker] = UnitOrder(
            attempt=self.attempts,
            worker=worker,
            trial=0,
            values=VALUES,
            state=state_of(before, version - 1) if before else None,
            sources=tuple(StateSource(node=NodeId("n"), address=one) for one in at),
            result=StateRef(trial=0, version=version),
            epoch=epoch,
            partition=partition,
            evaluate=False,
        )
        self.order(self.node_of(worker))
        return self.attempts

    async def ended(self, worker: WorkerId, attempt: int) -> UnitEnded:
        report = await self.heard(worker, UnitEnded, attempt)
        assert isinstance(report, UnitEnded)
        del self.units[worker]
        return report

    async def keep(self, node: Node, *wanted: WantedState) -> None:
        self.wanted[node.node] = wanted
        self.order(node)


def state_of(report: UnitEnded, version: int) -> StateRef:
    return StateRef(trial=0, version=version, digest=report.digest)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with ScriptedController(tmp_path) as controller:
        near, far = await asyncio.gather(controller.node("n1", 2), controller.node("n2", 1))
        for node in (near, far):
            controller.lay_out(node, JOB, units=FUNCTIONS)
        yield Site(controller, near, far)


@pytest.mark.slow
async def test_a_configuration_hops_over_nodes_workers_and_agents_that_die(site: Site) -> None:
    await site.start()
    near, far = site.near, site.far
    work = near.folders.job(JOB)

    # on one node, then from its worker's memory to the other node
    one = await site.ended(FIRST, site.unit(FIRST, 1, None))
    two = await site.ended(THIRD, site.unit(THIRD, 2, one, await site.address(FIRST)))
    # the other node's disk keeps it, and ours has a copy of it
    source = StateSource(node=far.node, address=site.served(far))
    await site.keep(far, WantedState(state=state_of(two, 2), sources=()))
    await site.keep(near, WantedState(state=state_of(two, 2), sources=(source,)))
    await site.controller.heard(near, StateCopied, lambda copied: copied.version == 2)
    states = near.folders.states(JOB)
    assert [path.name for path in sorted(states.glob("*.state"))] == ["0-2-0.state"]

    # a worker dies in its unit; the unit is made again from the copy
    hold = work / "hold-0-1-3"
    hold.touch()
    lost = site.unit(SECOND, 3, two)
    await site.heard(SECOND, UnitStarted, lost)
    begun = await site.heard(SECOND, WorkerStarted)
    assert isinstance(begun, WorkerStarted)
    os.kill(begun.pid, signal.SIGKILL)
    await site.heard(SECOND, WorkerExited)
    del site.units[SECOND]

    # the agent dies in a unit, and another life of it goes on
    again = site.unit(FIRST, 3, two)
    await site.heard(FIRST, UnitStarted, again)
    near.kill()
    near.events.clear()
    await site.controller.begin(near, 2)
    site.order(near)
    hold.unlink()
    three = await site.ended(FIRST, again)

    # an agent's disk serves what a dead worker trained
    gone = await site.heard(THIRD, WorkerStarted)
    assert isinstance(gone, WorkerStarted)
    os.kill(gone.pid, signal.SIGKILL)
    await site.heard(THIRD, WorkerExited)
    four = await site.ended(FIRST, site.unit(FIRST, 4, three, site.served(near)))

    digests = [report.digest for report in (one, two, three, four)]
    assert digests == alone(work, VISITS[:4])
    assert find_state(states, 0, 4, four.digest) is not None


@pytest.mark.slow
async def test_a_zygote_that_trains_an_abandoned_worker_is_killed_and_its_file_deleted(
    site: Site,
) -> None:
    await site.start()
    hold = site.near.folders.job(JOB) / "hold-0-1-2"
    hold.touch()
    attempt = site.unit(FIRST, 1, None)
    await site.heard(FIRST, UnitStarted, attempt)

    site.units.clear()
    site.order(site.near)

    exited = await site.heard(FIRST, WorkerExited)
    assert isinstance(exited, WorkerExited)
    assert exited.signal == signal.SIGKILL
    hold.unlink()
    after = await site.ended(SECOND, site.unit(SECOND, 1, None))
    states = site.near.folders.states(JOB)
    assert after.digest == alone(site.near.folders.job(JOB), VISITS[:1])[0]
    assert [path.name for path in states.glob("*.state*")] == [f"0-1-{site.attempts}.state"]
