"""Every input that a fuzzer kept, and everything that it found, once more."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.corpus_files import FOLDER, inputs_of
from tests.fuzz.registry import TARGETS

ROOT = Path(__file__).parents[2]
MOST_BYTES = 1 << 20


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_fuzzer_kept_finds_nothing(target: str) -> None:
    run = TARGETS[target].load()

    for data in (b"", *inputs_of(target)):
        run(data)


def test_there_is_a_corpus_of_each_target_and_it_is_small() -> None:
    files = {path.stem: path.stat().st_size for path in FOLDER.iterdir()}

    assert set(files) == set(TARGETS)
    assert sum(files.values()) < MOST_BYTES


def this_commit() -> int:
    """Its number, so that a run of the same commit is the same; 0 where there is no git."""
    with contextlib.suppress(FileNotFoundError):
        said = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout
        return int(said.strip() or "0", 16)
    return 0


def turn_of(number: int) -> list[str]:
    """A third of all targets: most of a moment goes into making each ready."""
    return sorted(TARGETS)[number % 3 :: 3]


def test_each_target_has_its_turn() -> None:
    assert sorted(name for number in range(3) for name in turn_of(number)) == sorted(TARGETS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_moment_of_fuzzing_finds_nothing(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="this Python has no wheel of it")
    command = [sys.executable, "-m", "tests.fuzz", "--minutes", "0.1", "--jobs", "2", "--seed", "1"]
    targets = [word for name in turn_of(this_commit()) for word in ("--target", name)]

    done = subprocess.run(
        [*command, *targets, "--findings", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert [path.read_text() for path in sorted(tmp_path.glob("*.txt"))] == []
    assert (done.returncode, done.stderr) == (0, "")
