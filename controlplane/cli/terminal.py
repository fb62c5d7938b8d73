"""The output of all commands to terminals, with control characters in foreign text escaped."""

from __future__ import annotations

import codecs
import io
import os
import re
import shutil
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console
    from rich.segment import Segment

# Control characters of terminals and text direction: C0 except tab and newline, DEL, C1, line and
# paragraph separators, direction marks, overrides and isolates; and surrogates.
CONTROL_CHARACTERS: Final = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff"
)
CONTROL_CHARACTER: Final = re.compile(f"[{CONTROL_CHARACTERS}]")
COLOUR: Final = re.compile(r"\x1b\[[0-9;:]{0,40}m")  # SGR: colours, bold; no cursor movement
RESET_STYLE: Final = "\x1b[0m"
SIMILAR: Final = dict(zip("─━═╌│┃║▁▂▃▄▅▆▇█▒░●○◇·…", "----|||_.-=+*%#:.*ox..", strict=True))
FIRST_OF_BOX, LAST_OF_BOX = "\u2500", "\u257f"  # box drawing, except the characters above


def harmless(text: str) -> str:
    r"""Replace control characters, except tab and newline, by visible escapes such as `\x1b`."""
    return CONTROL_CHARACTER.sub(_escape, text)


def harmless_output(line: str) -> str:
    """Escape control characters in a line of a script's output, but keep its colours."""
    line = line.removesuffix("\r")
    if "\x1b" not in line:
        return harmless(line)
    between, colours = COLOUR.split(line), COLOUR.findall(line)
    parts = [harmless(between[0])]
    for colour, text in zip(colours, between[1:], strict=True):
        parts += [colour, harmless(text)]
    return "".join([*parts, RESET_STYLE] if colours else parts)


def write_raw(descriptor: int, data: bytes) -> None:
    """Write all output of a user's own program to a terminal that is attached to it."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _escape(found: re.Match[str]) -> str:
    number = ord(found.group())
    if number == ord("\r"):
        return "\\r"
    return f"\\x{number:02x}" if number <= 0xFF else f"\\u{number:04x}"  # noqa: PLR2004


def _replace_missing(error: UnicodeError) -> tuple[str, int]:
    """Replace unencodable characters with similar ASCII, as an error handler of `codecs`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(
        SIMILAR.get(char, "+" if FIRST_OF_BOX <= char <= LAST_OF_BOX else "?") for char in lacking
    ), error.end


codecs.register_error("ones-like", _replace_missing)


class HarmlessStream:
    """Text stream that escapes control characters in everything written to it.

    The program's own colours and cursor movements are written to the underlying stream directly.
    """

    def __init__(self, drawn: TextIO) -> None:
        self.rich_proxied_file = drawn  # the attribute that rich looks for

    def write(self, text: str) -> int:
        """Write `text` with control characters escaped."""
        self.rich_proxied_file.write(harmless(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of `lines` with control characters escaped."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the underlying stream."""
        return getattr(self.rich_proxied_file, name)


def drawn(stream: TextIO) -> TextIO:
    """Return the stream under a `HarmlessStream`, for text that is already escaped."""
    behind: TextIO = getattr(stream, "rich_proxied_file", stream)
    return behind


def harmless_stream(stream: TextIO) -> TextIO:
    """Return a `HarmlessStream` that writes to `stream`.

    Characters that the encoding lacks are replaced by similar ASCII characters, or by `?`.
    """
    behind = drawn(stream)
    if isinstance(behind, io.TextIOWrapper):
        behind.reconfigure(errors="ones-like")
    return cast("TextIO", HarmlessStream(behind))


def width_of(out: TextIO) -> int | None:
    """Return the width of `out` in columns, from COLUMNS or its terminal, or None if unknown."""
    if out.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return shutil.get_terminal_size().columns
    return None


def terminal_console(width: int | None = None, *, on_stderr: bool = False) -> Console:
    """Return a console of rich that escapes control characters in texts, but not its own codes."""
    from rich import console, segment  # noqa: PLC0415 - slow to import and seldom needed

    class HarmlessConsole(console.Console):
        def _render_buffer(self, buffer: Iterable[Segment]) -> str:
            safe = [
                one if one.control else segment.Segment(harmless(one.text), one.style)
                for one in buffer
            ]
            return super()._render_buffer(safe)

    out = drawn(sys.stderr if on_stderr else sys.stdout)
    return HarmlessConsole(width=width, file=out, highlight=False)
