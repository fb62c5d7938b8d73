"""Every test of a changing group once more, on the simulated device: NCCL as it is."""

from __future__ import annotations

import pytest

from tests.elastic import test_group_changes, test_random_changes, test_several_optimizers

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu_slots")]
globals().update(
    {
        name: test
        for module in (test_group_changes, test_random_changes, test_several_optimizers)
        for name, test in vars(module).items()
        if name.startswith("test_")
    }
)


@pytest.fixture
def mode() -> str:
    """Of NCCL's double."""
    return "ordinary"
