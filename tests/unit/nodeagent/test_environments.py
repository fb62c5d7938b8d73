"""Names of environments: what makes two jobs share one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from nodeagent import environments
from nodeagent.environments import name_of
from nodeagent.errors import NodeStartError, StartError
from schemas.errors import install_hint


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "uv", lambda: "/usr/bin/uv")


def name(folder: Path, text: str, **given: Any) -> str:
    (folder / "requirements.txt").write_text(text)
    fields: dict[str, Any] = {"user": "ann", "snapshot": "1", "env": {}, **given}
    python = fields.pop("python", sys.executable)
    return name_of(folder / "requirements.txt", python, **fields)


PLAIN = "# of the model\nnumpy\nscipy>=1.2  # new\ntiny[a,b]==1.0; python_version > '3'\n\n"


@pytest.mark.parametrize(
    ("text", "given", "shared"),
    [
        (PLAIN, {"snapshot": "2"}, True),
        (PLAIN, {"env": {"LR": "1"}}, True),
        (PLAIN, {"user": "bob"}, False),
        (PLAIN, {"env": {"UV_INDEX_URL": "https://x"}}, False),
        (PLAIN, {"python": "/bin/sh"}, False),
        ("./tiny.whl\n", {"snapshot": "2"}, False),
        ("-r more.txt\n", {"snapshot": "2"}, False),
        ("tiny @ file:tiny.whl\n", {"snapshot": "2"}, False),
        ("numpy\n-c limits.txt\n", {"snapshot": "2"}, False),
    ],
)
def test_jobs_share_what_would_have_the_same_content(
    tmp_path: Path, text: str, given: dict[str, Any], *, shared: bool
) -> None:
    assert (name(tmp_path, text) == name(tmp_path, text, **given)) is shared


@pytest.mark.parametrize("line", ["-e .", "  --editable=./lib"])
def test_an_editable_requirement_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(StartError, match="outlives the working directory") as refused:
        name(tmp_path, f"numpy\n{line}\n")

    assert refused.value.hint == "write the path without --editable"


def test_a_missing_base_interpreter_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="'/no/python', on which"):
        name(tmp_path, PLAIN, python="/no/python")


def test_a_node_without_uv_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "uv", lambda: None)

    with pytest.raises(NodeStartError) as refused:
        name(tmp_path, PLAIN)

    assert refused.value.hint == f"beside the agent: {install_hint('environments')}"
