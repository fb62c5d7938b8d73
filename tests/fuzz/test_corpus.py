"""Every input that a fuzzer kept, and everything that it found, once more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.corpus_files import FOLDER, inputs_of
from tests.fuzz.registry import TARGETS

ROOT = Path(__file__).parents[2]
MAX_BYTES = 1 << 20


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_fuzzer_kept_finds_nothing(target: str) -> None:
    run = TARGETS[target].load()

    for data in (b"", *inputs_of(target)):
        run(data)


def test_there_is_a_corpus_of_each_target_and_it_is_small() -> None:
    files = {path.stem: path.stat().st_size for path in FOLDER.iterdir()}

    assert set(files) == set(TARGETS)
    assert sum(files.values()) < MAX_BYTES


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_moment_of_fuzzing_finds_nothing(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="this Python has no wheel of it")
    command = [sys.executable, "-m", "tests.fuzz", "--minutes", "0.1", "--jobs", "2", "--seed", "1"]
    targets = [word for name in sorted(TARGETS) for word in ("--target", name)]

    done = subprocess.run(
        [*command, *targets, "--findings", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert [path.read_text() for path in sorted(tmp_path.glob("*.txt"))] == []
    assert (done.returncode, done.stderr) == (0, "")
