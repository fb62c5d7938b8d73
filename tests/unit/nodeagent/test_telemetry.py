"""Telemetry of workers, on its way through the agent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from nodeagent.app import Agent
from nodeagent.reconciler import WorkerState
from schemas.codec import PUBLISHED
from schemas.ids import Rank, Version, WorkerId
from schemas.wire.agent import StepsReported, Telemetry
from tests.support.builders import N1, A
from tests.support.schemas_examples import EXAMPLES

WORKER = WorkerId(f"{A}.v1.r0")


@pytest.mark.parametrize(("known", "journal"), [(True, "cafe"), (False, "")])
def test_telemetry_names_the_journal_of_its_worker(*, known: bool, journal: str) -> None:
    sent: list[bytes] = []
    state = WorkerState(WORKER, A, Version(1), Rank(0), 0, "cafe")
    agent: Any = Agent.__new__(Agent)
    agent._node = N1
    agent._ports = SimpleNamespace(publish=sent.append)
    agent._reconciler = SimpleNamespace(workers={WORKER: state} if known else {})
    example: Any = EXAMPLES["worker.steps.3"]
    steps: StepsReported = msgspec.structs.replace(example, journal="forged")

    agent._on_worker_message(WORKER, steps)

    expected = Telemetry(node=N1, steps=msgspec.structs.replace(steps, journal=journal))
    assert [PUBLISHED.decode(data) for data in sent] == [expected]
