"""What the examples promise."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from controlplane.client.job_file import load_job
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


@pytest.mark.slow
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


@pytest.mark.parametrize(("name", "changes"), [
    ("digits", ("searcher.configurations=3", "searcher.max_epochs=3", "space.width=16")),
    ("language", ("searcher.configurations=2", "searcher.max_epochs=2", "partitions=2")),
])  # fmt: skip
@pytest.mark.slow
def test_an_example_is_swept_on_a_cluster(
    cluster: Cluster, name: str, changes: tuple[str, ...]
) -> None:
    options = [word for change in changes for word in ("--set", change)]

    done = cluster.ones(
        "sweep", "submit", str(EXAMPLES / name / "sweep.toml"), *options, "--wait",
        timeout=LONGEST_S,
    )  # fmt: skip

    job = done.out.strip()
    assert done.code == 0, cluster.ones("logs", job).out
    trials = cluster.ones("sweep", "show", job, "-o", "json").json["trials"]
    assert {one["state"] for one in trials} == {"done", "stopped"}
    assert max(one["epochs"] for one in trials) == int(changes[1].rpartition("=")[2])


@pytest.mark.parametrize("name", ["digits", "language"])
def test_the_functions_of_a_swept_example_can_be_imported(name: str) -> None:
    sweep = load_job(EXAMPLES / name / "sweep.toml").stated_sweep

    assert sweep.search.seed == 1
