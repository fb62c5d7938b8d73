"""Errors of invalid command lines."""

from __future__ import annotations

import pytest
from cyclopts import CycloptsError

from controlplane.cli import jobs
from controlplane.cli.main import build, usage_error
from schemas.errors import BadFieldError


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
         "--home comes before a command; options follow the command, as in `ones ps --home ...`"),
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
