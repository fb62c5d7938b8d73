"""What really crosses the wire between a controller and a hundred agents."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from controlplane.client import Client, JobSpec
from schemas.ids import Rank, Version
from schemas.wire.agent import GroupFormed, WorkerReady, WorkerStarted
from tests.support.fleet import Fleet

pytestmark = pytest.mark.slow
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
        who: dict[str, Any] = {"job": job, "version": Version(1), "rank": Rank(0)}
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
