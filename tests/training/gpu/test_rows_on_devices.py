"""Tests of exactness and of refusals on the simulated device, with an ordinary NCCL double."""

from __future__ import annotations

import pytest

from tests.training import (
    test_diverging_workers,
    test_dropped_steps,
    test_exact_or_refused,
    test_script_collectives,
    test_script_patterns,
    test_training_by_steps,
)

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.usefixtures("gpu_slots")]
MODULES = (
    test_diverging_workers,
    test_dropped_steps,
    test_exact_or_refused,
    test_script_collectives,
    test_script_patterns,
    test_training_by_steps,
)
globals().update(
    {
        name: test
        for module in MODULES
        for name, test in vars(module).items()
        if name.startswith("test_")
    }
)
# `Module.to` makes new parameters for this device, so the script's optimizer has the former ones.
del globals()["test_a_loop_over_random_windows_is_ported_with_ten_lines"]


@pytest.fixture
def mode(request: pytest.FixtureRequest) -> str:
    if "sparse gradients of a function" in request.node.name:
        pytest.skip("the simulated device has no sparse tensors")
    return "ordinary"
