"""What others wrote, made harmless before a terminal reads it: the one place for all commands.

rich's console, with the texts of what it draws made harmless.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import shutil
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

from rich.console import Console
from rich.segment import Segment

if TYPE_CHECKING:
    from rich.console import Console


# What steers a terminal, or turns a line around: C0 but tab and newline, DEL, C1, line and
# paragraph separators, marks, overrides and isolates of direction; and halves of characters.
STEERING: Final = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff"
)
HARMFUL: Final = re.compile(f"[{STEERING}]")
COLOUR: Final = re.compile(r"\x1b\[[0-9;:]{0,40}m")  # SGR: colours, bold; moves nothing
PLAIN_AGAIN: Final = "\x1b[0m"
LIKE: Final = dict(zip("─━═╌│┃║▁▂▃▄▅▆▇█▒░●○◇·…", "----|||_.-=+*%#:.*ox..", strict=True))
FIRST_OF_BOX, LAST_OF_BOX = "\u2500", "\u257f"  # corners and crossings, but for what is above


def harmless(text: str) -> str:
    r"""`text` with what steers a terminal as visible escapes, such as `\x1b`.

    Args:
        text: that others wrote. Its tabs and newlines stay.
    """
    return HARMFUL.sub(_visible, text)


def harmless_output(line: str) -> str:
    """A line of a script's output: its colours stay, whatever else steers a terminal does not.

    Args:
        line: as the script wrote it, without its newline.
    """
    line = line.removesuffix("\r")
    if "\x1b" not in line:
        return harmless(line)
    between, colours = COLOUR.split(line), COLOUR.findall(line)
    parts = [harmless(between[0])]
    for colour, text in zip(colours, between[1:], strict=True):
        parts += [colour, harmless(text)]
    return "".join([*parts, PLAIN_AGAIN] if colours else parts)


def _visible(found: re.Match[str]) -> str:
    number = ord(found.group())
    if number == ord("\r"):
        return "\\r"
    return f"\\x{number:02x}" if number <= 0xFF else f"\\u{number:04x}"  # noqa: PLR2004


def _like(error: UnicodeError) -> tuple[str, int]:
    """Replace what the stream's encoding lacks by ASCII of the same width, for `codecs`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(
        LIKE.get(char, "+" if FIRST_OF_BOX <= char <= LAST_OF_BOX else "?") for char in lacking
    ), error.end


codecs.register_error("ones-like", _like)


class HarmlessStream:
    """A stream for people: whatever is written to it is made harmless.

    Args:
        drawn: the stream itself, for what we draw there: colours, and moves of the cursor.
    """

    def __init__(self, drawn: TextIO) -> None:
        self.rich_proxied_file = drawn  # as rich looks for it: it draws there

    def write(self, text: str) -> int:
        """Write `text`, made harmless."""
        self.rich_proxied_file.write(harmless(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of `lines`."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the stream's own."""
        return getattr(self.rich_proxied_file, name)


def drawn(stream: TextIO) -> TextIO:
    """The stream behind one for people, for lines whose foreign parts are harmless already."""
    behind: TextIO = getattr(stream, "rich_proxied_file", stream)
    return behind


def harmless_stream(stream: TextIO) -> TextIO:
    """A stream for people before `stream`; everything that has none of its own writes to it.

    Characters missing from the encoding are replaced by similar ASCII, or `?`.
    """
    behind = drawn(stream)
    if isinstance(behind, io.TextIOWrapper):
        behind.reconfigure(errors="ones-like")
    return cast("TextIO", HarmlessStream(behind))


def width_of(out: TextIO) -> int | None:
    """Columns of a terminal, or what COLUMNS says of another reader; None: it says nothing."""
    if out.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return shutil.get_terminal_size().columns
    return None


def terminal_console(width: int | None = None, *, on_stderr: bool = False) -> Console:
    """Where tables and dashboards are drawn: their texts are made harmless, their styles stay.

    Args:
        width: columns; None: of the terminal.
    """
    out = drawn(sys.stderr if on_stderr else sys.stdout)
    return HarmlessConsole(width=width, file=out, highlight=False)


class HarmlessConsole(Console):
    """Draws as rich does; control codes are rich's own."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        safe = [one if one.control else Segment(harmless(one.text), one.style) for one in buffer]
        return super()._render_buffer(safe)
