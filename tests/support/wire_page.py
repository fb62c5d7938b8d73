"""The field tables of `docs/wire.md`, made of the messages and what their source says of each field.

`python -m tests.support.wire_page` writes them again, behind the page's last heading.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from schemas.codec import tag_of
from schemas.wire import Message, client, feed, files
from tests.support.schemas_examples import structs_in

PAGE: Final = Path(__file__).parents[2] / "docs" / "wire.md"
HEADING: Final = "## Every field\n"
PLAIN: Final[Mapping[Any, str]] = {
    int: "int", float: "float", str: "text", bytes: "bytes", bool: "bool", type(None): "nil"
}  # fmt: skip
BASES: Final = {Message, client.Request, client.Reply}  # never sent themselves
FIELD: Final = re.compile(r"\| `(\w+)` \| ([^|]+) \| ([^|]+) \| (.*) \|")


class Row(NamedTuple):
    """A field as the page has it."""

    name: str
    kind: str
    default: str  # `required`, or what it is when it is left out
    meaning: str


def structs() -> Iterator[type[msgspec.Struct]]:
    """All that a client sends or gets, and all that is in it, each once."""
    seen: dict[type[msgspec.Struct], None] = {}
    for module in (client, client, feed, files, feed, files):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in BASES:
                for found in _with_parts(kind):
                    seen.setdefault(found)
    yield from seen


def _with_parts(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    yield kind
    for hint in get_type_hints(kind, include_extras=True).values():
        for inner in structs_in(hint):
            yield from _with_parts(inner)


def name_of(kind: type[msgspec.Struct]) -> str:
    """What the page calls it: its tag, or the name of its class."""
    return tag_of(kind) if issubclass(kind, Message) else kind.__name__


def rows_of(kind: type[msgspec.Struct]) -> list[Row]:
    """Its fields."""
    hints, notes = get_type_hints(kind, include_extras=True), notes_of(kind)
    return [
        Row(field.encode_name, _kind(hints[field.name]), _default(field), notes.get(field.name, ""))
        for field in msgspec.structs.fields(kind)
    ]


def _kind(hint: Any) -> str:
    hint = getattr(hint, "__supertype__", hint)
    origin, parts = get_origin(hint), get_args(hint)
    if hint in PLAIN:
        return PLAIN[hint]
    if hint is Any:
        return "anything"
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return name_of(hint)
    if origin is typing.Annotated:
        return f"{_kind(parts[0])}{_bounds(parts[1])}"
    if origin is Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin in {tuple, list}:
        if parts[-1] is Ellipsis or origin is list:
            return f"list of {_kind(parts[0])}"
        return f"[{', '.join(map(_kind, parts))}]"
    if origin in {dict, Mapping} or getattr(origin, "__name__", "") == "Mapping":
        return f"map of {_kind(parts[1])}"
    if origin in {typing.Union, UnionType}:
        return " or ".join(_kind(part) for part in parts if part is not msgspec.UnsetType)
    raise TypeError(hint)


def _bounds(meta: Any) -> str:
    if meta.min_length is not None and meta.min_length == meta.max_length:
        return f" of {meta.min_length}"
    if meta.ge is None:
        return ""
    return f" from {meta.ge}" if meta.le is None else f" {meta.ge} to {meta.le}"


def _default(field: Any) -> str:
    if field.required:
        return "required"
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{msgspec.json.encode(field.default_factory()).decode()}`"
    if field.default is msgspec.UNSET:
        return "left out"
    if field.default == math.inf:
        return "infinity"
    return f"`{msgspec.json.encode(field.default).decode()}`"


def notes_of(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The comments of its source, by field; those of its bases, too."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base in {msgspec.Struct, Message} or not issubclass(base, msgspec.Struct):
            continue
        source = textwrap.dedent(inspect.getsource(base))
        lines = source.splitlines()
        (body,) = ast.parse(source).body
        for node in getattr(body, "body", []):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = _note(lines, node)
    return found


def _note(lines: list[str], node: ast.AnnAssign) -> str:
    behind = [_comment(line) for line in lines[node.lineno - 1 : node.end_lineno]]
    before: list[str] = []
    at = node.lineno - 2
    while lines[at].strip().startswith("# ") and not lines[at].strip().startswith("# ---"):
        before.insert(0, lines[at].strip().removeprefix("# "))
        at -= 1
    return " ".join([*before, *filter(None, behind)]).replace("|", "/")


def _comment(line: str) -> str:
    _, hash_, comment = line.partition("  # ")
    return comment.strip() if hash_ else ""


def tables() -> str:
    """All of them as the page has them."""
    found = []
    for kind in structs():
        what = inspect.cleandoc(kind.__doc__ or "").replace("\n\n", " ").replace("\n", " ")
        config = kind.__struct_config__
        if config.tag and not issubclass(kind, Message):
            what += f" Its `{config.tag_field}` is `{config.tag}`."
        found.append(f"**{name_of(kind)}**: {what}\n")
        if rows := rows_of(kind):
            found.append("| field | type | left out | what |\n|---|---|---|---|")
            found += [
                f"| `{row.name}` | {row.kind} | {row.default} | {row.meaning} |" for row in rows
            ]
            found.append("")
    return "\n".join(found)


def tables_on_page() -> dict[str, list[Row]]:
    """What the page says, by the name of the message; by nothing but its text."""
    found: dict[str, list[Row]] = {}
    _, _, text = PAGE.read_text("utf-8").partition(HEADING)
    for line in text.splitlines():
        if line.startswith("**"):
            rows = found.setdefault(line[2:].partition("**")[0], [])
        elif (row := FIELD.fullmatch(line)) is not None:
            rows.append(Row(*row.groups()))
    return found


def write() -> None:
    """Write the page again."""
    before, heading, rest = PAGE.read_text("utf-8").partition(HEADING)
    intro = rest.partition("\n**")[0].strip()
    PAGE.write_text(f"{before}{heading}\n{intro}\n\n{tables()}", "utf-8")


if __name__ == "__main__":
    write()
