"""The first page, as somebody follows it who has nothing else: every command, in its order."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.documented import FENCE

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
LIMIT_S = 280.0
HOME = ".home"
SUITE = "bin/test"  # which runs this; what needs root is in test_systemd.py


def blocks(language: str) -> list[str]:
    """The blocks of the page in this language."""
    return [text for found, text in FENCE.findall(README.read_text()) if found == language]


def commands() -> list[str]:
    """Commands of the page that need no other host, in its order, without their remarks."""
    lines = [
        line.partition("#")[0].strip()
        for text in blocks("")
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


def followed(desk: Path, command: str) -> subprocess.CompletedProcess[str]:
    unset = {"ONES_HOME", "ONES_TIMEOUT_S", "COLUMNS"}
    env = {name: value for name, value in os.environ.items() if name not in unset}
    home = str(desk / HOME)
    return subprocess.run(
        ["bash", "-c", command], cwd=desk, env={**env, "HOME": home, "TMPDIR": home},
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
