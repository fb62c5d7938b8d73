"""Rows of a reply, for notebooks and for pandas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass, make_dataclass
from html import escape
from typing import Any, Final, Self, TypeVar

import msgspec

T_co = TypeVar("T_co", bound=msgspec.Struct, covariant=True)
MAX_SHOWN: Final = 200  # rows of a table in a notebook
MAX_TEXT: Final = 200  # characters of a cell


class Rows(tuple[T_co, ...]):
    """A tuple that a notebook shows as a table, and that `pandas.DataFrame(rows)` takes."""

    __slots__ = ()

    def __new__(cls, rows: Iterable[T_co] = ()) -> Self:
        """Return the rows; pandas sees them as dataclasses, whose fields are its columns."""
        made = super().__new__(cls, rows)
        for kind in {type(row) for row in made}:
            if not is_dataclass(kind):
                like = make_dataclass(kind.__name__, kind.__struct_fields__)
                kind.__dataclass_fields__ = like.__dataclass_fields__  # type: ignore[attr-defined]
        return made

    @property
    def records(self) -> list[dict[str, Any]]:
        """The rows as dictionaries, with the fields of each row."""
        return [msgspec.structs.asdict(row) for row in self]

    def _repr_html_(self) -> str:
        """Return an HTML table, for notebooks."""
        return html_table(self.records)


def html_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return an HTML table of the columns that have a value in some row; all texts are escaped."""
    names = dict.fromkeys(name for row in records for name in row)
    shown = [name for name in names if any(row.get(name) not in EMPTY for row in records)]
    head = "".join(f"<th>{escape(name)}</th>" for name in shown)
    lines = [
        "".join(f"<td>{_cell(row.get(name))}</td>" for name in shown) for row in records[:MAX_SHOWN]
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    more = f"<p>and {len(records) - MAX_SHOWN} more</p>" if len(records) > MAX_SHOWN else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


EMPTY: Final[tuple[Any, ...]] = (None, "", (), {}, [])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        value = ", ".join(f"{name}={one}" for name, one in value.items())
    elif isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    text = "" if value is None else str(value)
    return escape(text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…")
