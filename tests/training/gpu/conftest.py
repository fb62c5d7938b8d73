"""The simulated device, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.simgpu.processes import DeviceProcess, device_process, require_library
from tests.training.groups import Slots

pytest.register_assert_rewrite(
    "tests.training.test_group_changes",
    "tests.training.test_random_changes",
    "tests.training.test_several_optimizers",
)
LATE_US = "300,0"  # that a copy is on its way


@pytest.fixture
def gpu_slots(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    require_library()
    monkeypatch.setattr(Slots, "prelude", "import tests.support.simgpu.worker\n")
    environment = {"NCCL_DOUBLE": mode, "SIMGPU_LATE_US": LATE_US}
    monkeypatch.setattr(Slots, "environment", environment)


@pytest.fixture(scope="module")
def device() -> Iterator[DeviceProcess]:
    with device_process() as made:
        yield made
