"""Commands on several selected jobs, options of relations, and the history."""

from __future__ import annotations

import json
import sys
from typing import Any, Self

import pytest

from controlplane.cli import submit, usage
from controlplane.cli.job_list import Filters
from controlplane.cli.job_options import JobOptions
from controlplane.cli.output import Common
from schemas.errors import BadFieldError
from schemas.ids import JobId
from schemas.wire.client import Jobs, JobSummary
from tests.support import schemas_examples
from tests.support.builders import job_spec

SUMMARY: JobSummary = schemas_examples._SUMMARY


class Client:
    """Stands for a client of a cluster with three jobs."""

    def __init__(self, *_: object) -> None:
        self.asked: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def find_jobs(self, **filters: Any) -> Jobs:
        self.asked.append(filters)
        names = ["a-1", "b-2", "c-3"] if filters["user"] != "nobody" else []
        return Jobs(jobs=tuple(_job(name) for name in names[: 1 if filters["labels"] else 3]))

    def history(self, most: int, **filters: Any) -> tuple[JobSummary, ...]:
        return tuple(
            _job(name, user=user, slot_s=hours * 3600.0, exit_code=code)
            for name, user, hours, code in (("c-3", "ann", 2.0, 0), ("b-2", "bob", 3.5, 1))
        )[:most]


def _job(name: str, **fields: Any) -> JobSummary:
    plain = {field: getattr(SUMMARY, field) for field in SUMMARY.__struct_fields__}
    return JobSummary(**{**plain, "job": JobId(name), **fields})


def chosen(*jobs: str, yes: bool = False, **filters: Any) -> list[str]:
    client: Any = Client()
    return [*submit._chosen(client, jobs, Filters(**filters), "cancel", yes=yes)]


def test_named_jobs_are_taken_without_a_question() -> None:
    assert chosen("a-1", "x-9") == ["a-1", "x-9"]


def test_one_selected_job_or_several_with_yes_are_taken() -> None:
    assert chosen(label=["team=vision"]) == ["a-1"]
    assert chosen(user="ann", yes=True) == ["a-1", "b-2", "c-3"]


@pytest.mark.parametrize(
    ("jobs", "filters", "said"),
    [
        ((), {}, "`ones cancel` needs JOB; or --state, --user, --name, --older or --label"),
        (("a-1",), {"user": "ann"}, "jobs are named and selected"),
        ((), {"user": "nobody"}, "no job is selected"),
        ((), {"user": "ann"}, "3 jobs are selected; `ones cancel --yes`"),
        ((), {"older": "soon"}, "--older 'soon' is not a duration"),
        ((), {"label": ["team"]}, "label: 'team' has no =; write KEY=VALUE"),
    ],
)
def test_other_selections_are_refused(
    jobs: tuple[str, ...], filters: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadFieldError) as refused:
        chosen(*jobs, **filters)

    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(("answer", "expected"), [("y\n", 3), ("n\n", 0), ("", 0)])
def test_a_terminal_is_asked_before_several_jobs(
    answer: str, expected: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdin, "readline", lambda: answer, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)

    assert len(chosen(user="ann")) == expected

    said = capsys.readouterr().err
    assert said.startswith("cancel 3 jobs (a-1, b-2, c-3)? [y/N] ")
    assert ("nothing was changed" in said) is not bool(expected)


def test_filters_are_passed_on() -> None:
    filters = Filters(state="running, queued", older="2h", label=["team=vision", "x=1=2"])

    assert filters.fields() == {
        "states": ["running", "queued"], "user": "", "name": "", "older_s": 7200.0,
        "labels": {"team": "vision", "x": "1=2"},
    }  # fmt: skip


def test_options_replace_fields_and_add_labels(tmp_path: Any) -> None:
    (tmp_path / "train.py").touch()
    spec = job_spec(workdir=str(tmp_path), labels={"team": "a", "run": "1"}, after=("x-1",))
    options = JobOptions(after="ok:a-1,any:b-2", label=["team=b"], array="0-9%3", not_before="+2h")

    found = options.applied(spec)

    assert (found.after, found.array, found.not_before) == (("ok:a-1", "any:b-2"), "0-9%3", "+2h")
    assert found.labels == {"team": "b", "run": "1"}
    assert JobOptions().applied(spec) is spec
    with pytest.raises(BadFieldError, match="array: 1000000 elements, at most 10000"):
        JobOptions(array="0-999999").applied(spec)


def test_the_history_ends_with_sums(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(usage, "BlockingClient", Client)

    usage.history()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[2][:6] == ["c-3", "running", "0", "2.00", "ann", "vision"]
    assert ["bob", "1", "3.50"] in lines
    assert ["vision", "2", "5.50"] in lines

    usage.history(last=1, common=Common(output="json"))
    said = json.loads(capsys.readouterr().out)
    assert [row["job"] for row in said["jobs"]] == ["c-3"]
    assert said["sums"]["user"] == [{"user": "ann", "jobs": 1, "slot_hours": 2.0}]
