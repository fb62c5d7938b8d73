"""All tests of changing groups on the simulated device, with an ordinary NCCL double and the worst."""

from __future__ import annotations

import pytest

from tests.training import (
    test_group_changes,
    test_random_changes,
    test_script_patterns,
    test_several_optimizers,
)

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.usefixtures("gpu_slots")]
MODES = ("ordinary", "worst")
globals().update(
    {
        name: test
        for module in (test_group_changes, test_random_changes, test_several_optimizers)
        for name, test in vars(module).items()
        if name.startswith("test_")
    }
)
test_averages_are_those_of_one_process = test_script_patterns.test_averages_are_those_of_one_process


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("mode", MODES)
