"""A worker's entry, in processes of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import TOY


def launched(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    return subprocess.run(
        [sys.executable, "-P", "-m", "elastic.launch", "train.py", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
        timeout=60,
    )


def test_a_script_runs_stand_alone_beside_a_file_that_is_called_elastic(tmp_path: Path) -> None:
    (tmp_path / "elastic.py").write_text("raise SystemExit('the wrong elastic')")
    (tmp_path / "mine.py").write_text("VALUE = 42")

    done = launched(tmp_path, "import mine; print(mine.VALUE)\n" + TOY)

    lines = done.stdout.splitlines()
    assert (done.returncode, lines[0], lines[-1], len(lines)) == (0, "42", "done", 82)


@pytest.mark.parametrize(
    ("script", "code", "says"),
    [
        ("import sys; print(sys.argv[1:], __name__); sys.exit(3)", 3, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("def f():\n    1 / 0\nf()", 1, "ZeroDivisionError: division by zero"),
    ],
)
def test_exit_codes_and_tracebacks_are_the_scripts_own(
    tmp_path: Path, script: str, code: int, says: str
) -> None:
    done = launched(tmp_path, script, "--width", "64")

    assert done.returncode == code
    assert says in done.stderr
    assert "elastic" not in done.stderr
    if code == 3:
        assert done.stdout == "['--width', '64'] __main__\n"
