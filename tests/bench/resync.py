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

from controlplane.core.reactor import Reactor
from schemas.ids import JobId
from tests.bench import report
from tests.bench.long_journal import Size, history, write
from tests.support.agent_processes import LIMIT_S, BusyAgent, all_welcomed, processes_of
from tests.support.fleet import LOG, Fleet

SLOTS: Final = 4
SETTLE_S: Final = 5.0


async def measure(home: Path, count: int, jobs: int) -> dict[str, float]:
    fleet = Fleet(home, count, make=lambda *given: BusyAgent(*given, slots=SLOTS))
    report.now(f"the journal of {jobs} jobs is written")
    (home / "state").mkdir()
    training = min(jobs, count * SLOTS)
    inputs = history(Size(count, jobs, training), 0, SLOTS, time.time() - 3600.0)
    write(home / "state" / "journal.sqlite", inputs, Reactor())
    every = [JobId(f"job-{number}") for number in range(1, training + 1)]
    agents = [agent for agent in fleet.agents if isinstance(agent, BusyAgent)]
    for number, agent in enumerate(agents):
        agent.jobs = tuple(every[number * SLOTS : (number + 1) * SLOTS])
    parts = processes_of(agents)
    figures: dict[str, float] = {"agents": count, "jobs": jobs}
    try:
        report.now(f"{count} agents connect")
        fleet.start()
        ready = await until_ready(fleet, 1)
        opened = max(part.ask("open") for part in parts)
        welcomed = await all_welcomed(parts, count, partly=True)
        figures["connected_s"] = welcomed[-1] - max(opened, ready)
        await asyncio.sleep(SETTLE_S)
        for part in parts:
            part.ask("forget")
        greeted = lines(fleet, "node greeted")
        killed = time.monotonic()
        report.now(f"{count} agents come back after kill -9")
        fleet.process.kill()
        fleet.process.wait()
        fleet.start()
        ready = await until_ready(fleet, 2)
        back = await all_welcomed(parts, count, partly=True)
        figures |= {
            "ready_s": ready - killed,
            "resync_p50_s": back[count // 2] - ready,
            "resync_p95_s": back[int(0.95 * count)] - ready,
            "resync_max_s": back[-1] - ready,
            "resync_p95_after_kill_s": back[int(0.95 * count)] - killed,
        }
        await asyncio.sleep(SETTLE_S)
        deltas = [at for part in parts for at in part.ask("deltas")]
        figures["last_delta_s"] = max(deltas, default=ready) - ready
        figures["hellos_journalled"] = lines(fleet, "node greeted") - greeted
        controller = psutil.Process(fleet.process.pid)
        figures["controller_cores"] = await share_of_a_core(controller, SETTLE_S)
        figures["in_session"] = sum(part.ask("in session") for part in parts)
        figures["controller_mib"] = controller.memory_info().rss / 2**20
        return figures
    finally:
        for part in parts:
            part.end()
        await fleet.__aexit__()


async def share_of_a_core(process: psutil.Process, seconds: float) -> float:
    """Return the share of one core that a process uses in the next seconds."""
    before = process.cpu_times()
    began = time.monotonic()
    await asyncio.sleep(seconds)
    after = process.cpu_times()
    used = after.user + after.system - before.user - before.system
    return float(used / (time.monotonic() - began))


async def until_ready(fleet: Fleet, times: int) -> float:
    """Wait until the controller has logged `times` times that it is ready; return the time."""
    async with asyncio.timeout(LIMIT_S):
        while lines(fleet, "controller ready") < times:
            await asyncio.sleep(0.02)
    return time.monotonic()


def lines(fleet: Fleet, event: str) -> int:
    return (fleet.home / LOG).read_text().count(json.dumps(event))


def run(count: int, jobs: int) -> dict[str, float]:
    with report.folder() as folder:
        return uvloop.run(measure(folder, count, jobs))


def show(figures: dict[str, float]) -> None:
    title = f"controller killed under {figures['agents']:g} agents and {figures['jobs']:g} jobs"
    report.table(f"{title}, {os.cpu_count()} cores", ["key", "value"], list(figures.items()))


def main() -> None:
    chosen = report.arguments(
        __doc__, "a fifth of the agents and jobs", agents=(int, 1000, "default: 1000")
    )
    figures = run(200, 2000) if chosen.quick else run(chosen.agents, 10_000)
    show(figures)
    report.write(figures, chosen.json)


if __name__ == "__main__":
    main()
