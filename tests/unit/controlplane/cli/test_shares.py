"""`ones top --by`: the accounts that may be seen, summed by user or by project."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from controlplane.cli.output import Common
from controlplane.cli.quota import By, show_by
from schemas.sharing import Sharing
from schemas.wire.client import AccountShare, SharingInfo

ACCOUNTS = (
    AccountShare(project="vision", user="ann", slots=2, running=1, waiting=3, usage_s=3600.0),
    AccountShare(project="speech", user="ann", slots=1, running=1, waiting=0, usage_s=1800.0),
    AccountShare(project="speech", user="bob", slots=4, running=2, waiting=0, usage_s=0.0),
)


@pytest.mark.parametrize(
    ("by", "rows"),
    [
        ("user", [("bob", 4.0, 2.0, 0.0, 0.0), ("ann", 3.0, 2.0, 3.0, 1.5)]),
        ("project", [("speech", 5.0, 3.0, 0.0, 0.5), ("vision", 2.0, 1.0, 3.0, 1.0)]),
    ],
)
def test_each_user_or_project_has_a_row_those_with_most_slots_first(
    capsys: pytest.CaptureFixture[str], by: By, rows: list[tuple[Any, ...]]
) -> None:
    info = SharingInfo(sharing=Sharing(), slots=8, accounts=ACCOUNTS)
    client = cast("Any", SimpleNamespace(sharing=lambda: info))

    show_by(client, by, Common(output="json"))

    names = (by, "slots", "running", "waiting", "used_h")
    shown = msgspec.json.decode(capsys.readouterr().out)
    assert shown == [dict(zip(names, row, strict=True)) for row in rows]
