"""Errors for an unknown job suggest a similar name."""

from __future__ import annotations

import sys
from typing import Any, cast

import msgspec
import pytest

from controlplane.cli import main
from controlplane.client import Client
from controlplane.client.connection import ClusterConnection
from schemas.errors import UnknownJobError, suggestion
from schemas.wire.client import Jobs, JobSummary, ListJobs
from tests.support.schemas_examples import EXAMPLES

A_JOB = next(one for one in EXAMPLES.values() if isinstance(one, JobSummary))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("digts-1", "did you mean digits-1? look"),
        ("digits", "did you mean digits-12? look"),
        ("a", "did you mean a-1? look"),
        ("nobody-1", "look"),
    ],
)
def test_a_hint_names_the_most_similar_name_with_the_highest_number(name: str, hint: str) -> None:
    assert suggestion(name, ["digits-1", "a-1", "digits-2", "digits-12"], "look") == hint


def test_only_the_last_of_many_names_are_compared() -> None:
    names = ["digits-1", *(f"other-{number}" for number in range(1000))]

    assert suggestion("digts-1", names, "look") == "look"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    """A client of a cluster with more ended jobs than a page holds."""

    async def ask(_: object, _channel: object, request: Any, _wait_s: float) -> Jobs:
        if isinstance(request, ListJobs) and not request.cursor:
            name = "ended-1" if request.ended else "digits-1"
            return Jobs(jobs=(msgspec.structs.replace(A_JOB, job=name),), next="more")
        raise UnknownJobError(getattr(request, "job", ""))

    monkeypatch.setattr(ClusterConnection, "_ask", ask)
    client = Client.__new__(Client)
    client._calls = cast("Any", "open")
    return client


async def test_names_for_a_suggestion_take_two_pages_and_programs_get_none(client: Client) -> None:
    assert await client.some_job_names() == ["ended-1", "digits-1"]
    with pytest.raises(UnknownJobError) as error:
        await client.job("digist-1")

    assert str(error.value) == "no job 'digist-1'; `ones ps --all` lists every job"


def test_the_command_line_suggests_a_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    homes: list[str] = []

    async def names(home: str) -> list[str]:
        homes.append(home)
        return ["digits-1"]

    def command(**_: object) -> None:
        raise UnknownJobError("digist-1")

    monkeypatch.setattr(main, "_job_names", names)
    monkeypatch.setattr(main, "build", lambda: command)
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)
    monkeypatch.setattr(main.gc, "set_threshold", lambda _: None)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", ["ones", "show", "digist-1", "--home=/srv/c"])

    with pytest.raises(SystemExit):
        main.main()

    assert (homes, capsys.readouterr().err) == (
        ["/srv/c"],
        "ones: no job 'digist-1'; did you mean digits-1? `ones ps --all` lists every job\n",
    )
