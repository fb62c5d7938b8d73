"""What commands print for programs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controlplane.cli import output
from controlplane.cli.output import print_json, print_table, second


@pytest.mark.parametrize(
    "value",
    [
        [],
        [{}, []],
        {"a": [1, 2.5, None, True, 'é\n"x/'], "b": {"c": [[], [1]]}},
        [1e300, 2**53],
        [float("nan"), float("inf")],
    ],
    ids=["nothing", "empty", "nested", "large", "no number"],
)
def test_json_is_laid_out_as_ever(value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    print_json(value)

    assert capsys.readouterr().out == json.dumps(value, indent=2) + "\n"


@pytest.mark.parametrize(
    "rows",
    [
        [["n1", "up", 3, "a-1, b-2"], ["n22", "lost", 10, ""]],
        [["n1", "up", 3, "größer"]],
        [["n1", "up", 3, "x" * 250]],
        [["n1", "up", 3, "two\nlines"]],
        [],
    ],
    ids=["usual", "other letters", "too wide", "lines", "none"],
)
def test_a_table_is_laid_out_the_same_whether_at_once_or_with_care(
    rows: list[list[object]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = ["node", "state", "slots", "jobs"]
    print_table(columns, rows)
    at_once = capsys.readouterr().out
    monkeypatch.setattr(output, "_plain_table", lambda *_: "")
    print_table(columns, rows)

    assert capsys.readouterr().out == at_once


@pytest.mark.parametrize(
    ("time_s", "shown"),
    [
        (0.0, "1970-01-01T00:00:00Z"),
        (1e18, "9999-12-31T23:59:59Z"),
        (float("inf"), "9999-12-31T23:59:59Z"),
        (-1e18, "1970-01-01T00:00:00Z"),
        (float("nan"), "1970-01-01T00:00:00Z"),
    ],
)
def test_a_time_that_no_calendar_has_is_shown_as_the_nearest(time_s: float, shown: str) -> None:
    assert second(time_s) == shown
