"""`docs/wire/`: what it says is what is spoken, and is enough to write a client from."""

from __future__ import annotations

import ast
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]
import msgspec

from controlplane.core.model.job_phases import NEXT
from controlplane.journal.database import feed_from
from schemas.codec import LOG_REPLY, READ_LOG, REPLY, REQUEST, TO_STREAM_CLIENT
from schemas.errors import BY_CODE
from schemas.wire.feed import FeedEvent
from tests.support.recorded_history import GOLDEN
from tests.support.wire_page import (
    FOLDER,
    Row,
    name_of,
    pages,
    rows_of,
    structs,
    tables_on_pages,
    written,
)

CORE: Final = Path(__file__).parents[2] / "controlplane" / "core"
EVENT: Final = re.compile(r"(job|node|worker|sweep|policy|controller|key)\.[a-z_]+")
OWN_SIDE: Final = {"unreachable", "timeout"}  # codes that a client of ours gives itself
QUOTED: Final = re.compile(r"`([^`]+)`")


REQUESTS: Final = (FOLDER.parent / "requests.md").read_text("utf-8")
FEED: Final = (FOLDER.parent / "feed.md").read_text("utf-8")


# --- fields


def test_the_pages_have_exactly_the_messages_and_fields() -> None:
    spoken = {name_of(kind): rows_of(kind) for kind in structs()}

    assert written() == pages(), "python -m tests.support.wire_page writes them again"
    assert tables_on_pages() == spoken, "`PAGES` of tests/support/wire_page.py has a place for each"


def test_messages_built_from_the_tables_decode() -> None:
    page = tables_on_pages()
    for kind in structs():
        name = name_of(kind)
        least = built(page, name, least=True)
        most = built(page, name, least=False)
        for message in (least, most):
            packed = msgpack.packb(message)
            msgspec.msgpack.decode(packed, type=kind)
        assert set(most) - {"type"} == {row.name for row in page[name]}


def built(page: dict[str, list[Row]], name: str, *, least: bool, depth: int = 6) -> dict[str, Any]:
    """A message of that name, with all its fields or with those that it must have."""
    rows = [row for row in page[name] if row.default == "required" or not least]
    fields = {row.name: value(page, row.kind, least=least, depth=depth) for row in rows}
    text = "".join(written().values())
    tag = re.search(rf"^\*\*{name}\*\*:.* Its `type` is `(\w+)`\.$", text, re.MULTILINE)
    return ({"type": name} if "." in name else {"type": tag[1]} if tag else {}) | fields


def value(page: dict[str, list[Row]], kind: str, *, least: bool, depth: int) -> Any:
    """What the column of types says."""
    if kind.startswith("list of "):
        inner = value(page, kind.removeprefix("list of "), least=least, depth=depth)
        return [inner] if depth else []
    if kind.startswith("map of "):
        return {"a": value(page, kind.removeprefix("map of "), least=least, depth=depth)}
    if kind.startswith("["):
        parts = re.split(r", (?![^\[]*\])", kind[1 : kind.rindex("]")])
        return [value(page, part, least=least, depth=depth) for part in parts]
    first = kind.partition(" or ")[0]
    plain = {"int": 1, "float": 61.5, "text": "a", "bytes": b"a", "bool": True, "nil": None}
    if (long := re.fullmatch(r"text of (\d+)", first)) is not None:
        return "a" * int(long[1])
    if (word := first.split(" ")[0]) in plain:
        return plain[word]
    if (literal := QUOTED.fullmatch(first)) is not None:
        return literal[1]
    return built(page, first, least=least or not depth, depth=depth - 1)


# --- requests, errors, events


def test_every_request_and_every_reply_is_in_the_table_of_requests() -> None:
    _, _, table = REQUESTS.partition("| request | reply |")
    named = set(QUOTED.findall(table.partition("\n\n")[0]))
    spoken = {*REQUEST.tags, *READ_LOG.tags, *REPLY.tags, *LOG_REPLY.tags, *TO_STREAM_CLIENT.tags}

    assert spoken <= named
    assert {word for word in named if re.fullmatch(r"\w+\.\w+\.\d", word)} == spoken


def test_every_code_of_an_error_is_on_the_page() -> None:
    _, _, table = REQUESTS.partition("| code | when |")
    named = set(QUOTED.findall("".join(re.findall(r"^\|([^|]*)\|", table, re.MULTILINE)[:12])))

    assert set(BY_CODE) - OWN_SIDE | {"unknown_job"} <= named


def events_on_page() -> dict[str, set[str]]:
    """Each event with the names in its detail."""
    _, _, table = FEED.partition("| event | about | detail | says |")
    found = {}
    for line in table.partition("\n\n")[0].splitlines()[2:]:
        _, names, _, detail, *_ = line.split("|")
        for name in QUOTED.findall(names):
            found[name] = set(QUOTED.findall(detail))
    return found


def test_the_page_has_exactly_the_events_of_the_code() -> None:
    nodes = (node for path in CORE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    words = (node.value for node in nodes if isinstance(node, ast.Constant))
    emitted = {word for word in words if isinstance(word, str) and EVENT.fullmatch(word)}

    assert set(events_on_page()) == emitted | {f"job.{phase.value}" for phase in NEXT.values()}


def recorded() -> Iterator[FeedEvent]:
    for path in sorted(GOLDEN.glob("*.sqlite")):
        database = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
        for (body,) in database.execute("SELECT body FROM feed"):
            yield feed_from(body)
        database.close()


def test_details_of_recorded_events_are_on_the_page() -> None:
    known, unknown = events_on_page(), set()
    for event in recorded():
        free = event.event in METRICS  # which have the names that a script gave them
        unknown |= (
            set()
            if free
            else {(event.event, x) for x in event.detail}
            - {(event.event, name) for name in known[event.event]}
        )

    assert unknown == set()


METRICS: Final = frozenset({"job.epoch", "sweep.trial_scored", "job.succeeded", "job.rejected"})
