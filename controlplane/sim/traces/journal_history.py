"""A controller's journal, read without a trace of it; also while the controller runs."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final
from urllib.parse import quote

from controlplane.core.history_read_model import JobHistories
from controlplane.core.history_records import JobLeft
from controlplane.core.inputs import Input, NodeGreeted, NodeLost
from controlplane.core.model.job import Job, number_of
from controlplane.core.model.node import NodePhase
from controlplane.journal.reader import Reader
from controlplane.journal.record import FIRST_VERSION, SCHEMA_VERSION, JournalError
from controlplane.journal.replay import earliest
from controlplane.sim.simulator_errors import TraceError
from schemas.errors import OnesError
from schemas.ids import NodeId, Seconds

NO_JOURNAL: Final = "name the file journal.sqlite in a controller's state folder"
Slots = dict[NodeId, int]  # of each node that is there


def replay_journal(
    path: Path, since: float, until: float
) -> tuple[list[Job], JobHistories, Slots, int]:
    """The jobs of a journal, their past, and the cluster as it was largest in a window.

    Where its oldest inputs are not kept any more, it begins with the oldest state that is.

    The file is opened read-only. A transaction that was torn was never reported as durable and
    is not there.

    Args:
        since: beginning of the window, seconds since the epoch.

    Returns:
        Jobs, their past, slots, and how many jobs that left are not among them, as damaged.

    Raises:
        TraceError: if it is no journal, is damaged, or another release wrote it.
    """
    jobs: list[Job] = []
    histories = JobHistories()
    there: Slots = {}
    largest: list[Slots] = [{}]
    damaged = 0

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
        reader = Reader(path, database)
        try:
            core, first = earliest(reader)
            there |= {
                node.node: len(node.spec.slots)
                for node in core.state.nodes.values()
                if node.phase is not NodePhase.LOST
            }
            rows = reader.numbered_inputs(first)
            for at, event in watched((when, what) for _, when, what in rows):
                core.handle(event, at)
                histories.add(core.records)
                jobs += [record.last for record in core.records if isinstance(record, JobLeft)]
            if reader.records.complete:  # of inputs that are not kept, too
                jobs, damaged = _left(reader)
            jobs += core.state.jobs.values()
            if (kept := reader.records).complete:
                histories.jobs = {job.job: kept.of(job.job) for job in jobs}
        except JournalError as error:
            raise TraceError(error.message, error.hint) from None
        except (OnesError, LookupError, TypeError, ValueError) as error:
            what = f"{path}: its history leads nowhere in this release: {error!r}"
            raise TraceError(what, "export it with the release that wrote it") from None
    jobs.sort(key=lambda job: number_of(job.job))
    return jobs, histories, largest[0], damaged


def _left(reader: Reader) -> tuple[list[Job], int]:
    """The jobs that left, and how many of them cannot be read."""
    found, damaged = [], 0
    for row in reader.ended.behind(0):
        try:
            found.append(row.read())
        except JournalError:
            damaged += 1
    return found, damaged


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
    if not FIRST_VERSION <= version <= SCHEMA_VERSION:
        database.close()
        hint = (
            f"this release reads schemas {FIRST_VERSION} to {SCHEMA_VERSION}; "
            "export it with the one that wrote it"
        )
        raise TraceError(f"{path} is a journal of schema {version}", hint)
    return database
