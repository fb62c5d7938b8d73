"""Output of commands for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from controlplane.cli import jobs, main, output
from controlplane.cli.output import Common, print_data, print_json, print_table, with_all_keys
from controlplane.client.formats import second
from controlplane.client.streams import OutputLine
from schemas.errors import BadFieldError
from schemas.ids import JobId
from schemas.wire.client import Explanation, JobDetail, JobState
from tests.support.schemas_examples import EXAMPLES
from tests.unit.controlplane.cli.test_terminal import HostileClient


@pytest.mark.parametrize(
    "value",
    [[], [{}, []], {"a": [1, 2.5, None, True, 'é\n"x/'], "b": {"c": [[], [1]]}}, [1e300, 2**53],
     [float("nan"), float("inf")]],
)  # fmt: skip
def test_json_is_laid_out_as_json_dumps_does(
    value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    print_json(value)

    assert capsys.readouterr().out == json.dumps(value, indent=2) + "\n"


@pytest.mark.parametrize(
    "rows",
    [
        [["n1", "up", 3, "a-1, b-2"], ["n22", "lost", 10, ""]], [["n1", "up", 3, "größer"]],
        [["n1", "up", 3, "x" * 250]], [["n1", "up", 3, "two\nlines"]], [],
    ],
    ids=["usual", "other letters", "too wide", "lines", "none"],
)  # fmt: skip
def test_a_plain_table_is_laid_out_as_rich_does(
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
    [(0.0, "1970-01-01T00:00:00Z"), (1e18, "9999-12-31T23:59:59Z"),
     (float("inf"), "9999-12-31T23:59:59Z"), (-1e18, "1970-01-01T00:00:00Z"),
     (float("nan"), "1970-01-01T00:00:00Z")],
)  # fmt: skip
def test_a_time_outside_the_calendar_is_shown_as_the_nearest(time_s: float, shown: str) -> None:
    assert second(time_s) == shown


# --- json is one document, jsonl is a document on each line

ONE = (  # commands that print one thing
    "top", "show J", "resize J --slots 1", "pause J", "resume J", "cancel J",
    "node drain N", "node undrain N", "sweep show J --trial 0",
    "sweep top J", "sweep stop J 0", "sweep manifest J",
)  # fmt: skip
MANY = (  # commands that print a list, or what comes
    "ps -a", "logs J", "logs J -f", "samples J", "events", "node list", "timeline", "key list",
    "cancel J K", "sweep ls", "sweep stop J 0 1",
)  # fmt: skip


def printed(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    client = type("Honest", (HostileClient,), {"texts": ["x"]})

    async def make(*_: object) -> HostileClient:
        made: HostileClient = client()
        return made

    monkeypatch.setattr("controlplane.client.blocking._make", make)
    main.build()(command.split(), exit_on_error=False, result_action="return_value")
    said = capsys.readouterr()
    sys.stderr.write(said.err)
    return said.out


@pytest.mark.parametrize("command", [*ONE, *MANY])
def test_json_is_one_document_and_jsonl_has_its_items_as_lines(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(printed(f"{command} -o json", monkeypatch, capsys))
    lines = printed(f"{command} -o jsonl", monkeypatch, capsys).splitlines()

    assert type(document) is (dict if command in ONE else list)
    assert [json.loads(line) for line in lines] == ([document] if command in ONE else document)


def test_an_endless_stream_of_events_is_not_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "BlockingClient", lambda _: pytest.fail("asked"))

    with pytest.raises(BadFieldError, match="use -o jsonl"):
        jobs.events(follow=True, common=Common(output="json"))


def test_a_line_is_printed_as_soon_as_its_item_arrives(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def items() -> Iterator[int]:
        for number in (1, 2, 3):
            seen.append(capsys.readouterr().out)
            yield number

    print_data(items(), "jsonl")

    assert seen == ["", "1\n", "2\n"]


def test_rows_of_one_table_have_the_same_keys() -> None:
    assert with_all_keys([{"a": 1}, {"b": 2}]) == [{"a": 1, "b": None}, {"a": None, "b": 2}]


NO_OUTPUT = "ones: {} has no output; `ones show J` prints its state\n".format


@pytest.mark.parametrize(
    ("state", "command", "said"),
    [
        ("queued", "logs J", "ones: J is queued: no slot is free\n"),
        ("running", "logs J", NO_OUTPUT("J")),
        ("running", "logs J --rank 7", NO_OUTPUT("rank 7 of J")),
        ("running", "logs J --grep x", ""),
    ],
)
def test_missing_output_is_explained(
    state: str, command: str, said: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    async def now(*_: object) -> JobState:
        return JobState(job=JobId("J"), state=state, reason="no slot is free")

    async def silent(*_: object, **__: object) -> AsyncIterator[list[OutputLine]]:
        yield []

    async def plain(*_: object) -> JobDetail:
        detail = msgspec.convert(EXAMPLES["client.job_detail.3"], JobDetail)
        return replace(detail, spec=replace(detail.spec, array=msgspec.UNSET))

    monkeypatch.setattr(HostileClient, "state", now)
    monkeypatch.setattr(HostileClient, "job", plain)
    monkeypatch.setattr(HostileClient, "output_pages", silent)

    printed(command, monkeypatch, capsys)

    assert capsys.readouterr().err == said


@pytest.mark.parametrize("command", ["node list", "timeline", "top --once", "show J", "explain J"])
def test_another_reader_states_its_width_in_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "50")

    lines = printed(command, monkeypatch, capsys).splitlines()

    assert [line for line in lines if line.startswith("─") and len(line) > 50] == []
    assert [line for line in lines if "node-1/0" in line and len(line) > 50] == []


def test_an_order_during_a_change_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    detail = msgspec.convert(EXAMPLES["client.job_detail.3"], JobDetail)
    pausing = msgspec.structs.replace(detail.summary, state="rescaling", reason="paused by ann")

    async def resumed(*_: object, **__: object) -> JobDetail:
        return msgspec.structs.replace(detail, summary=pausing)

    async def explained(*_: object) -> Explanation:
        told = msgspec.convert(EXAMPLES["client.explanation.1"], Explanation)
        order = msgspec.structs.replace(
            told.decisions[0], outcome="ordered", reason="ann ended the pause"
        )
        return msgspec.structs.replace(told, decisions=(order,))

    monkeypatch.setattr(HostileClient, "resume", resumed)
    monkeypatch.setattr(HostileClient, "explain", explained)

    said = printed("resume J", monkeypatch, capsys)

    job = pausing.job
    assert said == (
        f"{job} rescaling: paused by ann\n{job}: ann ended the pause; starts after the current change\n"
    )
