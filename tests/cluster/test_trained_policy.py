"""Policy `drl` on a real cluster of two nodes, as its users meet it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from tests.support.cluster import TOY, Cluster, explained

EPOCH = list(range(400))
SLOW = {"PAUSE_S": "0.02", "OMP_NUM_THREADS": "1"}
JOBS = 12
pytestmark = pytest.mark.slow


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of the user's own: a copy of the one that ships."""
    shipped = resources.files("controlplane.policy.learned").joinpath("drl.npz")
    with resources.as_file(shipped) as file:
        return Path(shutil.copy(file, tmp_path / "mine.npz"))


@pytest.fixture
def cluster(tmp_path: Path, model: Path) -> Iterator[Cluster]:
    """Two nodes of two slots under that model, which decides every second."""
    made = Cluster(tmp_path / "home", tmp_path / "jobs", slots=2, agents=2, policy="drl")
    made.up()
    made.down()
    with (made.home / "controller.toml").open("a") as settings:
        settings.write(f'options = {{ model = "{model}", interval_s = 1.0 }}\n')
    made.up()
    yield made
    made.down()


def submitted(cluster: Cluster) -> str:
    """A job that may have one to four slots."""
    return cluster.submit(TOY, env=SLOW, record_samples=True, slots=[1, 4])


def test_twelve_jobs_finish_with_every_sample_once(cluster: Cluster) -> None:
    jobs = [submitted(cluster) for _ in range(JOBS)]
    codes = [cluster.wait(job).code for job in jobs]
    reasons = [decision["reason"] for job in jobs for decision in explained(cluster, job)]
    samples = [cluster.samples(job) for job in jobs]
    rescales = sum(cluster.show(job)["rescales"] for job in jobs)

    print(f"{rescales} re-scales", *reasons, sep="\n")  # noqa: T201 - shown with -s
    assert codes == [0] * JOBS
    assert samples == [dict.fromkeys((1, 2, 3, 4), EPOCH)] * JOBS
    assert any("the network's choice" in why for why in reasons)
