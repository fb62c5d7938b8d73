"""Telemetry of workers, on its way through the agent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from nodeagent.app import Agent
from nodeagent.reconciler import WorkerState
from schemas.codec import PUBLISHED
from schemas.ids import Rank, Seconds, Version, WorkerId
from schemas.wire.agent import StallTelemetry, StepsReported, Telemetry
from tests.support.builders import N1, A
from tests.support.schemas_examples import EXAMPLES

WORKER = WorkerId(f"{A}.v1.r0")


@pytest.mark.parametrize("tag", ["worker.steps.3", "worker.stalled.1"])
@pytest.mark.parametrize(("known", "journal"), [(True, "cafe"), (False, "")])
def test_telemetry_names_the_journal_of_its_worker(*, known: bool, journal: str, tag: str) -> None:
    sent: list[bytes] = []
    state = WorkerState(WORKER, A, Version(1), Rank(0), 0, "cafe")
    agent: Any = Agent.__new__(Agent)
    agent._node = N1
    agent._ports = SimpleNamespace(publish=sent.append)
    agent._telemetry_at, agent._now = {}, lambda: Seconds(0.0)
    agent._reconciler = SimpleNamespace(workers={WORKER: state} if known else {})
    example: Any = EXAMPLES[tag]

    agent._on_worker_message(WORKER, msgspec.structs.replace(example, journal="forged"))

    own: Any = msgspec.structs.replace(example, journal=journal)
    steps = isinstance(own, StepsReported)
    expected = Telemetry(node=N1, steps=own) if steps else StallTelemetry(node=N1, stall=own)
    assert [PUBLISHED.decode(data) for data in sent] == [expected]


def test_telemetry_of_a_worker_that_floods_is_dropped() -> None:
    sent: list[bytes] = []
    times = iter([0.0, 0.05, 0.06, 0.2, 0.21])
    agent: Any = Agent.__new__(Agent)
    agent._node, agent._ports = N1, SimpleNamespace(publish=sent.append)
    agent._telemetry_at, agent._now = {}, lambda: Seconds(next(times))
    agent._reconciler = SimpleNamespace(workers={})
    steps, stall = EXAMPLES["worker.steps.3"], EXAMPLES["worker.stalled.1"]

    for message in (steps, steps, stall, steps, steps):
        agent._on_worker_message(WORKER, message)

    assert [type(PUBLISHED.decode(data)) for data in sent] == [
        Telemetry, StallTelemetry, Telemetry,
    ]  # fmt: skip
