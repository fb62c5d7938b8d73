"""The journal of a cluster, simulated under the cluster's own policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.live_policies import run
from tests.bench.live_sleepers import sleepers

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("policy", ["ones", "fifo"])
def test_a_replay_has_the_costs_of_the_cluster_and_changes_jobs_about_as_often(
    policy: str, tmp_path: Path
) -> None:
    coming = [replace(job, epochs=-(-job.epochs // 3)) for job in sleepers(1, 2.0, many=6)]

    found = run(policy, coming, tmp_path, tmp_path / policy)

    assert found.failed == 0
    assert abs(found.replayed["rescales_per_job"] - found.rescales) <= 1.0
    if policy == "ones":
        told = found.replayed["options"]
        assert 0.0 < told["rescale_stall_s"] < 10.0, "the default of such physics is 30 s"
        assert told["start_stall_s"] < 20.0
