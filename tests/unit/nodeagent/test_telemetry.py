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
    agent._reconciler = SimpleNamespace(workers={WORKER: state} if known else {})
    example: Any = EXAMPLES[tag]

    agent._on_worker_message(WORKER, msgspec.structs.replace(example, journal="forged"))

    own: Any = msgspec.structs.replace(example, journal=journal)
    steps = isinstance(own, StepsReported)
    expected = Telemetry(node=N1, steps=own) if steps else StallTelemetry(node=N1, stall=own)
    assert [PUBLISHED.decode(data) for data in sent] == [expected]
