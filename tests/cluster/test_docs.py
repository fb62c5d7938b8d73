"""Every command on every page: run in the order of the page, or held against the real parser."""

from __future__ import annotations

import argparse
import importlib
import shlex
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import cyclopts
import pytest

from controlplane.cli.main import build
from tests.support.cluster import Cluster, running
from tests.support.documented import PAGES, ROOT, Shown, commands_of_block, shown

PLAIN = ROOT / "tests" / "unit" / "controlplane" / "cli" / "scripts" / "plain.py"
MODULES = {  # of programs whose parser is argparse's
    "ones-agent": "nodeagent.__main__",
    "ones-controller": "controlplane.service.__main__",
    "gpu-day": "tests.support.gpu_day",
    "soak": "tests.training.soak",
}
OF_FIRST_WORD = {"bench": "tests.bench"}  # and there: a module for each


class ParsedError(Exception):
    """The arguments were understood."""


def refusal(command: Shown, monkeypatch: pytest.MonkeyPatch) -> str:
    """Why a command of a page cannot be meant; empty if it can."""
    program, arguments = command.program, list(command.words[1:])
    if program == "ones":
        return _of_ones(arguments, whole=command.whole)
    if program == "test":
        paths = [word for word in arguments if "/" in word]
        return "".join(f"no {path}" for path in paths if not (ROOT / path).exists())
    if program in OF_FIRST_WORD:
        name, *arguments = arguments or [""]
        module = f"{OF_FIRST_WORD[program]}.{name}"
        if not (ROOT / Path(*module.split("."))).with_suffix(".py").exists():
            return f"no {module}"
        return _of_argparse(module, arguments, monkeypatch) if arguments else ""
    if program in MODULES and arguments:
        why = _of_argparse(MODULES[program], arguments, monkeypatch)
        return why if command.whole or "arguments are required" not in why else ""
    there = (ROOT / "bin" / program).exists() or program in MODULES
    return "" if there else f"no bin/{program}"


def _of_ones(arguments: list[str], *, whole: bool) -> str:
    try:
        build().parse_args(arguments, exit_on_error=False, print_error=False)
    except cyclopts.MissingArgumentError as error:
        return str(error) if whole else ""
    except cyclopts.CycloptsError as error:
        return str(error)
    return ""


def _of_argparse(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    parse = argparse.ArgumentParser.parse_args

    def parsed(parser: argparse.ArgumentParser, *_: Any) -> None:
        parse(parser, arguments)
        raise ParsedError

    def refused(_: argparse.ArgumentParser, message: str) -> None:
        raise ValueError(message)

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", parsed)
        patched.setattr(argparse.ArgumentParser, "error", refused)
        patched.setattr(sys, "argv", [module])
        try:
            importlib.import_module(module).main()
        except ParsedError:
            return ""
        except ValueError as error:
            return str(error)
    return f"{module} reads no arguments"


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_parses(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {" ".join(one.words): refusal(one, monkeypatch) for one in shown(page)}

    assert {command: why for command, why in refused.items() if why} == {}


@pytest.mark.parametrize(("words", "whole", "understood"), [
    ("ones ps --state failed", True, True),
    ("ones ps --sate failed", True, False),
    ("ones show", True, False),
    ("ones show", False, True),
    ("ones shwo JOB", False, False),
    ("bin/ones sim run --jobs many", True, False),
    ("bin/bench evolution --quick", True, True),
    ("bin/bench evolution --fast", True, False),
    ("bin/bench nothing", True, False),
    ("ones-agent --config FILE --end-workers", True, True),
    ("ones-agent --konfig FILE", True, False),
    ("bin/nothing", False, False),
    ("bin/test tests/none", True, False),
])  # fmt: skip
def test_an_invalid_command_would_be_found(
    monkeypatch: pytest.MonkeyPatch, words: str, *, whole: bool, understood: bool
) -> None:
    why = refusal(Shown(tuple(words.split()), whole), monkeypatch)

    assert (why == "") is understood


def test_the_pages_show_commands_in_blocks_and_in_sentences() -> None:
    found = {page: list(shown(page)) for page in PAGES}

    assert Shown(("bin/ones", "submit", "job.toml"), whole=True) in found["README.md"]
    assert Shown(("bin/quickstart", "--keep"), whole=False) in found["README.md"]
    assert (
        Shown(("ones", "timeline", "--png", "FILE"), whole=False)
        in found["docs/operations/scheduling.md"]
    )
    assert sum(map(len, found.values())) > 100


@pytest.mark.slow
def test_the_pages_about_jobs_work_in_their_order(cluster: Cluster, tmp_path: Path) -> None:
    desk = tmp_path / "digits"
    desk.mkdir()
    shutil.copy(PLAIN, desk / "train.py")
    with (desk / "train.py").open("a") as script:
        script.write('\nopen("curve.png", "w").write("a picture")\n')
    lines = [
        line
        for start in ("ones init", "ones submit a.toml b.toml --wait")
        for line in commands_of_block("docs/jobs/submit.md", start)
    ]
    fetching = commands_of_block("docs/jobs/results.md", "ones fetch digits-1")
    said: dict[str, str] = {}

    for line in lines:
        if "a.toml" in line:
            for name in ("a.toml", "b.toml"):
                shutil.copy(desk / "job.toml", desk / name)
        said[line] = follow(cluster, desk, line)

    job = said[lines[-1]].split()[0]
    for line in fetching:
        said[line] = follow(cluster, desk, line.replace("digits-1", job))

    assert "to change: 6 lines of train.py" in said["ones init train.py"]
    assert "can be submitted" in said["ones submit job.toml --dry-run"]
    assert (desk / job / "model.pt").stat().st_size > 0
    assert [path.name for path in (desk / "pictures").rglob("[!.]*.*")] == ["curve.png"]
    assert "curve.png" in said["ones fetch digits-1 --list"]
    assert (desk / "model.pt").read_bytes() == (desk / job / "model.pt").read_bytes()
    assert len(said) == 10


PREPARE = """#!/bin/bash
#SBATCH --job-name=prepare
#SBATCH --time=10 --mem=1G

while [ ! -e {flag} ]; do sleep 0.05; done
"""
TRAIN = """#!/bin/bash
#SBATCH --ntasks=2
#SBATCH --time=0:10:00
#SBATCH --output=%x-%j.out

srun python train.py
"""
TASK = """import os
rank = os.environ.get("SLURM_PROCID", os.environ.get("RANK", "alone"))
print("task", rank, "index", os.environ.get("SLURM_ARRAY_TASK_ID"))
"""


@pytest.mark.slow
def test_the_day_of_a_user_of_slurm_works_in_its_order(tmp_path: Path) -> None:
    desk, flag = tmp_path / "desk", tmp_path / "flag"
    desk.mkdir()
    (desk / "prepare.sh").write_text(PREPARE.format(flag=flag))
    (desk / "train.sh").write_text(TRAIN)
    (desk / "train.py").write_text(TASK)
    said: dict[str, str] = {}

    with running(tmp_path / "cluster") as cluster:
        for line in commands_of_block("docs/from-slurm.md", "ones rerun train-2"):
            said[line] = follow(cluster, desk, line)
            if line == "ones release train-2":
                flag.touch()
        elements = cluster.ones("ps", "-a", "--name", "train_*", "-o", "json").json
        last = elements[-1]["job"]
        output = cluster.output(last)

    assert "train-2" in said["ones ps --state queued"]
    assert sorted(said["ones logs train-2"].splitlines()) == [
        "task 0 index None",
        "task 1 index None",
    ]
    assert said["ones run -- python train.py"] == "task alone index None\n"
    assert said["ones shell long-6 -- hostname"] == f"{socket.gethostname()}\n"
    assert said["ones rerun train-2"] == "train-7\n"
    assert len(elements) == 10
    assert sorted(output) == ["task 0 index 9", "task 1 index 9"]
    assert "long-6" in said["ones history"]


def follow(cluster: Cluster, desk: Path, line: str) -> str:
    """What a command of a page prints, in a folder."""
    done = cluster.ones(*shlex.split(line)[1:], cwd=desk)
    assert done.code == 0, (line, done)
    return done.out
