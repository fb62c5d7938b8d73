"""Rows of replies in notebooks, and for pandas."""

from __future__ import annotations

from dataclasses import asdict

import msgspec
import pytest

from controlplane.client.rows import Rows, html_table
from schemas.codec import encode
from schemas.wire.client import JobSummary
from tests.support.builders import A, B
from tests.support.client_examples import summary


def test_rows_are_a_tuple_with_records() -> None:
    rows = Rows((summary(A, slots=2), summary(B)))

    assert rows == (summary(A, slots=2), summary(B))
    assert [(row["job"], row["slots"]) for row in rows.records] == [(A, 2), (B, 0)]


def test_pandas_takes_rows_as_they_are() -> None:
    pandas = pytest.importorskip("pandas")
    jobs = summary(A, slots=2, metrics={"accuracy": 0.5}), summary(B)

    table = pandas.DataFrame(Rows(jobs))

    assert table.to_dict("records") == pandas.DataFrame(Rows(jobs).records).to_dict("records")
    assert list(table.slots) == [2, 0]
    assert list(table.columns) == [*Rows(jobs).records[0]]


def test_rows_look_like_dataclasses_and_stay_what_they_are() -> None:
    (row,) = rows = Rows((summary(A, slots=2, metrics={"accuracy": 0.5}),))

    assert asdict(row) == rows.records[0]  # type: ignore[call-overload]
    assert msgspec.msgpack.decode(encode(row), type=JobSummary) == summary(
        A, slots=2, metrics={"accuracy": 0.5}
    )


def test_a_notebook_shows_columns_with_values_and_executes_nothing() -> None:
    rows = [
        {
            "job": "a-1",
            "loss": 0.123456789,
            "why": "<script>",
            "labels": {"team": "v"},
            "end": None,
        },
        {"job": "b-2", "loss": None, "why": "", "labels": {}, "end": None},
    ]

    assert html_table(rows) == (
        "<table><thead><tr><th>job</th><th>loss</th><th>why</th><th>labels</th></tr></thead><tbody>"
        "<tr><td>a-1</td><td>0.123457</td><td>&lt;script&gt;</td><td>team=v</td></tr>"
        "<tr><td>b-2</td><td></td><td></td><td></td></tr></tbody></table>"
    )
    assert html_table(rows * 150).endswith("</table><p>and 100 more</p>")
