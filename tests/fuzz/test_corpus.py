"""Kept inputs and former findings of each target, run again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.corpus_files import FOLDER, inputs_of
from tests.fuzz.line_coverage import files_of
from tests.fuzz.registry import TARGETS

ROOT = Path(__file__).parents[2]
MAX_BYTES = 1 << 20


@pytest.mark.parametrize("target", TARGETS)
def test_kept_inputs_find_nothing(target: str) -> None:
    run = TARGETS[target].load()

    for data in (b"", *inputs_of(target)):
        run(data)


def test_each_target_has_modules_and_a_small_corpus() -> None:
    files = {path.stem: path.stat().st_size for path in FOLDER.iterdir()}

    assert set(files) == set(TARGETS)
    assert sum(files.values()) < MAX_BYTES
    for target in TARGETS.values():
        assert files_of(target.about)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_short_fuzzing_finds_nothing(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="this Python has no wheel of it")
    command = [sys.executable, "-m", "tests.fuzz", "--minutes", "0.1", "--jobs", "2", "--seed", "1"]
    targets = [word for name in sorted(TARGETS) for word in ("--target", name)]

    done = subprocess.run(
        [*command, *targets, "--findings", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert [path.read_text() for path in sorted(tmp_path.glob("*.txt"))] == []
    assert (done.returncode, done.stderr) == (0, "")
