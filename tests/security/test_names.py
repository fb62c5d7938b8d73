"""Names that could be taken for other names."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.service.keys import KeyFile, KeyTable
from schemas.errors import BadFieldError, SettingsError
from schemas.jobs import problems
from schemas.transport.keys import Identity, check_name, write_keys
from schemas.wire.client import AddKey
from tests.support.builders import job_spec


@pytest.mark.parametrize(
    "name", ["ada", "node-1", "Zoë", "アダ山", "김민준", "Ада", "a_b.c-9", "用户1"]
)
def test_ordinary_names_are_accepted(name: str) -> None:
    check_name(name, "name")


@pytest.mark.parametrize(
    "name",
    [
        "\u0430dmin",  # Cyrillic a
        "adm\u0456n",  # Cyrillic i
        "\u03bfperator",  # Greek o
        "\uff41dmin",  # fullwidth a
        "ad\u200bmin",  # zero width space
        "admin\u202e",
        "Zoe\u0308",  # not composed
        "\u2160",  # ROMAN NUMERAL ONE
        "ada\x1b[2J",
        "ada lovelace",
        "..",
    ],
    ids=ascii,
)
def test_names_that_look_like_others_are_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=r"^name: "):
        check_name(name, "name")


LISTED = {
    b"1" * 40: Identity("admin", "root"),
    b"2" * 40: Identity("node", "node-1"),
    b"3" * 40: Identity("user", "ada", ("vision",)),
}


@pytest.mark.parametrize(
    ("name", "role", "problem"),
    [
        ("node-1", "user", "name: 'node-1' already names a key with role node"),
        ("root", "user", "name: 'root' already names a key with role admin"),
        ("ada", "admin", "name: 'ada' already names a key with role user"),
        ("vision", "user", "name: 'vision' is a project"),
        ("root", "admin", ""),  # a second key of the same owner
        ("bob", "user", ""),
    ],
)
def test_a_key_takes_no_name_of_another_role_or_project(
    name: str, role: str, problem: str, tmp_path: Path
) -> None:
    table = KeyTable(KeyFile(tmp_path / "keys.json"), LISTED)
    request = AddKey(public=write_keys(tmp_path, "new").public.decode(), name=name, role=role)  # type: ignore[arg-type]
    try:
        table.add(request, Identity("admin", "root"))
    except BadFieldError as error:
        found = error.message
    else:
        found = ""

    assert found == problem


@pytest.mark.parametrize("changes", [{"family": "a\x1b[2Jb"}, {"script": "a\x1b[2J.py"}], ids=str)
def test_a_job_file_has_no_control_characters(changes: dict[str, str]) -> None:
    assert [problem.field for problem in problems(job_spec(**changes))] == list(changes)
