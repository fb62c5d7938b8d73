"""Durable events per second, commits beside a snapshot, and the time until a long journal is READY.

- durable events/s: epochs of a full cluster, committed as fast as they can be queued; and the processor time of
  each, which a busy host changes little: of the writer alone, and of the commit loop with its two reactors;
- commit: from the queue to durable, one input at a time, alone and while a child takes snapshots; compared with
  an append and fdatasync of 4 KiB;
- READY: a new process has the state of a journal of ten million inputs (1,000 nodes, 10,000 jobs);
- acked_lost: inputs that were reported durable and are missing after the process was killed, a hundred times;
- a skipped input: the time that the loop is blocked until the state before it is restored.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from controlplane.core.commands import Announce
from controlplane.core.reactor import Reactor
from controlplane.journal.database import Entry, checksum, open_for_writing
from controlplane.journal.take_snapshot import save_state
from controlplane.journal.writer import Writer
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.settings import JournalSettings
from schemas.codec import encode
from tests.bench import report
from tests.bench.long_journal import Size, history, write
from tests.bench.messaging import ms, syncs

TAIL: Final = JournalSettings().snapshot_inputs  # inputs behind the last snapshot
TURN: Final = 100  # inputs that are handled in a turn of the loop
EPOCHS: Final = 40_000  # of all jobs before it
READY: Final = """
import asyncio, sys, time
from pathlib import Path
from controlplane.service.commit_loop import CommitLoop

async def main():
    began, used = time.perf_counter(), time.process_time()
    loop = CommitLoop(Path(sys.argv[1]), lambda _: None)
    took = time.perf_counter() - began
    cpu = time.process_time() - used
    print(took, cpu, len(loop.reactor.state.jobs), loop.tail.inputs, loop.tail.seconds, flush=True)
    loop._torn = True  # it leaves no snapshot: the next one has the same to do
    loop.close()

asyncio.run(main())
"""


WRITES: Final = """
import os, sys
from pathlib import Path
from controlplane.core.inputs import NodeHeard
from controlplane.journal.database import Entry
from controlplane.journal.writer import Writer
from schemas.ids import NodeId, Seconds

writer = Writer(Path(sys.argv[1]), lambda count: os.write(1, b"%d\\n" % (writer.base + count)))
while True:
    for _ in range(50):
        writer.append(Entry(at=Seconds(1.0), input=NodeHeard(node=NodeId("n1")), feed=()))
    sys.stdin.read(1)
"""


@dataclass(frozen=True)
class Scale:
    size: Size
    burst: int  # inputs
    paced: int
    inputs: int  # of the long journal
    starts: int
    kills: int


FULL: Final = Scale(Size(1000, 10_000, 8000), 200_000, 2000, 10_000_000, 3, 100)
QUICK: Final = Scale(Size(100, 1000, 800), 20_000, 200, 100_000, 2, 5)


class Committed:
    def __init__(self) -> None:
        self.at: list[float] = []
        self._more = threading.Condition()

    def __call__(self, count: int) -> None:
        with self._more:
            self.at += [time.perf_counter()] * (count - len(self.at))
            self._more.notify_all()

    def until(self, count: int) -> None:
        with self._more:
            self._more.wait_for(lambda: len(self.at) >= count)


def entries(size: Size, epochs: int) -> Iterator[Entry]:
    reactor = Reactor()
    for at, event in history(size, epochs):
        feed = tuple(c.event for c in reactor.handle(event, at) if isinstance(c, Announce))
        yield Entry(at=at, input=event, feed=feed, records=tuple(reactor.records))


def before_epochs(size: Size) -> int:
    return 1 + size.nodes + size.jobs + 1 + 3 * size.training


def burst(folder: Path, scale: Scale) -> tuple[float, float]:
    """Return the durable entries per second, and the CPU seconds of each."""
    first = before_epochs(scale.size)
    made = list(entries(scale.size, scale.burst))
    gc.freeze()  # what only this bench holds is not looked through again and again
    durable = Committed()
    writer = Writer(folder / "burst.sqlite", durable)
    for entry in made[:first]:
        writer.append(entry)
    durable.until(first)
    began, used = time.perf_counter(), time.process_time()
    for entry in made[first:]:
        writer.append(entry)
    durable.until(len(made))
    took, used = time.perf_counter() - began, time.process_time() - used
    writer.close()
    gc.unfreeze()
    many = len(made) - first
    return many / took, used / many


async def looped(folder: Path, scale: Scale) -> float:
    first = before_epochs(scale.size)
    rows = list(itertools.islice(history(scale.size, scale.burst), first + scale.burst))
    loop = CommitLoop(folder / "looped.sqlite", lambda _: None)
    for _, event in rows[:first]:
        loop.handle(event)
    await loop.caught_up()
    used = time.process_time()
    for place, (_, event) in enumerate(rows[first:]):
        loop.handle(event)
        if place % TURN == 0:
            await asyncio.sleep(0)
    await loop.caught_up()
    used = time.process_time() - used
    loop._torn = True  # it leaves no snapshot
    loop.close()
    return used / (len(rows) - first)


def paced(path: Path, scale: Scale, *, snapshots: bool) -> tuple[list[float], int]:
    made = list(entries(scale.size, scale.paced))[-scale.paced :]
    feed = itertools.count(time.time_ns())
    durable = Committed()
    writer = Writer(path, durable)
    taken, running = 0, None
    queued = []
    for entry in made:
        if snapshots and (running is None or running.poll() is not None):
            taken += running is not None
            running = subprocess.Popen(
                [sys.executable, "-P", "-m", "controlplane.journal.take_snapshot", str(path)],
                stdout=subprocess.DEVNULL,
            )
        told = tuple(_numbered(event, next(feed)) for event in entry.feed)
        queued.append(time.perf_counter())
        writer.append(Entry(at=entry.at, input=entry.input, feed=told))
        time.sleep(0.005)
    durable.until(len(made))
    writer.close()
    if running is not None:
        running.wait()
    return [then - when for when, then in zip(queued, durable.at, strict=True)], taken


def _numbered(event: Any, seq: int) -> Any:
    return type(event)(
        seq=seq, time=event.time, event=event.event, job=event.job, node=event.node,
        detail=event.detail,
    )  # fmt: skip


def long_journal(path: Path, scale: Scale) -> None:
    """A journal of so many inputs, with a snapshot before its tail.

    What lies before the snapshot is one input again and again, as nobody reads it; the state in the
    snapshot and the tail are a cluster's.
    """
    reactor, before = Reactor(), scale.inputs - TAIL
    rows = history(scale.size, TAIL + EPOCHS)
    first = 2 + scale.size.nodes + scale.size.jobs + 3 * scale.size.training + EPOCHS
    for at, event in itertools.islice(rows, first):
        reactor.handle(event, at)
        body = encode(event)
    with contextlib.closing(open_for_writing(path)) as database:
        database.execute("PRAGMA synchronous=OFF")
        database.create_function("crc", 1, lambda number: checksum(number, at, body))
        database.execute(
            "WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n WHERE id < ?) "
            "INSERT INTO inputs (id, at, body, crc) SELECT id, ?, ?, crc(id) FROM n",
            (before, at, body),
        )
    save_state(path, reactor, before, at)
    write(path, rows, reactor, before)


def ready(path: Path) -> tuple[float, float, list[float]]:
    began = time.perf_counter()
    out = subprocess.run(
        [sys.executable, "-c", READY, str(path)], capture_output=True, text=True, check=True
    ).stdout.split()
    return float(out[0]), time.perf_counter() - began, [float(word) for word in out[1:]]


async def skip(path: Path) -> float:
    loop = CommitLoop(path, lambda _: None)
    began = time.perf_counter()
    loop._before()
    took = time.perf_counter() - began
    loop._torn = True
    loop.close()
    return took


def killed(path: Path, times: int) -> int:
    """How many inputs that were said to be durable are not there after so many kill -9.

    Each process goes on with the journal of those before, and dies at any moment of its commits.
    """
    lost, chance = 0, random.Random(1)  # noqa: S311 - moments, no secrets
    for _ in report.counted("kill -9", range(times), times):
        writes = [sys.executable, "-c", WRITES, str(path)]
        with subprocess.Popen(writes, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
            assert writer.stdin is not None
            assert writer.stdout is not None
            said = int(writer.stdout.readline())
            for _ in range(chance.randint(1, 20)):
                writer.stdin.write(b".")
                writer.stdin.flush()
            time.sleep(chance.uniform(0.0, 0.02))
            writer.kill()
            for line in writer.stdout.read().split(b"\n")[:-1]:
                said = int(line)
        with contextlib.closing(sqlite3.connect(path)) as database:
            (last, count) = database.execute("SELECT max(id), count(*) FROM inputs").fetchone()
        lost += max(0, said - last) + (last - count)
    return lost


def main() -> None:
    options = report.arguments(
        __doc__,
        "a tenth of the cluster, a short journal",
        folder=(Path, None, "of a disk to measure; default: a temporary one"),
    )
    scale = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory(prefix="ones-bench-", dir=options.folder) as folder:
        figures = measured(Path(folder), scale)
    report.write(figures, options.json)


def measured(folder: Path, scale: Scale) -> dict[str, float]:
    report.now("a burst of commits")
    floor = syncs(folder, pause_s=0.004)
    events_per_s, event_s = burst(folder, scale)
    looped_s = asyncio.run(looped(folder, scale))
    path = folder / "journal.sqlite"
    report.now(f"a journal of {scale.inputs:,} inputs is made")
    began = time.perf_counter()
    long_journal(path, scale)
    made_s = time.perf_counter() - began
    starts = [ready(path) for _ in report.counted("start", range(scale.starts), scale.starts)]
    held_s = asyncio.run(skip(path))
    report.now("single commits, alone and beside snapshots")
    alone, _ = paced(path, scale, snapshots=False)
    beside, taken = paced(path, scale, snapshots=True)
    with contextlib.closing(sqlite3.connect(path)) as database:
        (snapshot,) = database.execute("SELECT max(bytes) FROM snapshots").fetchone()
    lost = killed(folder / "killed.sqlite", scale.kills)
    figures: dict[str, float] = {
        "kills": scale.kills,
        "acked_lost": lost,
        "durable_events_per_s": events_per_s,
        "event_cpu_us": 1e6 * event_s,
        "looped_event_cpu_us": 1e6 * looped_s,
        "fdatasync_p50_ms": ms(floor, 0.5),
        "fdatasync_p99_ms": ms(floor, 0.99),
        "p50_ms": ms(alone, 0.5),
        "p99_ms": ms(alone, 0.99),
        "commit_beside_snapshot_p50_ms": ms(beside, 0.5),
        "commit_beside_snapshot_p99_ms": ms(beside, 0.99),
        "inputs": scale.inputs,
        "ready_s": max(took for took, _, _ in starts),
        "ready_process_s": max(took for _, took, _ in starts),
        "ready_cpu_s": max(found[0] for _, _, found in starts),
        "tail_s": max(found[3] for _, _, found in starts),
        "skip_s": held_s,
        "snapshot_mib": snapshot / 2**20,
        "file_gib": path.stat().st_size / 2**30 if path.exists() else 0.0,
    }
    report.table("figures", ["key", "value"], list(figures.items()))
    jobs, tail = starts[-1][2][1:3]
    print(  # noqa: T201
        f"{scale.size.nodes} nodes, {jobs:.0f} jobs of which {scale.size.training} train, {tail:.0f} inputs behind "
        f"the snapshot; {taken} snapshots taken beside {scale.paced} commits; {os.cpu_count()} cores; the journal "
        f"was made in {made_s:.0f} s"
    )
    return figures


if __name__ == "__main__":
    main()
