"""Stored output: what nodes ship, what followers ask for, and files that the disk damaged."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from controlplane.service.api.views import numbered, page_of
from controlplane.service.relay.log_store import LogStore
from schemas.codec import LOG_REPLY, encode
from schemas.errors import BadFieldError
from schemas.ids import JobId, Rank
from schemas.wire.feed import LogPage
from tests.fuzz.choices import Choices
from tests.fuzz.targets.folders import folder, without_log_lines

JOB: Final = JobId("a-1")
MOST: Final = 4096
STEPS: Final = 30


def stored_output(data: bytes) -> None:
    """Ship, end, damage, reopen and read output in any order; then read all of it."""
    without_log_lines()
    choices = Choices(data)
    with folder() as here:
        store, cursors = LogStore(here, MOST, now=lambda: 1.0, known=2), [0]
        for _ in range(STEPS):
            if not choices.left:
                break
            who = (choices.pick((1, 2, 3)), choices.pick((0, 1)))
            match choices.below(7):
                case 0 | 1:
                    have, _ = store.stored(JOB, "log", who)
                    offset = choices.pick((have, 0, have + 1, max(0, have - 2)))
                    now = store.append(JOB, "log", who, offset, choices.blob())
                    assert now >= have
                case 2:
                    store.end(JOB, "log", who, choices.below(64))
                case 3:  # a restart, perhaps with a damaged file
                    files = sorted(here.rglob("*.*.*")) + sorted(here.rglob("[0-9].[0-9]"))
                    if choices.flag() and files:
                        _damage(choices, choices.pick(files))
                        cursors = [0]
                    store = LogStore(here, MOST, now=lambda: 1.0, known=2)
                case _:
                    cursor = choices.pick((*cursors, abs(choices.whole())))
                    rank = choices.pick((None, Rank(0), Rank(1), Rank(7)))
                    cursors.append(
                        _read(store, rank, cursor, choices.pick((1, 100, MOST, 1 << 20)))
                    )
        _read_through(store)


def _read(store: LogStore, rank: Rank | None, cursor: int, many: int) -> int:
    pieces, after = store.read(JOB, "log", rank, cursor, many)
    page = LogPage(job=JOB, pieces=tuple(pieces), cursor=after, ended=False)
    LOG_REPLY.decode(encode(page))
    return after


def _read_through(store: LogStore) -> None:
    """Read from the start to the end in pages; each page moves on."""
    pieces, cursor = store.read(JOB, "log", None, 0, 64)
    while pieces:
        before = cursor
        pieces, cursor = store.read(JOB, "log", None, cursor, 64)
        assert cursor > before or not pieces


def _damage(choices: Choices, path: Path) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[choices.below(len(content))] = choices.below(256)
    path.write_bytes(content[: choices.below(len(content) + 1)] if choices.flag() else content)


def cursors(data: bytes) -> None:
    """Pages of lists: anything for a cursor, and rows of any size; each row comes once, in order."""
    choices = Choices(data)
    lists = {
        name: numbered([(name, at, "x" * choices.pick((0, 10, 600_000, 1 << 20))) for at in range(choices.below(5))])
        for name in ("history", "epochs", "versions")
    }  # fmt: skip
    with contextlib.suppress(BadFieldError):
        page_of(lists, choices.text())
    with contextlib.suppress(BadFieldError):
        page_of(lists, f"{choices.pick(tuple(lists))}.{choices.whole()}")
    found: list[tuple[str, int]] = []
    cursor = ""
    for _ in range(30):
        rows, cursor = page_of(lists, cursor)
        found += [(row[0], row[1]) for name in lists for row in rows[name]]
        if not cursor:
            break
    assert not cursor
    assert found == [(name, at) for name in lists for at in range(lists[name].last)]
