"""A large cluster: a thousand nodes, or the given numbers of nodes, and ten thousand jobs.

A real controller with simulated agents and CURVE.

- submissions of several clients at once, of elastic jobs and of programs; lists are whole commands, from the shell to the last line, of which the median counts;
- `floor_s`: a process that only receives the bytes of `ps -a` over an encrypted ZeroMQ connection, and prints them;
- `resync`: the controller is killed, and all nodes come back;
- `messaging` with so many nodes, as shipped: from an event to the delta that follows, frames to nodes that it does not concern,
  and what a node's connections take of the controller's memory. Of more than a thousand nodes, those beyond the thousandth are drained and run nothing.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import psutil
import uvloop
import zmq
from matplotlib.figure import Figure

from controlplane.client import Client, JobSpec
from tests.bench import messaging, report, resync
from tests.support.agent_processes import BusyAgent, all_welcomed, processes_of
from tests.support.fleet import Fleet

ONES: Final = Path(sys.executable).with_name("ones")
AGENTS: Final = 1000
SLOTS: Final = 8
JOBS: Final = 10_000
CLIENTS: Final = 4
PROGRAMS: Final = (4, 4)  # slots of a program
ASK_S: Final = 0.05
TIMES: Final = 5
MAX_TRAINING: Final = 1000  # nodes with simulated workers
SHIPPED_S: Final = 20.0
DRAWN: Final = {
    "connected_s": "all nodes connected, s",
    "resync_p95_s": "95% back after a restart, s",
    "submissions_per_s": "submissions per second",
    "event_delta_p99_ms": "event to delta, 99%, ms",
    "ps_s": "ones ps -a, s",
    "controller_mib": "memory of the controller, MiB",
}
LISTS: Final = {
    "ps_s": ("ps", "-a"),
    "ps_json_s": ("ps", "-a", "-o", "json"),
    "node_list_s": ("node", "list"),
}


CONTROL: Final = """
import sys, zmq
address, server, public, secret = (word.encode() for word in sys.argv[1:])
dealer = zmq.Context().socket(zmq.DEALER)
dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = server, public, secret
dealer.connect(address)
dealer.send(b"list")
sys.stdout.buffer.write(dealer.recv())
"""


async def submit(home: Path, spec: JobSpec, snapshot: str, count: int) -> None:
    async with Client(home, timeout=60.0) as client:
        for _ in range(count):
            await client.submit_stored(spec, snapshot)


def command_s(home: Path, words: tuple[str, ...]) -> float:
    """Return the median seconds of a whole process."""
    took = []
    for _ in range(TIMES):
        began = time.monotonic()
        _output(home, *words)
        took.append(time.monotonic() - began)
    return statistics.median(took)


def _output(home: Path, *words: str) -> bytes:
    env = {**os.environ, "ONES_HOME": str(home)}
    return subprocess.run([str(ONES), *words], check=True, env=env, stdout=subprocess.PIPE).stdout


def floor_s(home: Path) -> float:
    """Return the median seconds of `CONTROL` with the output of `ps -a`."""
    output, took = _output(home, *LISTS["ps_s"]), []
    (server, secret), (public, own_secret) = zmq.curve_keypair(), zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.curve_server, router.curve_secretkey = True, secret
        port = router.bind_to_random_port("tcp://127.0.0.1")
        words = (f"tcp://127.0.0.1:{port}", *(key.decode() for key in (server, public, own_secret)))
        for _ in range(TIMES):
            began = time.monotonic()
            command = [sys.executable, "-c", CONTROL, *words]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
                router.send_multipart([router.recv_multipart()[0], output])
                process.communicate()
            took.append(time.monotonic() - began)
    return statistics.median(took)


@asynccontextmanager
async def connected(home: Path, agents: int) -> AsyncIterator[Fleet]:
    """Run a controller with connected agents."""
    fleet = Fleet(home, agents, make=lambda *given: BusyAgent(*given, slots=SLOTS))
    parts = processes_of(fleet.agents)
    fleet.start()
    try:
        for part in parts:
            part.ask("open")
        await all_welcomed(parts, agents)
        yield fleet
    finally:
        for part in parts:
            part.end()
        await fleet.stop()


async def submit_all(home: Path, spec: JobSpec, jobs: int) -> float:
    """Submit jobs with several clients at once. Return how many they submitted per second."""
    async with Client(home) as client:
        first = await client.submit(spec)
        snapshot = (await client.job(first)).snapshot
    began = time.monotonic()
    await asyncio.gather(*[submit(home, spec, snapshot, jobs // CLIENTS) for _ in range(CLIENTS)])
    return jobs / (time.monotonic() - began)


async def measure(base: Path, *, agents: int, jobs: int) -> dict[str, float]:
    work = base / "work"
    work.mkdir()
    (work / "train.py").write_text("")
    spec = JobSpec(name="one", script="train.py", workdir=str(work), batch_size=8)
    async with connected(base / "home", agents) as fleet:
        report.now(f"{jobs} submissions to {agents} agents")
        figures = {"submissions_per_s": await submit_all(fleet.home, spec, jobs)}
        for name, words in report.counted("list", LISTS.items(), len(LISTS)):
            figures[name] = await asyncio.to_thread(command_s, fleet.home, words)
        figures["floor_s"] = await asyncio.to_thread(floor_s, fleet.home)
        figures["controller_mib"] = psutil.Process(fleet.process.pid).memory_info().rss / 2**20
    return figures | await programs(base, agents=agents, jobs=jobs, work=work)


async def programs(base: Path, *, agents: int, jobs: int, work: Path) -> dict[str, float]:
    """Submit programs, of which many wait, and measure small requests meanwhile."""
    spec = JobSpec(
        name="one", kind="torchrun", script="", command=("python", "train.py"), slots=PROGRAMS,
        batch_size=PROGRAMS[1], workdir=str(work),
    )  # fmt: skip
    took: list[float] = []

    async def ask(home: Path) -> None:
        async with Client(home, timeout=60.0) as client:
            while True:
                began = time.monotonic()
                await client.cluster()
                took.append(time.monotonic() - began)
                await asyncio.sleep(ASK_S)

    async with connected(base / "programs", agents) as fleet:
        report.now(f"{jobs} programs for {agents} agents")
        asking = asyncio.create_task(ask(fleet.home))
        per_s = await submit_all(fleet.home, spec, jobs)
        asking.cancel()
        await asyncio.wait({asking})
    return {"programs_per_s": per_s, "longest_request_s": max(took)}


def messages(base: Path, agents: int) -> dict[str, float]:
    training = min(agents, MAX_TRAINING)
    scale = replace(
        messaging.QUICK, agents=training, idle=agents - training, order="", shipped_s=SHIPPED_S
    )
    bench = messaging.Bench(scale, base)
    uvloop.run(bench.run())
    (window,) = bench.windows
    return {
        "mib": bench.mib_per_1000 * agents / 1000.0,
        "event_delta_p50_ms": messaging.ms(window.event_delta, 0.5),
        "event_delta_p99_ms": messaging.ms(window.event_delta, 0.99),
        "commit_delta_p99_ms": messaging.ms(window.commit_delta, 0.99),
        "unaffected_frames": sum(bench.meter.stray.values()),
    }


def figures_of(agents: int, jobs: int) -> dict[str, float]:
    with report.folder() as folder:
        lists, deltas = folder / "lists", folder / "deltas"
        for each in (lists, deltas):
            each.mkdir()
        figures = asyncio.run(measure(lists, agents=agents, jobs=jobs))
        back = resync.run(agents, jobs)
        figures |= {name: back[name] for name in ("connected_s", "resync_p50_s", "resync_p95_s")}
        return figures | messages(deltas, agents)


def draw(sizes: Sequence[int], figures: Sequence[Mapping[str, float]], path: Path) -> None:
    """Draw how figures depend on the number of nodes."""
    shown = Figure(figsize=(10.0, 5.0), layout="constrained")
    for axis, (name, title) in zip(shown.subplots(2, 3).flat, DRAWN.items(), strict=True):
        values = [one[name] for one in figures]
        axis.plot(sizes, values, marker="o", color="#3465a4")
        axis.set(title=title, ylim=(0.0, None), xlabel="nodes")
        axis.grid(alpha=0.3)
    shown.savefig(path, dpi=110)


def sizes_of(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    chosen = report.arguments(
        __doc__, "a tenth of the agents and jobs",
        agents=(sizes_of, [AGENTS], f"numbers of nodes, with commas; default: {AGENTS}"),
        plot=(Path, None, "draw the curves into this file"),
    )  # fmt: skip
    sizes, jobs = ([AGENTS // 10], JOBS // 10) if chosen.quick else (chosen.agents, JOBS)
    figures = [figures_of(agents, jobs) for agents in sizes]
    rows = [(name, *(one[name] for one in figures)) for name in figures[0]]
    columns = ["figure", *(f"{agents} nodes" for agents in sizes)]
    report.table(f"{jobs} jobs, {SLOTS} slots per node", columns, rows)
    if chosen.plot is not None:
        draw(sizes, figures, chosen.plot)
    report.write({"agents": sizes[-1], "jobs": jobs, **figures[-1]}, chosen.json)


if __name__ == "__main__":
    main()
