"""Lists in pages that fit into a message, and the cursors by which clients ask for the next one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from schemas.errors import BadFieldError

PAGE_BYTES: Final = 1 << 20  # of rows, encoded
CURSOR: Final = re.compile(r"([a-z]{1,16})\.([0-9]{1,18})")
FROM_START: Final = "begin again without one: a cursor is what the page before gave"


class Rows(NamedTuple):
    """One list of a reply."""

    behind: Callable[[int], Iterator[tuple[int, Any]]]  # its rows behind a position, with theirs
    last: int  # position of its last row; positions only grow, and mean the same for ever


def page_of(lists: Mapping[str, Rows], cursor: str) -> tuple[dict[str, tuple[Any, ...]], str]:
    """The next page of some lists, one behind the other.

    Args:
        lists: by name, in the order in which they are told.
        cursor: that the page before gave; empty: the first page.

    Returns:
        Rows of each list, at most `PAGE_BYTES` of them or a single larger one; and the cursor of
        the next page, empty if this is the last.

    Raises:
        BadFieldError: if the cursor is none of these lists.
    """
    first, position = _parsed(lists, cursor)
    found: dict[str, list[Any]] = {name: [] for name in lists}
    room, any_row = PAGE_BYTES, False
    for name in list(lists)[list(lists).index(first) :]:
        for at, row in lists[name].behind(position):
            size = len(msgspec.msgpack.encode(row))
            if size > room and any_row:
                return _frozen(found), f"{name}.{position}"
            room, position, any_row = room - size, at, True
            found[name].append(row)
        position = 0
    return _frozen(found), ""


def numbered(rows: list[Any]) -> Rows:
    """A list that is there and only grows, its positions counted from 1."""
    return Rows(lambda after: enumerate(rows[after:], after + 1), len(rows))


def _frozen(found: Mapping[str, list[Any]]) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(rows) for name, rows in found.items()}


def _parsed(lists: Mapping[str, Rows], cursor: str) -> tuple[str, int]:
    if not cursor:
        return next(iter(lists)), 0
    known = CURSOR.fullmatch(cursor)
    if known is None or known[1] not in lists:
        what = f"cursor: {cursor[:40]!r} is none of this list"
        raise BadFieldError(what, FROM_START, "cursor")
    if int(known[2]) > lists[known[1]].last:
        what = f"cursor: {cursor!r} is beyond the end of this list"
        raise BadFieldError(what, FROM_START, "cursor")
    return known[1], int(known[2])
