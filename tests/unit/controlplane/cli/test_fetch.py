"""ones fetch and export without a cluster: texts, and the interpreter that extracts a model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from controlplane.cli.job_output import _as_fetched, _say_fetched, _say_list
from controlplane.cli.output import Common
from controlplane.client.files import Fetch, Fetched, JobFiles
from controlplane.client.interpreters import NoTorchError, convert_state
from schemas.errors import BadFieldError


def interpreter(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """An interpreter without torch."""
    return interpreter(
        tmp_path / "bare", 'echo "ModuleNotFoundError: No module named torch" >&2; exit 1'
    )


@pytest.mark.slow
def test_the_first_interpreter_that_has_torch_extracts_the_model(tmp_path: Path, bare: str) -> None:
    able = interpreter(tmp_path / "able", 'test "$*" = "-P -m elastic.export_state in out"')
    failing = interpreter(tmp_path / "failing", "echo first >&2; echo is damaged >&2; exit 1")

    convert_state(Path("in"), Path("out"), [str(tmp_path / "none"), bare, able])
    remedy = f"no torch in {bare}; name an interpreter .* with --python"
    with pytest.raises(NoTorchError, match=remedy):
        convert_state(tmp_path, tmp_path, [bare])
    with pytest.raises(BadFieldError, match="the checkpoint cannot be exported: is damaged"):
        convert_state(tmp_path, tmp_path, [failing, bare])


def test_fetched_and_missing_files_are_listed_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("123")
    done = Fetch((_as_fetched(tmp_path / "a.txt"),), ("n1: link: leads out",), ("n2 is away",))

    _say_fetched("j-1", tmp_path, done, Common())
    text = capsys.readouterr()
    _say_fetched("j-1", tmp_path, done, Common(output="json"))
    document = capsys.readouterr()

    digest = hashlib.sha256(b"123").hexdigest()
    assert done.files == (Fetched(tmp_path / "a.txt", 3, digest),)
    assert text.out == f"     3 B  a.txt\n1 file, 3 B, in {tmp_path}\n"
    assert text.err == "ones: not fetched: n1: link: leads out\nones: not fetched: n2 is away\n"
    assert (json.loads(document.out), document.err) == (
        {
            "job": "j-1",
            "to": str(tmp_path),
            "files": [{"path": f"{tmp_path}/a.txt", "bytes": 3, "sha256": digest}],
            "refused": ["n1: link: leads out"],
            "missing": ["n2 is away"],
        },
        "",
    )


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("*", "ones: j-1 created or changed no file, and has no checkpoint\n"),
        ("*.png", "ones: no file of j-1 matches '*.png'; `ones fetch j-1 --list` names them\n"),
    ],
)
def test_an_empty_result_is_explained(
    pattern: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _say_fetched("j-1", tmp_path, Fetch((), (), ()), Common(), pattern)
    _say_list("j-1", JobFiles((), (), ()), Common(), pattern)

    assert capsys.readouterr() == ("", said * 2)
