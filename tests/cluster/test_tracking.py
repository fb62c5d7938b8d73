"""Jobs whose epochs go to MLflow and to W&B in its offline mode, through a change of the group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import TOY, Cluster, resize

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EPOCHS = 8
SCRIPT = TOY.replace("agent.epochs(4)", f"agent.epochs({EPOCHS})").replace("lr=1.0", "lr=0.05")


def trained(cluster: Cluster, track: str, **env: str) -> str:
    """A job that ended, after it was resized."""
    job = cluster.submit(
        SCRIPT, batch_size=20, max_batch_size=40, slots=[1, 4], stop={"epochs": EPOCHS},
        track=track, env={"OMP_NUM_THREADS": "1", "PAUSE_S": "0.05", **env},
    )  # fmt: skip
    cluster.until_epoch(job, 1)
    resize(cluster, job, 2)
    assert cluster.wait(job).code == 0
    return job


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside of MLflow
def test_mlflow_has_one_run_with_every_epoch(cluster: Cluster, tmp_path: Path) -> None:
    mlflow: Any = pytest.importorskip("mlflow", reason="`bin/test --all` installs it")
    address = f"sqlite:///{tmp_path}/mlflow.db"

    job = trained(cluster, "mlflow", MLFLOW_TRACKING_URI=address)

    client = mlflow.MlflowClient(address)
    experiment = client.get_experiment_by_name(cluster.show(job)["spec"]["name"])
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.data.tags["ones.job"]) == (job, job)
    history = client.get_metric_history(run.info.run_id, "epoch")
    assert [one.value for one in history] == [float(n) for n in range(1, EPOCHS + 1)]
    slots = client.get_metric_history(run.info.run_id, "batch_size")
    assert len(slots) == EPOCHS


def test_wandb_keeps_an_offline_run_of_the_job(cluster: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="`bin/test --all` installs it")

    job = trained(
        cluster, "wandb", WANDB_MODE="offline", WANDB_DIR=str(tmp_path), TMPDIR=str(tmp_path)
    )

    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{job}.wandb"]
    assert files[0].stat().st_size > 1000
