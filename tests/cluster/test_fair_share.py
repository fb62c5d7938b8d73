"""Real clusters with two users: the second one does not wait for the first one's jobs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, explained, running, training_job

pytestmark = pytest.mark.slow  # a cluster of its own
WITHIN_S = 5.0  # until the second user has a slot
FIXED = {"slots": [1, 1], "slots_wanted": 1}


def second_user(cluster: Cluster, folder: Path) -> Cluster:
    """The same cluster, as bob sees it."""
    done = cluster.ones("key", "add", "bob", "--role", "user", "--out", str(folder / "bob"))
    assert done.code == 0, done.err
    return Cluster(folder / "bob", folder / "jobs-of-bob")


@pytest.mark.parametrize("policy", ["fifo", "fair", "ones"])
def test_a_second_user_has_a_slot_within_seconds(policy: str, tmp_path: Path) -> None:
    with running(tmp_path, policy=policy) as cluster:
        bob = second_user(cluster, tmp_path)
        jobs = [training_job(cluster, **FIXED) for _ in range(cluster.slots)]

        began = time.monotonic()
        job = bob.submit(**FIXED, stop={"epochs": 100_000})
        bob.until(job, lambda shown: shown["slots"] == 1)
        took_s = time.monotonic() - began

        told = [one for name in jobs for one in explained(cluster, name)]
        gave = [one["reason"] for one in told if one["code"] == "gave_back"]
        assert len(gave) == 1
        assert gave[0].startswith("paused: gives back 1 slot to user bob: user ")
        assert took_s < WITHIN_S
        bob.ones("cancel", job)
        cluster.clear()
