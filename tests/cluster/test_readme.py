"""The first page and the tutorial, as their readers follow them: every command, in its order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.documented import FENCE

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
LIMIT_S = 280.0
HOME = ".home"
SUITE = "bin/test"  # which runs this; what needs root is in test_systemd.py
EPOCHS = "range(300)"  # of the tutorial's script: minutes, in which its reader reads
PAGE_IN_BROWSER = "bin/ones web"


def blocks(language: str, page: Path = README) -> list[str]:
    """The blocks of a page in this language."""
    return [text for found, text in FENCE.findall(page.read_text()) if found == language]


def commands(page: Path = README) -> list[str]:
    """Commands of a page that need no other host, in its order, without their remarks."""
    lines = [
        line.partition("#")[0].strip()
        for text in blocks("", page)
        for line in text.splitlines()
        if line.startswith("bin/")
    ]
    return [line for line in lines if line != SUITE]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Path]:
    """A folder with the page's script and job file, `bin`, and a home without clusters."""
    (tmp_path / "train.py").write_text(*blocks("python"))
    (tmp_path / "job.toml").write_text(*blocks("toml"))
    for name in ("bin", HOME):
        (tmp_path / name).mkdir()
    for name, command in (
        ("ones", f"{sys.executable} -P -m controlplane.cli.main"),
        ("quickstart", ROOT / "bin" / "quickstart"),
    ):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        program.chmod(0o755)
    yield tmp_path
    followed(tmp_path, "bin/ones local down --dir ~/.ones")


def environment(desk: Path) -> dict[str, str]:
    unset = {"ONES_HOME", "ONES_TIMEOUT_S", "COLUMNS"}
    env = {name: value for name, value in os.environ.items() if name not in unset}
    return {**env, "HOME": str(desk / HOME), "TMPDIR": str(desk / HOME)}


def followed(desk: Path, command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], cwd=desk, env=environment(desk),
        capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_of_the_page_works_as_printed_in_its_order(desk: Path) -> None:
    said = {}
    for command in commands():
        done = followed(desk, command)
        assert done.returncode == 0, (command, done)
        said[command.partition(" && ")[0]] = done.stdout

    assert len(said) == 19
    assert "samples   exact" in said["bin/quickstart"]
    assert said["bin/ones submit job.toml"] == "digits-1\n"
    ended, first = said["bin/ones wait digits-1"].splitlines()
    assert ended.startswith("digits-1 succeeded")
    assert first.startswith('{"epoch": 1, "step": 1, "rank": ')
    made = {path.name for path in desk.rglob("*") if path.suffix in {".png", ".pt", ".rec"}}
    assert {"slots.png", "week.rec", "scaling.png"} <= made


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_command_of_the_tutorial_works_as_printed_in_its_order(desk: Path) -> None:
    first, *lines = commands(TUTORIAL)
    (script,) = blocks("python", TUTORIAL)
    (desk / "digits").mkdir()
    (desk / "digits" / "train.py").write_text(script.replace(EPOCHS, "range(60)"))
    said: dict[str, list[str]] = {}
    pages: list[subprocess.Popen[str]] = []

    for command in lines:
        if command == PAGE_IN_BROWSER:
            page = subprocess.Popen(
                command.split(), cwd=desk, env=environment(desk), stdout=subprocess.PIPE, text=True
            )
            pages.append(page)
            assert page.stdout is not None
            said[command] = [page.stdout.readline()]
        else:
            done = followed(desk, command)
            assert done.returncode == 0, (command, done)
            said.setdefault(command, []).append(done.stdout)

    assert first == "bin/quickstart"  # the first page's test runs it
    assert EPOCHS in script
    assert len(said) == 16
    assert "changed 6 lines of digits/train.py" in said["bin/ones init digits/train.py --apply"][0]
    assert said["bin/ones submit digits/job.toml"] == ["digits-1\n"]
    assert said[PAGE_IN_BROWSER][0].startswith("the page is at http://127.0.0.1:")
    alone, both = said["bin/ones ps"]
    assert "digits-1" in alone
    assert re.search(r"^wide-2 +\S+ +queued .*waits", both, re.MULTILINE)
    assert said["bin/ones explain wide-2"][0].startswith("wide-2  queued")
    assert said["bin/ones wait digits-1"][0].startswith("digits-1 succeeded")
    assert re.search(r"join +4 +\d+ +formed", said["bin/ones show digits-1"][0])  # it grew to all
    assert (desk / "digits-1" / "model.pt").stat().st_size > 0
    for page in pages:
        page.communicate(timeout=LIMIT_S)  # `ones local down` has ended it
