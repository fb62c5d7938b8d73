"""The page about sweeps does what it says: its example in an empty folder, its commands in order."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from controlplane.cli.sweep.commands import RESTS
from controlplane.client import BlockingClient
from tests.support.cluster import Cluster, Finished, looked
from tests.support.documented import ROOT, commands_of_block

PAGE = "docs/sweeps/first.md"
COMMANDS = "docs/sweeps/commands.md"


def listing(language: str, holds: str) -> str:
    """The one block of the page in which a text occurs."""
    blocks = re.findall(rf"```{language}\n(.*?)```", (ROOT / PAGE).read_text(), re.DOTALL)
    (found,) = [block for block in blocks if holds in block]
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder with the page's two files."""
    (tmp_path / "train.py").write_text(listing("python", "# train.py"))
    (tmp_path / "sweep.toml").write_text(listing("toml", "# sweep.toml"))
    return tmp_path


def typed(cluster: Cluster, folder: Path, line: str, names: dict[str, str]) -> Finished:
    """What a command of the page comes to; the sweep has another number here."""
    for name, mine in names.items():
        line = re.sub(rf"\b{name}\b", mine, line)
    done = cluster.ones(*shlex.split(line)[1:], cwd=folder)
    assert done.code == 0, (line, done)
    return done


@pytest.mark.slow
def test_the_example_of_the_page_runs_as_it_stands(cluster: Cluster, folder: Path) -> None:
    said: dict[str, str] = {}
    names: dict[str, str] = {}
    for line in commands_of_block(PAGE, "ones sweep preview sweep.toml"):
        said[line] = typed(cluster, folder, line, names).out
        if line == "ones sweep submit sweep.toml":
            names["spirals-1"] = said[line].split()[0]

    job = names["spirals-1"]
    best = json.loads(cluster.ones("sweep", "best", job, "-o", "json").out)
    trials: list[dict[str, Any]] = json.loads(cluster.ones("sweep", "show", job, "-o", "json").out)[
        "trials"
    ]
    model = torch.nn.Sequential(
        torch.nn.Linear(2, best["values"]["width"]),
        torch.nn.Tanh(),
        torch.nn.Linear(best["values"]["width"], 3),
    )
    model.load_state_dict(torch.load(folder / "best.pt", weights_only=True))
    assert len(said) == 10
    assert best["score"] > 0.8
    assert len(trials) == 12
    assert {one["state"] for one in trials} == {"done", "stopped"}
    assert said["ones sweep replay spirals.json --trial 0"].endswith("equal, bit by bit\n")
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len((folder / "epochs.csv").read_text().splitlines()) == 1 + sum(
        len(one["metrics"]) for one in trials
    )


@pytest.mark.slow
def test_the_page_in_python_runs_as_it_stands(
    cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ONES_HOME", str(cluster.home))
    found: dict[str, Any] = {"__name__": "first.md"}

    exec(compile(listing("python", "submit_sweep"), "first.md", "exec"), found)  # noqa: S102

    assert found["rows"][0]["best"] == found["best"].score > 0.8
    assert (folder / "best.pt").exists()


@pytest.mark.slow
def test_single_configurations_are_changed_by_hand(cluster: Cluster, folder: Path) -> None:
    submit = "ones sweep submit sweep.toml --set searcher.max_epochs=1000"
    job = typed(cluster, folder, submit, {}).out.split()[0]
    said: list[str] = []
    with BlockingClient(cluster.home) as client:
        run = client.sweep_run(job)
        looked(lambda: sum(bool(one.epochs) for one in run.detail().trials) >= 12)
        for line in commands_of_block(COMMANDS, "ones sweep stop spirals-1 3 4"):
            said += typed(cluster, folder, line, {"spirals-1": job}).out.splitlines()
        detail = run.detail()
        client.cancel(job)

    states = [one.state for one in detail.trials]
    assert states[4] == "stopped"
    assert len(states) == 14
    assert (detail.trials[12].parent, detail.trials[12].values["lr"]) == (7, 0.01)
    assert detail.trials[12].start_epochs >= 1
    assert detail.trials[13].values == {"lr": 0.02, "width": 32}
    assert said[:2] == [f"{job} trial {one} stopped" for one in (3, 4)]
    assert said[2] in {f"{job} trial 5 {how}" for how in ("paused", RESTS)}  # as its unit stands
