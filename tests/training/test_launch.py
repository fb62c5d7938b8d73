"""Run of a script by `elastic.launch` and by a worker."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic import launch
from elastic.worker import run_script
from elastic.worker.run_script import _location
from schemas.errors import one_line_error
from tests.support.cluster import TOY
from tests.training.peers import run_forked


def launched(folder: Path, script: str, *arguments: str) -> tuple[int, str, str]:
    (folder / "train.py").write_text(script)
    code = run_forked(_launch, folder, arguments)
    assert code is not None
    return code, (folder / "out").read_text(), (folder / "err").read_text()


def _launch(folder: Path, arguments: Sequence[str]) -> None:
    os.chdir(folder)
    for name, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = ["elastic.launch", "train.py", *arguments]
    run_script.main()


@pytest.mark.slow
def test_a_script_runs_beside_a_file_named_elastic(tmp_path: Path) -> None:
    (tmp_path / "elastic.py").write_text("raise SystemExit('the wrong elastic')")
    (tmp_path / "mine.py").write_text("VALUE = 42")

    (tmp_path / "train.py").write_text("import mine; print(mine.VALUE)\n" + TOY)

    done = subprocess.run(
        [sys.executable, "-P", "-m", "elastic.launch", "train.py"], capture_output=True, text=True,
        cwd=tmp_path, check=False, timeout=60,
    )  # fmt: skip

    lines = done.stdout.splitlines()
    assert (done.returncode, lines[0], lines[-1], len(lines)) == (0, "42", "done", 82)


@pytest.mark.slow
@pytest.mark.parametrize(("script", "code", "says"), [
    ("import sys; print(sys.argv[1:], __name__); sys.exit(3)", 3, ""),
    pytest.param("raise SystemExit('no')", 1, "no\n", marks=pytest.mark.slow),
    ("def f():\n    1 / 0\nf()", 1, "ZeroDivisionError: division by zero"),
])  # fmt: skip
def test_a_script_keeps_its_exit_code_and_traceback(
    tmp_path: Path, script: str, code: int, says: str
) -> None:
    found, out, err = launched(tmp_path, script, "--width", "64")

    assert found == code
    assert says in err
    assert str(Path(launch.__file__).parent) not in err
    if code == 3:
        assert out == "['--width', '64'] __main__\n"


def test_the_failing_line_is_found_in_any_folder(tmp_path: Path) -> None:
    folder = tmp_path / ".venv" / "elastic"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text("def f():\n    1 / 0\nf()")

    with pytest.raises(ZeroDivisionError) as raised:
        runpy.run_path(str(folder / "train.py"))

    assert _location(raised.value, folder / "train.py") == "train.py:2"


@pytest.mark.parametrize(("script", "told"), [
    ("import sys\nsys.exit()", []),
    ("import sys\nsys.exit(3)", []),
    ("import sys\nsys.exit('no data: mount it')", [("no data: mount it", "train.py:2")]),
    (
        (
            "def f():\n  raise OSError('gone')\ntry: f()\n"
            "except OSError as e: raise ExceptionGroup('of tasks', [e])"
        ),
        [("OSError: gone", "train.py:2")],
    ),
])  # fmt: skip
def test_a_scripts_failure_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, told: list[tuple[str, str]]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    heard: list[tuple[str, str]] = []

    run_script._run_source(
        tmp_path / "train.py",
        script.encode(),
        [],
        lambda error, where: heard.append((one_line_error(error), where)),
    )

    assert heard == told
