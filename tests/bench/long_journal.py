"""Histories of any length, and journals that contain them, written without waiting for a disk."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from controlplane.core.commands import Announce
from controlplane.core.inputs import ControllerStarted, Input, NodeReported
from controlplane.core.reactor import Reactor
from controlplane.journal.database import checksum, open_for_writing
from schemas.codec import encode
from schemas.ids import BootId, JobId, NodeId, Seconds, Term, slot_id
from schemas.wire.agent import AgentEvent
from tests.support import builders

SLOTS: Final = 8  # of a node
AT: Final = 1.7e9  # seconds since the epoch
ROWS: Final = 5000  # in one transaction


@dataclass(frozen=True)
class Size:
    nodes: int
    jobs: int
    training: int  # of the jobs, on a slot each


def history(
    size: Size, epochs: int, slots: int = SLOTS, begun: float = AT
) -> Iterator[tuple[Seconds, Input]]:
    """Yield the inputs of a cluster whose first jobs train on a slot each.

    Jobs are job-1, job-2, ... on n0/0, n0/1, ...; the process in slot I of a node is 100 + I.
    """
    said = dict.fromkeys((NodeId(f"n{at}") for at in range(size.nodes)), 0)
    version = 1 + size.nodes + size.jobs
    clock = itertools.count()

    def now() -> Seconds:
        return Seconds(begun + next(clock) * 0.001)

    def says(node: NodeId, event: AgentEvent) -> NodeReported:
        said[node] += 1
        return NodeReported(node=node, boot=BootId("boot-1"), seq=said[node], event=event)

    yield now(), ControllerStarted(term=Term(1), release="")
    for node in said:
        yield now(), builders.greeting(node, slots=slots)
    jobs = [JobId(f"job-{at}") for at in range(1, size.jobs + 1)]
    for _ in jobs:
        yield now(), builders.submission("job", retries=1)
    nodes = [NodeId(f"n{at // slots}") for at in range(size.training)]
    placed = {
        job: {slot_id(node, at % slots): builders.BATCH}
        for at, (job, node) in enumerate(zip(jobs, nodes, strict=False))
    }
    yield now(), builders.proposal(placed, based_on=version)
    for at, (job, node) in enumerate(zip(placed, nodes, strict=True)):
        yield now(), says(node, builders.started(job, pid=100 + at % slots))
        yield now(), says(node, builders.ready(job))
        yield now(), says(node, builders.formed(job))
    for at in range(epochs):
        turn, which = divmod(at, size.training)
        yield now(), says(nodes[which], builders.epoch_end(jobs[which], turn + 1, epochs=10**9))


def write(
    path: Path, inputs: Iterable[tuple[Seconds, Input]], reactor: Reactor, number: int = 0
) -> int:
    """Put a history into a journal, which need not survive a loss of power.

    Returns:
        The number of the last one.
    """
    database = open_for_writing(path)
    database.execute("PRAGMA synchronous=OFF")
    rows = iter(inputs)
    while batch := list(itertools.islice(rows, ROWS)):
        database.execute("BEGIN")
        for at, event in batch:
            number += 1
            told = [c.event for c in reactor.handle(event, at) if isinstance(c, Announce)]
            body = encode(event)
            row = (number, at, body, checksum(number, at, body))
            database.execute("INSERT INTO inputs VALUES (?, ?, ?, ?)", row)
            for one in told:
                body = encode(one)
                news = (one.seq, body, checksum(one.seq, 0.0, body))
                database.execute("INSERT INTO feed VALUES (?, ?, ?)", news)
        database.execute("COMMIT")
    _at_rest(database)
    return number


def _at_rest(database: sqlite3.Connection) -> None:
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
