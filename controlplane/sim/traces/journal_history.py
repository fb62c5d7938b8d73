"""A controller's journal, read without a trace of it; also while the controller runs."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final
from urllib.parse import quote

from controlplane.core.inputs import Input, NodeGreeted, NodeLost
from controlplane.core.reactor import Reactor
from controlplane.journal.record import SCHEMA_VERSION, input_from
from controlplane.journal.replay import replay
from controlplane.sim.simulator_errors import TraceError
from schemas.errors import OnesError
from schemas.ids import NodeId, Seconds

INPUTS: Final = "SELECT id, at, body FROM inputs ORDER BY id"
NO_JOURNAL: Final = "name the file journal.sqlite in a controller's state folder"
Slots = dict[NodeId, int]  # of each node that is there


def replay_journal(path: Path, since: float, until: float) -> tuple[Reactor, Slots]:
    """What a journal leads to, and the cluster as it was largest in a window.

    The file is opened read-only. A transaction that was torn was never reported as durable and
    is not there.

    Args:
        path: of the SQLite file.
        since: beginning of the window, seconds since the epoch.
        until: its end.

    Raises:
        TraceError: if it is no journal, is damaged, or another release wrote it.
    """
    there: Slots = {}
    largest: list[Slots] = [{}]

    def watched(inputs: Iterator[tuple[Seconds, Input]]) -> Iterator[tuple[Seconds, Input]]:
        """The inputs as they are; notes on the way which nodes were there in the window."""
        entered = False
        for at, event in inputs:
            if not entered and at >= since:
                entered, largest[0] = True, dict(there)
            match event:
                case NodeGreeted():
                    there[event.node] = len(event.spec.slots)
                case NodeLost():
                    there.pop(event.node, None)
            if since <= at < until and sum(there.values()) > sum(largest[0].values()):
                largest[0] = dict(there)
            yield at, event

    with closing(_opened(path)) as database:
        try:
            core = replay(watched(_inputs(path, database)))
        except TraceError:
            raise
        except (OnesError, LookupError, TypeError, ValueError) as error:
            what = f"{path}: its history leads nowhere in this release: {error!r}"
            raise TraceError(what, "export it with the release that wrote it") from None
    return core, largest[0]


def _opened(path: Path) -> sqlite3.Connection:
    """The database, read-only; one that nobody has open is not even locked.

    Without a write-ahead log beside it the file is all there is; SQLite would make the log's files
    to read it, unless it is told that nothing changes.
    """
    if not path.is_file():
        raise TraceError(f"{path}: there is no such file", NO_JOURNAL)
    at_rest = not path.with_name(f"{path.name}-wal").exists()
    where = f"file:{quote(str(path.absolute()))}?mode=ro{'&immutable=1' * at_rest}"
    try:
        database = sqlite3.connect(where, uri=True, isolation_level=None)
    except sqlite3.Error as error:
        raise TraceError(f"{path}: {error}", "check the file's owner") from None
    try:
        row = database.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
        version = int(row[0]) if row else 0
    except (sqlite3.Error, TypeError, ValueError) as error:
        database.close()
        raise TraceError(f"{path} is no journal: {error}", NO_JOURNAL) from None
    if version != SCHEMA_VERSION:
        database.close()
        hint = f"this release reads schema {SCHEMA_VERSION}; export it with the one that wrote it"
        raise TraceError(f"{path} is a journal of schema {version}", hint)
    return database


def _inputs(path: Path, database: sqlite3.Connection) -> Iterator[tuple[Seconds, Input]]:
    try:
        for identity, at, body in database.execute(INPUTS):
            yield Seconds(float(at)), _decoded(path, identity, body)
    except sqlite3.Error as error:
        raise TraceError(f"{path}: {error}", "restore a backup") from None


def _decoded(path: Path, identity: int, body: bytes) -> Input:
    try:
        return input_from(body)
    except (TypeError, ValueError) as error:  # msgspec's errors are ValueErrors
        hint = "it is damaged, or of another release: export it with the one that wrote it"
        raise TraceError(f"{path}: input {identity}: {error}", hint) from None
