"""A controller process and simulated agents: real sockets, no processes on the nodes."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from controlplane.client import Client, JobSpec
from schemas.wire.agent import GroupDelta
from tests.support.fleet import Fleet, Training, TrainingAgent

pytestmark = pytest.mark.slow


async def test_simulated_workers_start_resize_and_finish_a_job(tmp_path: Path) -> None:
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
