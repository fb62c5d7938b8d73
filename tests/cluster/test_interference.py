"""Jobs that really disturb each other, on a real cluster of two nodes with a core each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.interference import OPTIONS, arrive, inexact, is_apart, moved, two_cores

pytestmark = pytest.mark.slow


def test_harmony_learns_interference_and_separates_the_jobs(tmp_path: Path) -> None:
    with two_cores(tmp_path, "harmony", options=OPTIONS["harmony"]) as (cluster, client):
        jobs = arrive(cluster, client, ("reader", "waiter"))  # whatever else the host does

        where = moved(client, jobs, 150.0)

        assert is_apart(where), where
        assert inexact(client, jobs) == 0
        assert any(
            "costs it" in said.reason for job in jobs for said in client.explain(job).decisions
        )
        for job in jobs:
            client.cancel(job)
