"""Output of commands: tables, JSON, errors, exit codes, and the options of every command."""

from __future__ import annotations

import enum
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from cyclopts import Parameter

from controlplane.cli.terminal import harmless, terminal_console, width_of
from controlplane.client import BlockingClient
from schemas.errors import BadFieldError, OnesError, UnavailableError, UnreachableError

T = TypeVar("T")


def print_error(error: OnesError, output: str) -> None:
    """Print an error as one line to stderr.

    With JSON output, the error is also printed to stdout, unless stdout is a terminal.
    """
    if output in {"json", "jsonl"}:
        line = json.dumps({"error": error_body(error)})
        if not sys.stdout.isatty():
            sys.stdout.write(line + "\n")
        sys.stderr.write(line + "\n")
    else:
        sys.stderr.write(f"ones: {' '.join(str(error).split())}\n")


def error_body(error: OnesError) -> dict[str, str | None]:
    """Return the fields of an error for JSON."""
    body = {"code": error.code, "message": error.message, "hint": error.hint}
    return {**body, "field": error.field or None}


def plain(value: Any) -> Any:
    """Convert `value` for JSON; the tags of wire messages are removed."""

    def untagged(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                k: untagged(v)
                for k, v in value.items()
                if not (k == "type" and isinstance(v, str) and v.startswith(("client.", "feed.")))
            }
        return [untagged(v) for v in value] if isinstance(value, list | tuple) else value

    return untagged(msgspec.to_builtins(value))


def print_json(value: Any) -> None:
    """Print a value as one indented JSON document."""
    built = plain(value)
    try:  # the indentation of `json` takes a second for 10,000 jobs
        text = msgspec.json.format(json.dumps(built), indent=2)
    except msgspec.DecodeError:  # NaN or infinity
        text = json.dumps(built, indent=2)
    sys.stdout.write(f"{text}\n")


def print_line(value: Any) -> None:
    """Print a value as one line of JSON and flush stdout."""
    sys.stdout.write(json.dumps(plain(value)) + "\n")
    sys.stdout.flush()


def print_data(value: Any, output: str) -> None:
    """Print a value for programs: as one document (json), or as one line for each item (jsonl).

    With jsonl, the items of an iterator are printed as they arrive. With json, all items are
    printed together as one list.
    """
    if output == "jsonl":
        for row in value if isinstance(value, list | tuple | Iterator) else (value,):
            print_line(row)
    else:
        print_json([*value] if isinstance(value, Iterator) else value)


def say(
    common: Common, data: Any, *lines: str, quiet: Iterable[str] = (), rows: Any = None
) -> None:
    """Print a result: `data` with JSON output, `quiet` with `-o quiet`, else `lines`.

    If `rows` are given, they replace `data` with `-o jsonl`.
    """
    if common.in_json:
        print_data(data if rows is None or common.output == "json" else rows, common.output)
    else:
        shown = quiet if common.output == "quiet" else lines
        sys.stdout.writelines(f"{line}\n" for line in shown)


def say_table(
    common: Common,
    data: Any,
    names: Iterable[object],
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
) -> None:
    """Print a table, or `data` with JSON output, or the names alone with `-o quiet`."""
    if common.in_json or common.output == "quiet":
        say(common, data, quiet=map(str, names))
    else:
        print_table(columns, rows)


def readings(read: Callable[[], T], pause: Callable[[float], None]) -> Iterator[tuple[T, str]]:
    """Yield a new value every second, with an empty note.

    While the controller does not reply after the first value, yield the last value with a note.
    """
    value, note = read(), ""
    while True:
        yield value, note
        pause(REFRESH_S)
        try:
            value, note = read(), ""
        except (UnreachableError, UnavailableError):
            note = ABSENT_NOTE


def fitting(wide: Mapping[str, int], width: int | None, omit: Iterable[str], gap: int) -> list[str]:
    """Return the columns that fit into `width`, or all columns if `width` is None.

    If not all columns fit, columns are omitted in the order of `omit`. `wide` maps each column to
    its width, and `gap` is the distance between two columns.
    """
    kept = list(wide)
    for name in omit:
        if width is None or sum(wide[column] + gap for column in kept) - gap <= width:
            break
        kept = [column for column in kept if column != name]
    return kept


def with_all_keys(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the union of their keys; missing values are None."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return [{**keys, **row} for row in rows]


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table for people, coloured on a terminal; columns in `NUMBERS` are right-aligned."""
    if not sys.stdout.isatty() and (plainly := _plain_table(columns, rows)):
        sys.stdout.write(plainly)
        return
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415 - rich is slow to import and seldom needed
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        right = column in NUMBERS
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell), style=STYLES.get(str(cell), "")) for cell in row))
    terminal_console(width_of(sys.stdout) or DEFAULT_WIDTH).print(table)


def _plain_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format the table without rich, which is slow for many rows. Return "" if rich is needed."""
    cells = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    wide = sum(widths) + len(GAP) * (len(widths) - 1)
    pads = [str.rjust if column in NUMBERS else str.ljust for column in columns]
    text = [
        GAP.join(pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True))
        for row in cells
    ]
    whole = "\n".join([text[0], "─" * wide, *text[1:], ""])
    usual = all(line.isascii() and line.isprintable() for line in text)
    return whole if usual and wide <= (width_of(sys.stdout) or DEFAULT_WIDTH) else ""


DEFAULT_WIDTH: Final = 200  # columns if the width is unknown
REFRESH_S: Final = 1.0  # between updates of live views
ABSENT_AFTER_S: Final = 2.0  # timeout of a request in live views
ABSENT_NOTE: Final = "the controller does not reply, retrying"
GAP: Final = "   "
NUMBERS: Final = frozenset({"slots", "free", "batch", "lr", "epoch", "samples/s", "seq", "loss"})

STYLES: Final = {  # rich styles of job and node states
    "running": "green", "up": "green", "succeeded": "bold green", "failed": "bold red",
    "lost": "bold red", "cancelled": "magenta", "rejected": "magenta", "suspect": "yellow",
    "unhealthy": "red", "draining": "yellow", "drained": "yellow", "paused": "yellow",
    "queued": "cyan", "starting": "cyan",
}  # fmt: skip
UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}  # seconds

COLOURS: Final = {  # SGR codes of job states; 1 is bold
    "running": "32", "rescaling": "32", "succeeded": "1;32", "failed": "1;31", "cancelled": "35",
    "rejected": "35", "paused": "33", "queued": "36", "starting": "36",
}  # fmt: skip


def seconds_of(text: str, option: str) -> float:
    """Parse a duration such as `90`, `90s`, `5m`, `2h` or `1d` into seconds."""
    unit = UNITS.get(text[-1:])
    try:
        seconds = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        hint = "write 90s, 5m, 2h or 1d"
        raise BadFieldError(f"--{option} {text!r} is not a duration", hint, option)
    return seconds


class Exit(enum.IntEnum):
    """Exit codes of every command; a command that returns None succeeded."""

    OK = 0
    JOB_FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    UNREACHABLE = 4
    DENIED = 5
    TIMEOUT = 6


BY_CODE: Final = {
    "other_cluster": Exit.JOB_FAILED,
    "unknown_job": Exit.NOT_FOUND,
    "unknown_node": Exit.NOT_FOUND,
    "unreachable": Exit.UNREACHABLE,
    "unavailable": Exit.UNREACHABLE,
    "denied": Exit.DENIED,
    "timeout": Exit.TIMEOUT,
}


def exit_code(error: OnesError) -> Exit:
    """Return the exit code for an error."""
    return BY_CODE.get(error.code, Exit.USAGE)


COMPLETION_TIMEOUT_S: Final = 2.0  # for the requests of a completion

Format = Literal["table", "json", "jsonl", "quiet"]


@Parameter(name="*")
@dataclass(frozen=True)
class Common:
    """Options that every command accepts."""

    home: Annotated[
        Path | None, Parameter(help="folder of the cluster (default: $ONES_HOME, else ~/.ones)")
    ] = None
    output: Annotated[Format, Parameter(name=["--output", "-o"], help="output format")] = "table"

    @property
    def in_json(self) -> bool:
        """True if the output format is json or jsonl."""
        return self.output in {"json", "jsonl"}


COMMON: Final = Common()  # default of the parameter `common`


def _job_names(context: Any) -> Sequence[str]:
    """Complete the names of live jobs, or of ended jobs if no live job matches."""
    try:
        with BlockingClient(_home(context), COMPLETION_TIMEOUT_S) as client:
            for ended in (False, True):
                names = [harmless(job.job) for job in client.jobs(ended=ended)]
                if found := [name for name in names if name.startswith(context.incomplete)]:
                    return found
    except OnesError:  # completion cannot show errors
        pass
    return ()


def _node_names(context: Any) -> Sequence[str]:
    try:
        with BlockingClient(_home(context), COMPLETION_TIMEOUT_S) as client:
            return [harmless(node.node) for node in client.nodes()]
    except OnesError:
        return ()


def _home(context: Any) -> Path | None:
    given = context.get("--home")
    return given.value if given is not None and given.provided else None


JobName = Annotated[str, Parameter(completer=_job_names)]
NodeName = Annotated[str, Parameter(completer=_node_names)]
