"""The pages of `docs/migrate/`: each elastic script trains with its job file on a cluster.

The script for torchrun runs as it is. The other scripts before the change are only compiled:
Horovod, AdaptDL and Ray are not installed with the tests, and each brings a launcher of its own.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.documented import ROOT

FOLDER = ROOT / "docs" / "migrate"
PAGES = ("ddp", "horovod", "adaptdl", "ray-train", "lightning", "huggingface")
FRAMEWORKS = ("lightning", "huggingface")  # their pages show the changed lines only
SAMPLES = 1500
TRAINED = {"adaptdl": SAMPLES - SAMPLES % 64}  # it drops the rest, as before
LONGEST_S = 240.0  # frameworks take long to import, under load above all


def block(page: str, heading: str, language: str) -> str:
    """The first block of a language in a section of a page."""
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    _, _, section = text.partition(f"\n## {heading}\n")
    found = re.search(rf"```{language}\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    assert found is not None, (page, heading, language)
    return found[1]


def elastic_script(page: str) -> str:
    """The script of a page after the change."""
    if page not in FRAMEWORKS:
        return block(page, "After", "python")
    before, changes = block(page, "Before", "python"), block(page, "The changes", "python")
    (made,) = (
        node
        for node in ast.parse(before).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "trainer"
    )
    lines = before.splitlines()
    return "\n".join([*lines[: made.lineno - 1], changes, *lines[made.end_lineno :], ""])


@pytest.mark.parametrize("page", PAGES)
def test_the_scripts_of_a_page_are_python(page: str) -> None:
    for script in (block(page, "Before", "python"), elastic_script(page)):
        compile(script, f"{page}.md", "exec")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_same_parts_as_the_others(page: str) -> None:
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")

    assert "| theirs | ours" in text
    assert text.rindex("\n## Limits\n") > text.index("\n## Before\n")
    assert f"]({page}.md)" in (FOLDER / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_elastic_script_of_a_page_trains_in_a_group(
    cluster: Cluster, tmp_path: Path, page: str
) -> None:
    job_file = block(page, "The changes" if page in FRAMEWORKS else "After", "toml")
    (tmp_path / "train.py").write_text(elastic_script(page))
    (tmp_path / "job.toml").write_text(job_file)
    stated = tomllib.loads(job_file)

    done = cluster.ones(
        "submit", str(tmp_path / "job.toml"), "--set", "slots_wanted=2",
        "--set", "record_samples=true", "--wait", timeout=LONGEST_S,
    )  # fmt: skip

    job = done.out.strip()
    assert done.code == 0, cluster.ones("logs", job).out
    shown = cluster.show(job)
    assert len(shown["versions"][0]["slots"]) == 2
    epochs = shown["epochs"]
    assert [one["global_batch"] for one in epochs] == [stated["batch_size"]] * 6
    assert epochs[-1]["train_loss"] < epochs[0]["train_loss"]
    taken = {epoch: len(set(ids)) for epoch, ids in cluster.samples(job).items()}
    assert taken == dict.fromkeys(range(1, 7), TRAINED.get(page, SAMPLES))


@pytest.mark.slow
def test_the_script_for_torchrun_runs_unchanged(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block("ddp", "Before", "python"))
    (tmp_path / "job.toml").write_text(block("ddp", "Before", "toml"))

    here = cluster.run(tmp_path, "torchrun", "--nproc-per-node", "2", "train.py")
    submitted = cluster.ones("submit", str(tmp_path / "job.toml"), "--wait", timeout=LONGEST_S)

    assert (here.code, submitted.code) == (0, 0), here.err + submitted.err
    job = submitted.out.strip()
    for printed in (here.out.splitlines(), cluster.output(job)):
        epochs = [line.split()[1:] for line in printed if "accuracy" in line]
        numbers = [words[words.index("accuracy") - 1] for words in epochs]
        assert numbers == [str(epoch) for epoch in range(1, 7)]
        assert float(epochs[-1][-1]) > 0.7
