"""Scripts that `ones init` ported train on a cluster, in groups that change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.cluster import Cluster

SCRIPTS = Path(__file__).parents[1] / "unit" / "controlplane" / "cli" / "scripts"
TRAINABLE = {  # and their epochs
    "plain": 3, "arguments": 4, "distributed": 2, "schedule": 3, "finetune": 2, "own_agent": 2,
    "trainer": 2, "lightning_module": 3, "accelerator": 4,
}  # fmt: skip


@pytest.mark.slow
def test_a_script_converted_by_init_trains_in_a_group_of_two(
    cluster: Cluster, tmp_path: Path
) -> None:
    files = []
    for name in TRAINABLE:
        (tmp_path / name).mkdir()
        script = shutil.copy(SCRIPTS / f"{name}.py", tmp_path / name)
        assert cluster.ones("init", script, "--apply").code == 0
        files.append(str(tmp_path / name / "job.toml"))

    submitted = cluster.ones("submit", *files, "--set", "slots_wanted=2", "-o", "json")
    jobs = [accepted["job"] for accepted in submitted.json]

    shown = {
        job: cluster.until(job, lambda one: one["state"] in {"succeeded", "failed"}) for job in jobs
    }
    assert {job: (one["state"], one["epoch"]) for job, one in shown.items()} == dict(
        zip(jobs, [("succeeded", epochs) for epochs in TRAINABLE.values()], strict=True)
    ), [cluster.ones("logs", job).out for job in jobs]
    assert [len(one["versions"][0]["slots"]) for one in shown.values()] == [2] * len(jobs)
