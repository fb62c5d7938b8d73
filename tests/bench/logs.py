"""Output of workers: files, real shippers, CURVE sockets, a real controller, followers.

Shippers of several nodes and all followers live in this process, so they share one core; the controller has the
other one. Measured: lines per second from files to the controller's store, and the delay of small requests to the
controller meanwhile; the delay of a line at a follower at a steady 20,000 lines a second; the memory of the relay that
a follower costs that requests lines and never reads them. Every
written byte has to be in the store, and each line at its follower once.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import psutil

from controlplane.client import Client, JobSpec
from controlplane.journal.mark import read_mark
from nodeagent.folders import WorkerFolder
from nodeagent.logs import LogShipper
from schemas.codec import TO_SHIPPER, encode
from schemas.ids import JobId, Rank, Version, WorkerId
from schemas.nodes import Group
from schemas.transport.keys import load_keys, load_public
from schemas.transport.sockets import Link, Socket
from schemas.wire.feed import LogStored, ReadLog
from schemas.wire.worker import Assignment
from tests.bench import report
from tests.support.cluster import child_of
from tests.support.fleet import Fleet, SimulatedAgent

NODES: Final = 4
STREAMS: Final = 8  # of each node, one job each
LINE: Final = b"x" * 83  # and its time and number: 100 bytes
BULK_LINES: Final = 10_000_000
RATE: Final = 20_000  # lines a second, all in all
STEADY_S: Final = 20.0
TICK_S: Final = 0.01
FOLLOWED: Final = 4
STALLED: Final = 50


def line(number: int) -> bytes:
    return b"%015.6f %08d %b\n" % (time.time() % 1e8, number, LINE[:74])


class Output:
    def __init__(
        self, folder: Path, job: JobId, spec: JobSpec, shipper: LogShipper, journal: str
    ) -> None:
        self.job = job
        self.folder = WorkerFolder(folder / f"{job}.v1.r0")
        group = Group(version=Version(1), members=(), lr=None)
        assignment = Assignment(
            job=job, version=Version(1), rank=Rank(0), slot=0, group=group, spec=spec, workdir="/",
            checkpoints="/", socket="", env={}, journal=journal,
        )  # fmt: skip
        self.folder.write_assignment(assignment)
        self.file = self.folder.stream("log").open("ab", buffering=0)
        self.folder.stream("samples").touch()
        self.lines = 0
        shipper.watch(WorkerId(self.folder.path.name), assignment, self.folder)

    def write(self, count: int) -> None:
        self.file.write(b"".join(line(self.lines + n) for n in range(count)))
        self.lines += count


@dataclass
class Site:
    base: Path
    fleet: Fleet
    outputs: list[Output]
    tasks: list[asyncio.Task[None]]

    @classmethod
    async def made(cls, base: Path, fleet: Fleet) -> Site:
        shippers, tasks = dict[str, LogShipper](), []
        for agent in fleet.agents:
            shipper = LogShipper(agent.node, lambda _: None)
            socket = agent._connect("DEALER", "shippers")
            shipper.use(socket)
            shippers[agent.node] = shipper
            tasks += [
                asyncio.create_task(shipper.ship()),
                asyncio.create_task(hear(socket, shipper)),
            ]
        work = base / "work"
        work.mkdir()
        (work / "train.py").write_text("")
        outputs = []
        mark = read_mark(fleet.home / "state" / "journal.sqlite")
        assert mark is not None
        async with Client(fleet.home) as client:
            spec = JobSpec(
                name="log", script="train.py", workdir=str(work), batch_size=1, slots=(1, 1)
            )
            for _ in range(NODES * STREAMS):
                job = await client.submit(spec)
                while not (workers := (await client.job(job)).workers):
                    await asyncio.sleep(0.01)
                shipper = shippers[workers[0].node]
                outputs.append(Output(base / "run", job, spec, shipper, mark.journal))
            [_ async for _ in client.output_pages(outputs[0].job, follow=False)]  # relay is ready
        return cls(base, fleet, outputs, tasks)

    def stored(self) -> int:
        logs = self.fleet.home / "state" / "logs"
        return sum(path.stat().st_size for path in logs.rglob("*") if path.is_file())


async def hear(socket: Socket, shipper: LogShipper) -> None:
    async for incoming in socket:
        message = TO_SHIPPER.decode(incoming.frames[-1])
        if isinstance(message, LogStored):
            shipper.receive(message)


def time_requests(home: Path, channel: Connection) -> None:
    """Send a small request every 5 ms until told to stop; send back the delays in seconds."""

    async def requests() -> list[float]:
        late = []
        async with Client(home) as client:
            await client.cluster()
            channel.send(None)
            while not channel.poll(0.005):
                began = time.monotonic()
                await client.cluster()
                late.append(time.monotonic() - began)
        return late

    channel.send(asyncio.run(requests()))


async def bulk(site: Site, lines: int) -> dict[str, float]:
    here, there = Pipe()
    timing = get_context("spawn").Process(target=time_requests, args=(site.fleet.home, there))
    timing.start()
    await asyncio.to_thread(here.recv)
    before = site.stored()
    for output in site.outputs:
        output.write(lines // len(site.outputs))
    wanted = sum(output.file.tell() for output in site.outputs)
    began = time.monotonic()
    while site.stored() - before < wanted:
        await asyncio.sleep(0.02)
    took = time.monotonic() - began
    here.send(None)
    late = await asyncio.to_thread(here.recv)
    timing.join()
    return {
        "lines_per_s": lines / took,
        "mib_per_s": wanted / took / 2**20,
        "request_p50_ms": 1e3 * statistics.median(late),
        "request_p99_ms": 1e3 * report.quantile(late, 0.99),
    }


async def steady(site: Site, seconds: float) -> dict[str, float]:
    late: list[float] = []
    followed = random.Random(1).sample(site.outputs, FOLLOWED)  # noqa: S311 - a choice
    numbers: dict[JobId, list[int]] = {output.job: [] for output in followed}
    first = {output.job: output.lines for output in followed}

    async def follow(output: Output) -> None:
        async with Client(site.fleet.home, timeout=60.0) as client:
            async for page in client.output_pages(output.job, follow=True, since=time.time()):
                now = time.time() % 1e8
                for one in page:
                    at, number, _ = one.text.split(" ", 2)
                    late.append(now - float(at))
                    numbers[output.job].append(int(number))

    following = [asyncio.create_task(follow(output)) for output in followed]
    await asyncio.sleep(1.0)
    share = RATE * TICK_S / len(site.outputs)
    owed, ends = 0.0, time.monotonic() + seconds
    at = time.monotonic()
    while time.monotonic() < ends:
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        at += TICK_S
        owed += share
        for output in site.outputs:
            output.write(int(owed))
        owed -= int(owed)
    await asyncio.sleep(2.0)
    for task in following:
        task.cancel()
    lost = 0
    for output in followed:
        expected = range(first[output.job], output.lines)
        lost += numbers[output.job] != list(expected)
    return {
        "followed_lines": len(late),
        "followers_with_lost_or_repeated_lines": lost,
        "p50_ms": 1e3 * statistics.median(late),
        "p99_ms": 1e3 * report.quantile(late, 0.99),
        "max_ms": 1e3 * max(late),
    }


async def stalled(site: Site) -> dict[str, float]:
    process = psutil.Process(child_of(site.fleet.process.pid, "ones: relay"))
    before = process.memory_info().rss
    keys = site.fleet.home / "keys"
    link = Link(load_keys(keys / "admin.key_secret"))
    address = f"tcp://127.0.0.1:{site.fleet.ports['followers']}"
    sockets = [
        link.connect("DEALER", address, load_public(keys / "server.key")) for _ in range(STALLED)
    ]
    for _ in range(20):
        for number, socket in enumerate(sockets):
            job = site.outputs[number % len(site.outputs)].job
            socket.send(b"id", encode(ReadLog(job=job, max_bytes=1 << 20)))
        await asyncio.sleep(0.2)
    await asyncio.sleep(2.0)
    grown = (process.memory_info().rss - before) / 2**20
    link.close()
    return {"mib_per_stalled_follower": grown / STALLED}


async def measure(base: Path, *, quick: bool) -> dict[str, float]:
    async with Fleet(base / "home", NODES, make=partial(SimulatedAgent, slots=STREAMS)) as fleet:
        site = await Site.made(base, fleet)
        report.now("lines as fast as they go")
        figures = await bulk(site, BULK_LINES // 10 if quick else BULK_LINES)
        report.now(f"{RATE:,} lines a second")
        figures |= await steady(site, STEADY_S / 4 if quick else STEADY_S)
        written = sum(output.file.tell() for output in site.outputs)
        stored = site.stored()
        figures["bytes_not_stored"] = max(0, written - stored)
        incomplete = figures["followers_with_lost_or_repeated_lines"]
        figures["lost"] = figures["bytes_not_stored"] + incomplete  # 0 or not
        report.now("followers that never read")
        figures |= await stalled(site)
        for task in site.tasks:
            task.cancel()
    return figures


def main() -> None:
    chosen = report.arguments(__doc__, "a tenth of the lines, 5 s at a steady rate")
    with report.folder() as folder:
        figures = asyncio.run(measure(folder, quick=chosen.quick))
    report.finish(figures, chosen.json, "output")


if __name__ == "__main__":
    main()
