"""What the examples promise."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from controlplane.client.jobfile import load_job
from tests.support.cluster import Cluster

LONGEST_S = 240.0  # frameworks take long to import, under load above all
EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("digits", "embedding", "language")
FRAMEWORKS = ("frameworks/transformers", "frameworks/accelerate", "frameworks/lightning")
PORTS = ("ports/classifier", "ports/recurrent", "ports/finetune")


@pytest.mark.parametrize("name", [*NAMES, *PORTS, *FRAMEWORKS])
def test_an_example_is_at_most_six_lines_away_from_plain_pytorch(name: str) -> None:
    plain, train = (
        (EXAMPLES / name / script).read_text().splitlines() for script in ("plain.py", "train.py")
    )
    changed = [line for line in difflib.ndiff(plain, train) if line.startswith("+ ")]

    assert 0 < len(changed) <= 6, "\n".join(changed)


@pytest.mark.parametrize(
    "name",
    [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in (*PORTS, *FRAMEWORKS))],
)
def test_an_example_trains_two_epochs_on_a_cluster(
    cluster: Cluster, name: str, tmp_path: Path
) -> None:
    spec = load_job(EXAMPLES / name / "job.toml")
    text = (EXAMPLES / name / "job.toml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("stop", "workdir"))]
    added = f'workdir = "{EXAMPLES / name}"\nstop = {{ epochs = 2 }}\n'
    (tmp_path / "job.toml").write_text(added + "\n".join(lines))

    done = cluster.ones("submit", str(tmp_path / "job.toml"), "--wait", timeout=LONGEST_S)

    job = done.out.strip()
    assert done.code == 0, cluster.ones("logs", job).out
    first, second = cluster.show(job)["epochs"]
    assert (first["global_batch"], second["epoch"]) == (spec.batch_size, 2)
    assert second["train_loss"] < first["train_loss"]
