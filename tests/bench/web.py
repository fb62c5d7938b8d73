"""The web page of 1,000 jobs on 512 slots, in headless Chromium, and what it costs the controller.

The agents are simulated, the controller, its page and the browser are real. News are jobs that a
client holds and releases. The controller's CPU time is compared with that for one more follower of
the feed, under the same news.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import psutil
import uvloop
import zmq

from controlplane.client import Client
from controlplane.core.reactor import Reactor
from controlplane.web.mirror import State
from controlplane.web.views import Views, differences, environment
from schemas.ids import JobId
from tests.bench import report
from tests.bench.long_journal import Size, history, write
from tests.bench.resync import share_of_a_core, until_ready
from tests.support.agent_processes import BusyAgent
from tests.support.fleet import Fleet

ONES: Final = Path(sys.executable).with_name("ones")
NODES, SLOTS, JOBS, EPOCHS = 128, 4, 1000, 5000
HELD_PER_S: Final = 10.0
WATCH_S: Final = 20.0
ALL_ROWS: Final = (
    "() => document.querySelectorAll('#running tr, #queue tr').length >= {}"
    " && performance.getEntriesByName('drawn').length > 0"
)


async def news(home: Path) -> None:
    """Hold and release waiting jobs, until cancelled."""
    async with Client(home) as client:
        for number in range(10**9):
            job = f"job-{JOBS - number // 2 % 200}"
            await (client.release(job) if number % 2 else client.hold(job))
            await asyncio.sleep(1.0 / HELD_PER_S)


async def follow(home: Path) -> None:
    async with Client(home) as client:
        async for _ in client.events(1, follow=True):
            pass


async def browse(url: str, seconds: float) -> dict[str, float]:
    """Open the page, and follow it."""
    from playwright.async_api import async_playwright  # noqa: PLC0415 - is installed for this only

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = await browser.new_page(viewport={"width": 1440, "height": 900})
        begin = time.monotonic()
        await page.goto(url)
        await page.wait_for_function(ALL_ROWS.format(JOBS))
        rendered = time.monotonic() - begin
        await asyncio.sleep(seconds)
        updates: list[Any] = await page.evaluate(
            "performance.getEntriesByName('update').map(e => [e.duration, e.detail])"
        )
        await browser.close()
    took = [duration for duration, parts in updates[1:] if parts]
    return {"render_s": rendered, "update_ms": statistics.median(took), "update_ms_max": max(took)}


async def of_parts(home: Path) -> float:
    """The median time (ms) to make the parts of the first page, and those that differ."""
    async with Client(home) as client:
        jobs, nodes = await client.jobs(), await client.nodes()
        state = State(
            jobs=jobs, nodes=nodes, cluster=await client.cluster(), sharing=await client.sharing()
        )
    views, took = Views(environment(), "/"), []
    old = views.now(state)
    for _ in range(9):
        begin = time.perf_counter()
        differences(old, views.now(state))
        took.append(time.perf_counter() - begin)
    return 1000 * statistics.median(took)


async def measure(home: Path, seconds: float) -> dict[str, float]:
    fleet = Fleet(home, NODES, make=lambda *given: BusyAgent(*given, slots=SLOTS))
    fleet.context.set(zmq.MAX_SOCKETS, 4 * NODES + 100)
    report.now("the journal is written")
    (home / "state").mkdir()
    training = NODES * SLOTS
    inputs = history(Size(NODES, JOBS, training), EPOCHS, SLOTS, time.time() - 600.0)
    write(home / "state" / "journal.sqlite", inputs, Reactor())
    for number, agent in enumerate(fleet.agents):
        assert isinstance(agent, BusyAgent)
        first = number * SLOTS + 1
        agent.jobs = tuple(JobId(f"job-{at}") for at in range(first, first + SLOTS))
    page: subprocess.Popen[bytes] | None = None
    tasks: list[asyncio.Task[Any]] = []
    figures: dict[str, float] = {"jobs": JOBS, "slots": training}
    try:
        fleet.start()
        await until_ready(fleet, 1)
        await fleet.join()
        controller = psutil.Process(fleet.process.pid)
        tasks.append(asyncio.create_task(news(home)))
        await asyncio.sleep(5.0)
        report.now("the controller alone")
        alone = await share_of_a_core(controller, seconds)
        report.now("the controller with one more follower")
        follower = asyncio.create_task(follow(home))
        await asyncio.sleep(2.0)
        followed = await share_of_a_core(controller, seconds)
        follower.cancel()
        report.now("the page in a browser")
        page = subprocess.Popen(  # noqa: ASYNC220 - long-lived
            [ONES, "web", "--home", home, "-o", "jsonl"], stdout=subprocess.PIPE
        )
        assert page.stdout is not None
        url = json.loads(await asyncio.to_thread(page.stdout.readline))["url"]
        figures["parts_ms"] = await of_parts(home)
        begun = asyncio.create_task(share_of_a_core(controller, seconds + 5.0))
        figures |= await browse(url, seconds)
        watched = await begun
        figures |= {
            "controller_alone": alone, "controller_with_follower": followed,
            "controller_with_page": watched, "page_more_than_follower": watched - followed,
        }  # fmt: skip
        return figures
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if page is not None:
            page.terminate()
            page.wait()
        await fleet.__aexit__()


def main() -> None:
    chosen = report.arguments(__doc__, "5 s instead of 20")
    with report.folder() as folder:
        figures = uvloop.run(measure(folder, 5.0 if chosen.quick else WATCH_S))
    title = f"the page of {JOBS} jobs, {os.cpu_count()} cores; controller_*: share of a core"
    report.table(title, ["key", "value"], list(figures.items()))
    report.write(figures, chosen.json)


if __name__ == "__main__":
    main()
