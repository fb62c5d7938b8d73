"""The simulated device, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.simgpu.processes import DeviceProcess, device_process


@pytest.fixture(scope="module")
def device() -> Iterator[DeviceProcess]:
    """A process with the simulated device, for the tests of one file."""
    with device_process() as made:
        yield made
