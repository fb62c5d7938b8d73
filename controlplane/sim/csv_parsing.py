"""Reader of table files that checks each value.

`TraceError` names file, line and column. It is raised for an invalid value, and for a file that
cannot be read, is too large, is not text, or has the wrong columns.
"""

from __future__ import annotations

import csv
import datetime as dt
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from controlplane.sim.cluster import TraceError

MAX_LINES: Final = 4_000_000  # including empty lines
MAX_LINE_BYTES: Final = 16_384
MAX_TEXT: Final = 200  # characters of a name
MAX_NUMBER: Final = 1e12  # largest number: 30,000 years in seconds
TIME: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", re.ASCII)
BLANKS: Final = ""  # delimiter: any number of blanks; a line that begins with `;` is a comment
DELIMITERS: Final = ",;\t"  # of files with a header
NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class CsvRow:
    """Line of a table; a method raises `TraceError` if the cell does not contain its value."""

    place: str  # file and line
    values: Mapping[str, str]  # column -> text, stripped

    def text(self, column: str) -> str:
        """Return the text of a column: not empty, printable, at most `MAX_TEXT` characters."""
        value = self.values[column]
        if not value:
            raise self.error(column, "is empty", "write a value there, or delete the line")
        if not value.isprintable():
            raise self.error(column, "has a character that cannot be printed", "use plain text")
        if len(value) > MAX_TEXT:
            raise self.error(column, f"has {len(value)} characters", f"use at most {MAX_TEXT}")
        return value

    def number(self, column: str, least: float = 0.0, most: float = MAX_NUMBER) -> float:
        """Return the number in a column, between `least` and `most`."""
        value = self.values[column]
        if not value:
            raise self.error(column, "is empty", "write a number there, or delete the line")
        if len(value) > MAX_TEXT or not NUMBER.fullmatch(value):
            raise self.error(column, f"{_short(value)} is not a number", "write digits, like 12.5")
        number = float(value)
        if not least <= number <= most:
            wanted = f"write a number from {least:g} to {most:g}"
            raise self.error(column, f"{_short(value)} is out of range", wanted)
        return number + 0.0  # no minus zero

    def whole(self, column: str, least: int = 0, most: int = int(MAX_NUMBER)) -> int:
        """Return the integer in a column, between `least` and `most`; 4.0 is valid."""
        number = self.number(column, least, most)
        if not number.is_integer():
            said = f"{_short(self.values[column])} is not a whole number"
            raise self.error(column, said, "round it")
        return int(number)

    def time(self, column: str) -> float:
        """Return the time in a column, like 2017-10-09 07:01:55, as seconds since 1970."""
        said = self.values[column]
        try:
            at = dt.datetime.fromisoformat(said if TIME.fullmatch(said) else "")
        except ValueError:
            hint = "write it like 2017-10-09 07:01:55"
            raise self.error(column, f"{_short(said)} is not a time", hint) from None
        return (at - EPOCH).total_seconds()

    def given(self, column: str) -> bool:
        """Return whether the row has a non-empty value in this optional column."""
        return bool(self.values.get(column))

    def error(self, column: str, problem: str, hint: str) -> TraceError:
        """Return an error that names file, line and column; the caller raises it."""
        return TraceError(f"{self.place}: column {column}: {problem}", hint, column)


EPOCH: Final = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - traces do not state their time zone


def unique(rows: Iterable[CsvRow], column: str) -> Iterator[CsvRow]:
    """Yield the rows; raise `TraceError` for a row with the same text in a column as another."""
    seen = set()
    for row in rows:
        text = row.values[column]
        if text in seen:
            problem = f"two jobs are called {_short(text)}"
            raise row.error(column, problem, "give every job a name of its own")
        seen.add(text)
        yield row


def with_header(
    path: Path, required: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[CsvRow]:
    """Yield the rows of a CSV file. Its first line names the columns, in any order.

    The delimiter is the one of `DELIMITERS` that is most frequent in the first line.
    """
    lines = _split(path, None)
    line, names = next(lines, (1, []))
    names = [name.lower() for name in names]
    if missing := [column for column in required if column not in names]:
        problem = f"{path}:{line}: column {missing[0]} is missing"
        hint = f"the first line must name {', '.join(required)}"
        raise TraceError(problem, hint, missing[0])
    if twice := [name for name in required if names.count(name) > 1]:
        raise TraceError(f"{path}:{line}: column {twice[0]} is duplicated", "keep one", twice[0])
    if unknown := [name for name in names if name not in {*required, *optional}]:
        known = ", ".join([*required, *optional])
        problem = f"{path}:{line}: column {_short(unknown[0])} is unknown"
        raise TraceError(problem, f"known columns are {known}", unknown[0])
    for line, cells in lines:
        yield _row(f"{path}:{line}", cells, {len(names): names})


def without_header(
    path: Path, delimiter: str, layouts: Mapping[int, Sequence[str]]
) -> Iterator[CsvRow]:
    """Yield the rows of a file without a header; `layouts` has the names by number of columns.

    If the delimiter is a tab or `BLANKS`, quotes have no special meaning.
    """
    for line, cells in _split(path, delimiter):
        yield _row(f"{path}:{line}", cells, layouts)


def first_line(path: Path) -> str:
    """Return the first line that is neither empty nor a comment, or "" if there is none."""
    return next((text for _, text in _lines(path) if not text.lstrip().startswith(";")), "")


def parse_line(file: str, line: int, text: str, names: Sequence[str]) -> CsvRow:
    """Parse one line of a CSV file; `file` and `line` appear in errors."""
    place = f"{file}:{line}"
    return _row(place, _cells(place, text, ","), {len(names): names})


def _row(place: str, cells: list[str], layouts: Mapping[int, Sequence[str]]) -> CsvRow:
    names = layouts.get(len(cells))
    if names is None:
        known = " or ".join(str(number) for number in sorted(layouts))
        fullest = layouts[max(layouts)]
        missing = fullest[len(cells)] if len(cells) < len(fullest) else fullest[-1]
        problem = f"{place}: column {missing}: {len(cells)} columns instead of {known}"
        raise TraceError(problem, f"the columns are {', '.join(fullest)}", missing)
    return CsvRow(place, dict(zip(names, cells, strict=True)))


def _split(path: Path, delimiter: str | None) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and cells of each line with a job or a header."""
    for line, text in _lines(path):
        if delimiter == BLANKS and text.lstrip().startswith(";"):
            continue
        if delimiter is None:
            delimiter = max(DELIMITERS, key=text.count)
        yield line, _cells(f"{path}:{line}", text, delimiter)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line that is not empty; read the file line by line."""
    try:
        with path.open("rb") as file:
            for line in range(1, MAX_LINES + 2):
                raw = file.readline(MAX_LINE_BYTES + 1)
                if not raw:
                    return
                if line > MAX_LINES:
                    break
                text = _decoded(f"{path}:{line}", line, raw)
                if text.strip():
                    yield line, text
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}", "name a readable file") from None
    except ValueError as error:  # a NUL in the path
        raise TraceError(f"{str(path)!r}: {error}", "name a readable file") from None
    raise TraceError(f"{path}: more than {MAX_LINES} lines", "split the file")


def _decoded(place: str, line: int, raw: bytes) -> str:
    if len(raw) > MAX_LINE_BYTES:
        problem = f"{place}: longer than {MAX_LINE_BYTES} bytes"
        raise TraceError(problem, "write one job on each line; such a long line is not a trace")
    try:
        text = raw.decode("utf-8-sig" if line == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        problem = f"{place}: byte {error.start + 1} is not UTF-8"
        raise TraceError(problem, "save the file as UTF-8 text") from None
    if "\0" in text:
        raise TraceError(f"{place}: has a NUL byte", "name a trace, which is a text file")
    return text


def _cells(place: str, text: str, delimiter: str) -> list[str]:
    if delimiter == BLANKS:
        return text.split()
    if delimiter == "\t":  # no quoting, because commands contain quotes
        return [cell.strip() for cell in text.split("\t")]
    try:
        (cells,) = csv.reader([text], delimiter=delimiter, strict=True)
    except (csv.Error, ValueError) as error:
        said = str(error) if isinstance(error, csv.Error) else "a line break inside a line"
        raise TraceError(f"{place}: {said}", "close every quote on its line") from None
    return [cell.strip() for cell in cells]


def _short(value: str) -> str:
    most = 40
    return repr(value if len(value) <= most else value[:most] + "...")
