"""The first page, as somebody follows it who has nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
LIMIT_S = 200.0
# What the page leaves to its reader. Training goes slowly until the tour comes to its end.
BEFORE = """
import os
import time

import torch
from torch import nn

images = torch.randn(1600, 8, generator=torch.Generator().manual_seed(0))
loss_fn = nn.CrossEntropyLoss()


class Digits(torch.utils.data.Dataset):
    def __len__(self):
        return len(images)

    def __getitem__(self, place):
        if not os.path.exists({go!r}):
            time.sleep(0.003)
        return images[place], (images[place, 0] > 0).long()


train_set = Digits()


def build_model():
    return nn.Linear(8, 2)


def build_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def evaluate(model):
    with torch.no_grad():
        return float((model(images).argmax(dim=1) == (images[:, 0] > 0)).float().mean())


"""


def blocks() -> list[str]:
    """Script, job file and commands of the part about a job of one's own."""
    _, part = README.read_text().split("\n## Train something of your own\n")
    return re.findall(r"```\w*\n(.*?)```", part.split("\n## ")[0], re.DOTALL)


def simulations() -> list[str]:
    """The commands that choose a policy before it is used."""
    return [line for line in README.read_text().splitlines() if line.startswith("bin/ones sim")]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Path]:
    """A folder with the page's script and job file, and `bin/ones`; a home without clusters."""
    script, job_file, _ = blocks()
    go = str(tmp_path / "go")
    (tmp_path / "train.py").write_text(BEFORE.format(go=go) + script)
    (tmp_path / "job.toml").write_text(job_file)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "ones"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m controlplane.cli.main "$@"\n')
    program.chmod(0o755)
    yield tmp_path
    followed(tmp_path, "bin/ones local down --dir ~/.ones")


def followed(desk: Path, command: str) -> subprocess.CompletedProcess[str]:
    unset = {"ONES_HOME", "ONES_TIMEOUT_S", "COLUMNS"}
    env = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=desk,
        env={**env, "HOME": str(desk)},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


@pytest.mark.slow
def test_every_command_of_the_tour_works_in_the_order_of_the_page(desk: Path) -> None:
    said = {}
    replayed = [line for line in simulations() if "week.rec" in line]
    for line in [*blocks()[2].splitlines(), *replayed]:
        command = line.partition("#")[0].strip()
        if command.startswith("bin/ones wait"):
            (desk / "go").touch()
        done = followed(desk, command)
        travels = " in 3 files of " if "submit" in command else ""
        assert (done.returncode, done.stderr if not travels else "") == (0, ""), (
            command + done.stderr + followed(desk, "bin/ones show digits-1").stdout
        )
        assert travels in done.stderr
        said[" ".join(command.split()[1:3])] = done.stdout

    assert len(said) == 16
    assert said["submit job.toml"] == "digits-1\n"
    assert "digits-1" in said["ps"]
    assert (desk / "slots.png").stat().st_size > 0
    ended, first = said["wait digits-1"].splitlines()
    assert ended.startswith("digits-1 succeeded")
    assert first.startswith('{"epoch": 1, "step": 1, "rank": 0, "ids": [')


@pytest.mark.slow
def test_the_simulations_of_the_page_run(desk: Path) -> None:
    own = [line for line in simulations() if "week.rec" not in line]
    for line in own:
        fewer = re.sub(r"--jobs \d+", "--jobs 2", line)

        assert (followed(desk, fewer).returncode, fewer) == (0, fewer)

    assert len(own) == 2
    assert (desk / "plots" / "scaling.png").is_file()
