"""Help, completion in a shell, and errors of invalid command lines."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Self, cast

import pytest
from cyclopts import CycloptsError

from controlplane.cli import jobs
from controlplane.cli.main import build, usage_error
from schemas.errors import BadFieldError, UnreachableError
from schemas.ids import JobId
from tests.support.client_examples import summary


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    build()(words, exit_on_error=False, result_action="return_value")
    return capsys.readouterr().out


def test_help_is_in_groups_in_the_order_of_first_use(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(["--help"], capsys)

    groups: dict[str, list[str]] = {}
    for title, command in re.findall(r"╭─ ([\w ]+) ─|^│ ([a-z]+) ", said, re.MULTILINE):
        if title:
            groups[title] = []
        else:
            groups[[*groups][-1]].append(command)
    assert groups == {
        "Start here": ["local", "init", "submit", "ps", "logs", "run", "top", "web"],
        "Jobs": [
            "attach", "cancel", "explain", "export", "fetch", "forward", "history", "hold", "pause",
            "release", "rerun", "resize", "resume", "samples", "shell", "show", "sweep", "timeline", "trace",
            "wait",
        ],
        "Cluster": ["admin", "cluster", "config", "doctor", "events", "key", "node", "policy", "project", "quota", "scheduling", "usage"],
        "Simulate": ["sim"],
        "More": ["completion"],
    }  # fmt: skip


class Cluster:
    """Stands for a client of a cluster with one live and two ended jobs."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def jobs(self, *, ended: bool) -> list[object]:
        names = ["live-3", "ended-1", "ended-2"] if ended else ["live-3"]
        return [summary(JobId(name)) for name in names]


class Away(Cluster):
    """A cluster that is not there."""

    def jobs(self, *, ended: bool) -> list[object]:
        raise UnreachableError(f"nobody says which, ended: {ended}")


@pytest.mark.parametrize(
    ("client", "words", "names"),
    [
        (Cluster, "show ", ["live-3"]), (Cluster, "show end", ["ended-1", "ended-2"]),
        (Cluster, "cancel other-9 ", ["live-3"]), (Cluster, "logs -f li", ["live-3"]),
        (Cluster, "sweep show ", ["live-3"]), (Cluster, "timeline --loss ", ["live-3"]),
        (Cluster, "ps ", []), (Away, "show ", []),
    ],
)  # fmt: skip
def test_names_of_live_jobs_are_completed_else_those_of_ended_jobs(
    client: type[Cluster], words: str, names: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("controlplane.cli.output.BlockingClient", client)

    said = printed(["__complete", *words.split(" ")], capsys).rpartition("begin\n")[2]

    assert [line.split("\t")[0] for line in said.splitlines()] == names


def script(shell: str) -> str:
    return build().generate_completion(prog_name="ones", shell=cast("Any", shell))


def test_only_flags_that_are_on_by_default_can_be_turned_off() -> None:
    assert {*re.findall(r'"(--no-[a-z-]+|--empty-[a-z-]+)"', script("bash"))} == {
        "--no-prefix",
        "--no-measure",
    }


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_accepts_the_completion_script(shell: str, tmp_path: Path) -> None:
    file = tmp_path / "script"
    file.write_text(script(shell))

    assert "__complete" in file.read_text()
    if shutil.which(shell):
        subprocess.run([shell, "-n", file], check=True)


def said(*words: str) -> str:
    with pytest.raises(CycloptsError) as error:
        build()(words, exit_on_error=False, print_error=False, result_action="return_value")
    return str(usage_error(error.value))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("show", "`ones show` needs JOB; see `ones show --help`"),
        ("config check", "`ones config check` needs FILE; see `ones config check --help`"),
        ("node lst", 'Unknown command "lst"; did you mean "list"? see `ones node --help`'),
        ("sweep foo", 'Unknown command "foo"; see `ones sweep --help`'),
        ("logs a-1 --rank", "--rank needs a value; see `ones logs --help`"),
        ("resize a-1 4", "`ones resize` does not take '4'; see `ones resize --help`"),
        ("wait a-1 --timeout x",
         'Invalid value for --timeout: unable to convert "x" into float; see `ones wait --help`'),
        ("ps --outpt", "Unknown option: --outpt; did you mean --output? see `ones ps --help`"),
        ("--home here ps",
         "--home is before the command; options follow the command, as in `ones ps --home ...`"),
        ("status a-1", "there is no command 'status'; did you mean `ones ps`?"),
        ("kill a-1", "there is no command 'kill'; did you mean `ones cancel`?"),
        ("up a-1", "there is no command 'up'; did you mean `ones local up`?"),
    ],
)  # fmt: skip
def test_an_invalid_command_line_is_answered_with_its_help_or_the_intended_command(
    words: str, expected: str
) -> None:
    assert said(*words.split()) == expected


def test_a_size_beside_auto_is_refused() -> None:
    with pytest.raises(BadFieldError, match="omit --slots, --batch and --on, or omit --auto"):
        jobs.resize("a-1", slots=2, auto=True)
