"""kill -9 of a controller with 1,000 simulated agents and 10,000 jobs: how soon all are back in session.

The journal is written first, by the same core: every slot has a job that trains, the others wait.
Agents speak over real CURVE sockets, and play no workers: they say what runs on their nodes, and
take deltas. Times are those of the agents, from the moment at which the new controller is ready
(its replay is the journal's business) and from the kill.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Final

import psutil
import uvloop
import zmq

from controlplane.core.reactor import Reactor
from schemas.ids import JobId, NodeId, Rank, Version
from schemas.wire.agent import GroupDelta, ToAgent, Welcome, WorkerSeen
from tests.bench import report
from tests.bench.long_journal import Size, history, write
from tests.support.fleet import LOG, Fleet, Seen, SimulatedAgent, Watch

SLOTS: Final = 4
SETTLE_S: Final = 5.0
LIMIT_S: Final = 120.0
TICK_S: Final = 0.25  # of an agent, as a real one's


class Arrivals(Watch):
    def __init__(self) -> None:
        self.welcomed: dict[NodeId, float] = {}
        self.deltas: dict[NodeId, float] = {}

    def heard(self, agent: SimulatedAgent, message: ToAgent, at: float) -> None:
        if isinstance(message, Welcome):
            self.welcomed.setdefault(agent.node, at)
        elif isinstance(message, GroupDelta):
            self.deltas[agent.node] = at

    def forget(self) -> None:
        self.welcomed.clear()
        self.deltas.clear()


class BusyAgent(SimulatedAgent):
    jobs: tuple[JobId, ...] = ()

    def seen(self) -> Seen:
        return tuple(
            WorkerSeen(
                job=job, version=Version(1), rank=Rank(0), slot=slot, pid=100 + slot,
                started_ticks=7, ended=False,
            )
            for slot, job in enumerate(self.jobs)
        )  # fmt: skip

    async def live(self) -> None:
        while True:
            self.do(self.session.tick(self.now()))
            await asyncio.sleep(TICK_S)


async def measure(home: Path, count: int, jobs: int) -> dict[str, float]:
    watch = Arrivals()
    fleet = Fleet(home, count, make=lambda *given: BusyAgent(*given, slots=SLOTS, watch=watch))
    fleet.context.set(zmq.MAX_SOCKETS, 4 * count + 100)
    report.now(f"the journal of {jobs} jobs is written")
    (home / "state").mkdir()
    training = min(jobs, count * SLOTS)
    inputs = history(Size(count, jobs, training), 0, SLOTS, time.time() - 3600.0)
    write(home / "state" / "journal.sqlite", inputs, Reactor())
    every = [JobId(f"job-{number}") for number in range(1, training + 1)]
    for number, agent in enumerate(fleet.agents):
        assert isinstance(agent, BusyAgent)
        agent.jobs = tuple(every[number * SLOTS : (number + 1) * SLOTS])
    figures: dict[str, float] = {"agents": count, "jobs": jobs}
    try:
        report.now(f"{count} agents connect")
        fleet.start()
        ready = await until_ready(fleet, 1)
        for agent in fleet.agents:
            agent.open(fleet.context)
            fleet.tasks.append(asyncio.create_task(agent.listen()))
            fleet.tasks.append(asyncio.create_task(agent.live()))
        opened = time.monotonic()
        await until_welcome(watch, count)
        figures["connected_s"] = max(watch.welcomed.values()) - max(opened, ready)
        await asyncio.sleep(SETTLE_S)
        watch.forget()
        greeted = lines(fleet, "node greeted")
        killed = time.monotonic()
        report.now(f"{count} agents come back after kill -9")
        fleet.process.kill()
        fleet.process.wait()
        fleet.start()
        ready = await until_ready(fleet, 2)
        await until_welcome(watch, count)
        back = sorted(watch.welcomed.values())
        figures |= {
            "ready_s": ready - killed,
            "resync_p50_s": back[count // 2] - ready,
            "resync_p95_s": back[int(0.95 * count)] - ready,
            "resync_max_s": back[-1] - ready,
            "resync_p95_after_kill_s": back[int(0.95 * count)] - killed,
        }
        await asyncio.sleep(SETTLE_S)
        figures["last_delta_s"] = max(watch.deltas.values(), default=ready) - ready
        figures["hellos_journalled"] = lines(fleet, "node greeted") - greeted
        figures["in_session"] = sum(agent.session.session is not None for agent in fleet.agents)
        usage = psutil.Process(fleet.process.pid).memory_info()
        figures["controller_mib"] = usage.rss / 2**20
        return figures
    finally:
        await fleet.__aexit__()


async def until_ready(fleet: Fleet, times: int) -> float:
    """Wait until the controller has logged `times` times that it is ready; return the time."""
    async with asyncio.timeout(LIMIT_S):
        while lines(fleet, "controller ready") < times:
            await asyncio.sleep(0.02)
    return time.monotonic()


async def until_welcome(watch: Arrivals, count: int) -> None:
    try:
        async with asyncio.timeout(LIMIT_S):
            while len(watch.welcomed) < count:
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise SystemExit(f"{len(watch.welcomed)} of {count} in session after {LIMIT_S} s") from None


def lines(fleet: Fleet, event: str) -> int:
    return (fleet.home / LOG).read_text().count(json.dumps(event))


def run(count: int, jobs: int) -> dict[str, float]:
    with report.folder() as folder:
        return uvloop.run(measure(folder, count, jobs))


def show(figures: dict[str, float]) -> None:
    title = f"controller killed under {figures['agents']:g} agents and {figures['jobs']:g} jobs"
    report.table(f"{title}, {os.cpu_count()} cores", ["key", "value"], list(figures.items()))


def main() -> None:
    chosen = report.arguments(__doc__, "a fifth of the agents and jobs")
    figures = run(200, 2000) if chosen.quick else run(1000, 10_000)
    show(figures)
    report.write(figures, chosen.json)


if __name__ == "__main__":
    main()
