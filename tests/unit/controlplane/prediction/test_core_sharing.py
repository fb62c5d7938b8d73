"""Steps of workers that share cores, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from controlplane.prediction.slowdowns import stretch, stretch_alone


@pytest.mark.parametrize(
    ("busy", "cores", "times"), [(1, 2, 1.0), (2, 2, 1.0), (3, 2, 1.5), (8, 2, 4.0)]
)
def test_more_workers_than_cores_take_turns(busy: int, cores: int, times: float) -> None:
    assert stretch(busy, cores) == times


def test_workers_with_a_device_each_share_nothing() -> None:
    assert stretch(100, math.inf) == 1.0
    assert stretch_alone(np.array([1, 8]), np.array([1, 2]), math.inf).tolist() == [1.0, 1.0]


def test_a_job_over_several_nodes_shares_the_cores_of_each() -> None:
    slots, nodes = np.array([1, 3, 4, 8, 7]), np.array([1, 1, 1, 2, 2])

    assert stretch_alone(slots, nodes, 2).tolist() == [1.0, 1.5, 2.0, 2.0, 2.0]
