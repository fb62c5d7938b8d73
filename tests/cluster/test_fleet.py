"""A controller process and simulated agents: real sockets, no processes on the nodes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from controlplane.client import Client, JobSpec
from schemas.ids import Rank, Seconds, Version
from schemas.session import AgentOutput, AgentSession, SessionTimings
from schemas.wire.agent import GroupDelta, GroupFormed, Hello, ToSession, WorkerReady, WorkerStarted
from tests.support.fleet import Fleet, SimulatedAgent, Training, TrainingAgent

pytestmark = pytest.mark.slow


async def test_simulated_workers_start_resize_and_finish_a_job(
    tmp_path: Path,
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text("")
    training = Training()
    make = partial(TrainingAgent, slots=2, training=training)
    spec = JobSpec(
        name="one", script="train.py", workdir=str(tmp_path / "work"), batch_size=8, slots=(1, 4)
    )
    async with Fleet(tmp_path, 2, make=make) as fleet, Client(tmp_path) as client:
        fleet.tasks.append(asyncio.create_task(training.run(0.01)))
        job = await client.submit(spec)
        await client.resize(job, slots=3)
        while not (played := training.job(job)).group or len(played.group.members) < 3:
            await asyncio.sleep(0.01)
        played.epochs = played.epoch + 1
        detail = await client.wait(job, 20)

        assert detail.summary.state == "succeeded"
        kinds = [(version.kind, version.outcome) for version in detail.versions]
        assert kinds == [("start", "formed"), ("join", "formed")]
        assert training.recoveries == 0
        deltas: list[GroupDelta] = [delta for agent in fleet.agents for delta in agent.deltas]
        assert {delta.job for delta in deltas} == {job}


LIMIT_S = 60.0
QUICK = SessionTimings(heartbeat_s=0.1, suspect_s=0.5)


class DeafSession(AgentSession):
    """While it is deaf nothing that arrives is taken."""

    deaf = False

    def receive(self, message: ToSession, now: Seconds) -> list[AgentOutput]:
        return [] if self.deaf else super().receive(message, now)


class Deaf(SimulatedAgent):
    """One that greets without a pause."""

    hellos = 0

    def open(self, context: zmq.asyncio.Context) -> None:
        super().open(context)
        self.session = DeafSession(self.node, self.session.boot, QUICK)

    def hello(self) -> Hello:
        self.hellos += 1
        self.session.hello_not_sent(self.now())
        return super().hello()


async def until(found: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not found():
            await asyncio.sleep(0.01)


async def test_a_lost_node_that_cannot_receive_stays_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONES__SILENCE__SUSPECT_S", "1.0")
    monkeypatch.setenv("ONES__SILENCE__LOST_S", "1.5")
    heard: list[str] = []

    async def follow(client: Client) -> None:
        async for event in client.events(follow=True):
            heard.extend([event.event] * (event.node is not None))

    async with Fleet(tmp_path, 1, make=Deaf) as fleet, Client(tmp_path) as client:
        (agent,) = fleet.agents
        assert isinstance(agent, Deaf)
        assert isinstance(agent.session, DeafSession)
        fleet.tasks.append(asyncio.create_task(follow(client)))
        agent.session.deaf = True
        await until(lambda: "node.lost" in heard)
        said = agent.hellos
        await until(lambda: agent.hellos >= said + 10)
        deaf = list(heard)
        agent.session.deaf = False
        await until(lambda: "node.up" in heard)

    assert deaf == ["node.joined", "node.suspect", "node.lost"]


QUIET = {"HeartbeatAck", "Welcome", "HelloRequest"}  # a session's own frames


async def test_a_delta_goes_to_the_nodes_of_its_job_and_to_no_other_agent(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("")
    spec = JobSpec(name="one", script="train.py", workdir=str(work), batch_size=8)
    async with Fleet(tmp_path, 100) as fleet, Client(tmp_path) as client:
        for agent in fleet.agents:
            agent.frames.clear()

        job = await client.submit(spec)
        async for event in client.events(follow=True):
            if (event.event, event.job) == ("job.starting", job):
                break
        detail = await client.job(job)
        node = detail.workers[0].node
        chosen = next(agent for agent in fleet.agents if agent.node == node)
        prepare = await chosen.delta(1)
        who: dict[str, Any] = {
            "job": job, "version": Version(1), "rank": Rank(0), "journal": prepare.journal,
        }  # fmt: skip
        chosen.happen(WorkerStarted(pid=1, started_ticks=1, **who))
        chosen.happen(WorkerReady(index=1, epoch_samples=10, resumed_epoch=0, parameters=1, **who))
        switch = await chosen.delta(2)
        chosen.happen(GroupFormed(index=2, group=Version(1), epoch=0, step=0, **who))
        settled = await chosen.delta(3)
        await client.cancel(job)
        end = await chosen.delta(4)

        orders = [(delta.version, delta.stage) for delta in (prepare, switch, settled, end)]
        assert orders == [(1, 1), (1, 2), (1, 3), (2, 3)]
        assert end.group is None
        assert end.forget
        assert chosen.frames["GroupDelta"] == 4
        others = Counter[str]()
        for agent in fleet.agents:
            if agent is not chosen:
                others.update(agent.frames)
        assert {kind: count for kind, count in others.items() if kind not in QUIET} == {}
