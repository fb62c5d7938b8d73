"""Policy `drl` on a real cluster of two nodes, as its users meet it."""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path

import pytest

from tests.support.cluster import TOY, explained, running

EPOCH = list(range(400))
SLOW = {"PAUSE_S": "0.02", "OMP_NUM_THREADS": "1"}
JOBS = 12
pytestmark = pytest.mark.slow


def test_twelve_jobs_finish_with_every_sample_once(tmp_path: Path) -> None:
    """Of one to four slots, under a copy of the shipped model that decides every second."""
    shipped = resources.files("controlplane.policy.learned").joinpath("drl.npz")
    with resources.as_file(shipped) as file:
        model = shutil.copy(file, tmp_path / "mine.npz")
    options = f'options = {{ model = "{model}", interval_s = 1.0 }}'
    with running(tmp_path, options, policy="drl", slots=2, agents=2) as cluster:
        jobs = [
            cluster.submit(TOY, env=SLOW, record_samples=True, slots=[1, 4]) for _ in range(JOBS)
        ]
        codes = [cluster.wait(job).code for job in jobs]
        reasons = [decision["reason"] for job in jobs for decision in explained(cluster, job)]
        samples = [cluster.samples(job) for job in jobs]

    assert codes == [0] * JOBS
    assert samples == [dict.fromkeys((1, 2, 3, 4), EPOCH)] * JOBS
    assert any("the network's choice" in why for why in reasons)
