"""What is said of command lines that cannot be understood."""

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
        (["show"], "`ones show` needs JOB; see `ones show --help`"),
        (["config", "check"], "`ones config check` needs FILE; see `ones config check --help`"),
        (["node", "lst"], 'Unknown command "lst"; did you mean "list"? see `ones node --help`'),
        (["sweep", "foo"], 'Unknown command "foo"; see `ones sweep --help`'),
        (["logs", "a-1", "--rank"], "--rank needs a value; see `ones logs --help`"),
        (["resize", "a-1", "4"], "`ones resize` does not take '4'; see `ones resize --help`"),
        (
            ["wait", "a-1", "--timeout", "x"],
            'Invalid value for --timeout: unable to convert "x" into float; see `ones wait --help`',
        ),
        (
            ["ps", "--outpt"],
            "Unknown option: --outpt; did you mean --output? see `ones ps --help`",
        ),
    ],
)
def test_a_command_that_cannot_be_understood_names_itself_what_it_lacks_and_its_help(
    words: list[str], expected: str
) -> None:
    assert said(*words) == expected


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("status", "ps"),
        ("kill", "cancel"),
        ("stop", "cancel"),
        ("squeue", "ps"),
        ("up", "local up"),
    ],
)
def test_the_word_of_another_tool_is_answered_with_the_command_that_does_it(
    word: str, meant: str
) -> None:
    assert said(word, "a-1") == f"there is no command {word!r}; did you mean `ones {meant}`?"


def test_a_size_beside_auto_is_refused_and_not_dropped() -> None:
    with pytest.raises(BadFieldError, match="omit --slots, --batch and --on, or omit --auto"):
        jobs.resize("a-1", slots=2, auto=True)


def test_an_option_before_the_command_is_told_where_it_belongs() -> None:
    assert said("--home", "here", "ps") == (
        "--home comes before a command; options follow the command, as in `ones ps --home ...`"
    )
