"""Control characters in foreign text reach no terminal, whichever command shows it."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self, cast

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.cli import main, output, terminal
from controlplane.client.client import Client
from controlplane.client.streams import OutputLine
from schemas.errors import BadFieldError, OnesError
from schemas.wire.client import Cluster, SweepDetail
from tests.support.schemas_examples import EXAMPLES
from tests.support.sizes import examples

HOME: Final = Path(main.__file__).parent
STEERS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
HOSTILE: Final = (
    "\x1b[2J\x1b[H", "\x1b]0;title\x07", "\x1b]52;c;aGk=\x07", "\x9b31m", "\u202egnp.exe",
    "all\rwell", "a\x08b", "\x7f", "\x1b[31mred", "\x00", "\u2066x", "größe 😀", "a\nb", "[red]x",
)  # fmt: skip
TEXT: Final = st.sampled_from(HOSTILE) | st.text(max_size=12)
COMMANDS: Final = (
    "ps -a", "ps -a -o quiet", "ps -a -o json", "show J", "show J -o json", "explain J", "pause J",
    "resume J", "cancel J", "events", "events -o jsonl", "node list", "node list -o quiet",
    "node drain N", "top --once", "sweep ls", "sweep show J", "sweep best J", "sweep top J --once",
    "sweep manifest J", "sweep stop J 0", "fetch J --list", "timeline", "logs J",
)  # fmt: skip


class Terminal(io.StringIO):
    """Keeps what a terminal was sent."""

    def isatty(self) -> bool:
        return True


def hostile(value: Any, texts: list[str]) -> Any:
    """The same value with other texts in all places, also of keys; ids of pages stay."""
    if isinstance(value, str):
        return value[:1] + texts[len(value) % len(texts)]
    if isinstance(value, dict):
        return {hostile(k, texts): hostile(v, texts) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(hostile(one, texts) for one in value)
    if isinstance(value, msgspec.Struct):
        fields = {f: getattr(value, f) for f in value.__struct_fields__}
        kept = {"next", "cursor", "form"}
        changed = {f: v if f in kept else hostile(v, texts) for f, v in fields.items()}
        return msgspec.structs.replace(
            value, **{**changed, **dict.fromkeys({*kept} & {*changed}, "")}
        )
    return value


class HostileClient(Client):
    """Everybody whose words a reply repeats is hostile."""

    texts: list[str]
    said = 0

    def __init__(self, *_: object) -> None:
        type(self).said = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def _call(self, request: Any, kind: type[Any], wait_s: float = 0.0) -> Any:
        reply: Any = next(one for one in EXAMPLES.values() if type(one) is kind)
        type(self).said += 1
        if hasattr(reply, "next_seq"):
            events = reply.events if self.said == 1 else ()
            return msgspec.structs.replace(reply, events=tuple(hostile(events, self.texts)))
        if isinstance(reply, SweepDetail) and request.from_trial:
            return msgspec.structs.replace(reply, trials=())
        reply = hostile(reply, self.texts)
        if kind is Cluster:
            reply = msgspec.structs.replace(reply, next_key="")  # is stored, not printed
        return reply

    async def _bulk_call(self, request: Any, kind: type[Any], wait_s: float = 0.0) -> Any:
        return await self._call(request, kind)

    async def output_pages(self, *_: object, **__: object) -> Any:
        yield [OutputLine(number % 2, text) for number, text in enumerate(self.texts)]


def sent_by(command: str, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """All that a terminal is sent by a command, on either stream."""
    screen = Terminal()
    client = type("Sure", (HostileClient,), {"texts": texts})

    async def make(*_: object) -> Client:
        return client()

    with monkeypatch.context() as patch:
        patch.setenv("TERM", "dumb")  # then what steers is nobody's but theirs
        patch.setenv("NO_COLOR", "1")
        patch.setattr("controlplane.client.blocking._make", make)
        patch.setattr(sys, "stdout", terminal.harmless_stream(screen))
        patch.setattr(sys, "stderr", terminal.harmless_stream(screen))
        try:
            main.build()(command.split(), exit_on_error=False, result_action="return_value")
        except OnesError as error:
            output.print_error(error, "table")
    return screen.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("command", [*COMMANDS])
@settings(
    max_examples=examples(15),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(texts=st.lists(TEXT, min_size=1, max_size=4))
def test_no_command_sends_foreign_control_characters_to_a_terminal(
    command: str, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = sent_by(command, texts, monkeypatch)

    assert sent
    assert not STEERS.search(re.sub(r"\x1b\[[0-9;:]*m", "", sent) if command == "logs J" else sent)


# --- the rules


@pytest.mark.parametrize(
    ("rule", "text", "shown"),
    [
        (terminal.harmless, "a\tb\n\x1b[2J\x07\x7f\x9b1m\u202ex\rgröße 😀\udc80",
         "a\tb\n\\x1b[2J\\x07\\x7f\\x9b1m\\u202ex\\rgröße 😀\\udc80"),
        (terminal.harmless_output, "\x1b[1;31mloss\x1b[0m 3\x1b[2K\x1b]0;t\x07\x1b[8m\x1bc\r",
         "\x1b[1;31mloss\x1b[0m 3\\x1b[2K\\x1b]0;t\\x07\x1b[8m\\x1bc\x1b[0m"),
    ],
)  # fmt: skip
def test_control_characters_are_escaped_and_output_keeps_its_colours(
    rule: Callable[[str], str], text: str, shown: str
) -> None:
    assert rule(text) == shown


@given(st.text() | st.sampled_from(HOSTILE))
def test_plain_text_is_unchanged_and_no_control_character_is_left(text: str) -> None:
    assert not terminal.CONTROL_CHARACTER.search(terminal.harmless(text))
    if not terminal.CONTROL_CHARACTER.search(text):
        assert terminal.harmless(text) == terminal.harmless_output(text) == text


@pytest.mark.parametrize("options", ["", "--raw"])
def test_output_to_a_pipe_is_unchanged(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Terminal, "isatty", lambda _: bool(options))

    assert sent_by(f"logs J {options} --no-prefix", [*HOSTILE], monkeypatch) == (
        "".join(f"{line}\n" for line in HOSTILE)
    )


def test_json_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["\x1b[2J\x9b\u202e\x7f\r"]

    said = json.loads(sent_by("ps -a -o json", texts, monkeypatch))

    assert said[0]["reason"][1:] == texts[0]


def test_the_commands_own_colours_and_moves_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", terminal.harmless_stream(screen))

    output.print_table(["state"], [["running"], ["\x1b[31mfailed"]])
    terminal.drawn(sys.stdout).write("\x1b[H")

    assert "\x1b[32mrunning   \x1b[0m" in screen.getvalue()
    assert "\\x1b[31mfailed" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[H")


def test_an_error_repeats_no_control_character(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal.harmless_stream(screen))

    output.print_error(BadFieldError("no job '\x1b[2J'", "look"), "table")

    assert screen.getvalue() == "ones: no job '\\x1b[2J'; look\n"


@pytest.mark.slow
def test_the_program_escapes_control_characters_of_its_arguments() -> None:
    command = [sys.executable, "-P", "-m", "controlplane.cli.main", "no\x1b[2Jsuch"]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "\\x1b[2Jsuch" in done.stderr


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("utf-8", "gr\u00fcn \u640d \u2500\u252c\u2502\u2588\u2591 \u2026\n"),
        ("latin-1", "gr\u00fcn ? -+|#. .\n"),
        ("ascii", "gr?n ? -+|#. .\n"),
    ],
)
def test_missing_characters_are_replaced_by_similar_ones(encoding: str, shown: str) -> None:
    behind = io.BytesIO()
    stream = terminal.harmless_stream(io.TextIOWrapper(behind, encoding, write_through=True))

    stream.write("gr\u00fcn \u640d \u2500\u252c\u2502\u2588\u2591 \u2026\n")
    terminal.drawn(stream).write("\u2500\n")

    assert behind.getvalue().decode(encoding).startswith(shown)


def test_a_table_of_another_encoding_has_rules_of_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    behind = io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", terminal.harmless_stream(behind))

    output.print_table(["job"], [["gr\u00fcn"]])

    assert cast("Any", behind.buffer).getvalue().decode("ascii") == "job \n----\ngr?n\n"


def test_an_undecodable_name_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    for name in ("signal.signal", "gc.set_threshold"):
        monkeypatch.setattr(f"controlplane.cli.main.{name}", lambda *_: None)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(main, "build", lambda: lambda **_: "gr\udcff".encode())

    with pytest.raises(SystemExit, match="2"):
        main.main()

    assert screen.getvalue() == (
        "ones: 'gr\\udcff' cannot be encoded in utf-8; use a UTF-8 locale, such as LC_ALL=C.UTF-8\n"
    )


def test_no_module_writes_to_a_terminal_directly() -> None:
    own = {"terminal.py", "harmless_console.py"}
    beside = re.compile(r"[^_]Console\(|sys\.__std(out|err)__|std(out|err)\.buffer|os\.write\(")
    sources = [path for path in HOME.rglob("*.py") if path.name not in own]

    assert [path.name for path in sources if beside.search(path.read_text())] == []
    assert terminal.terminal_console().file is sys.stdout
