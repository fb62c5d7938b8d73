"""Sweep workers on a device: states leave it and return unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.wire.agent import UnitEnded
from tests.support.simgpu.processes import require_library
from tests.training.sweep_crew import FUNCTIONS, SweepCrew, SweepProcess

pytestmark = pytest.mark.slow
PRELUDE = "import tests.support.simgpu.worker\n"
ON_DEVICE = PRELUDE + FUNCTIONS.replace(
    "loss = functional.mse_loss(trained.model(x + 0.1 * torch.randn_like(x)), y)",
    "x, y = x.to(unit.device), y.to(unit.device)\n"
    "        assert x.device.type == 'simgpu'\n"
    "        loss = functional.mse_loss(trained.model(x + 0.1 * torch.randn_like(x)), y)",
).replace("x, y = data.tensors", "x, y = (one.to(unit.device) for one in data.tensors)")
VISITS = [(1, 2), (1, 0), (1, 3), (1, 1)]


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[SweepCrew]:
    require_library()
    made = SweepCrew(tmp_path, ON_DEVICE)
    yield made
    made.close()


def test_a_hopping_configuration_equals_one_that_stays(crew: SweepCrew) -> None:
    first, second = crew.start("a", "b")
    digests: dict[str, list[str]] = {"hops": [], "stays": []}
    for kind, places in (("hops", (first, second)), ("stays", (first, first))):
        before: UnitEnded | None = None
        for at, visit in enumerate(VISITS):
            worker = places[at % 2]
            sources: list[SweepProcess | str] = [places[(at + 1) % 2]] if before else []
            unit = crew.unit(worker, at + 1, visit, before, sources, evaluate=at == 3)
            before = crew.ended(unit)
            digests[kind].append(before.digest)

    assert digests["hops"] == digests["stays"]
    assert len(set(digests["hops"])) == len(VISITS)
    assert before.scores.keys() == {"error"}
