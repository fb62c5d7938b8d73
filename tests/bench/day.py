"""A day in ten minutes: thousands of short jobs through a real controller, agent, search and trainings.

Memory of each process, sizes of files, and the time of `ps -a` must have bounds: measured before the first
job, half way and at the end. Retention is as short, relative to ten minutes, as the default is to months.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil

from controlplane.client import Client, JobSpec
from tests.bench import report
from tests.support.cluster import Cluster

JOBS: Final = 3000
QUICK: Final = 150
DAY_S: Final = 600.0  # in which they come
SLOTS: Final = 8
AHEAD: Final = 40  # jobs that wait or run at once
KEEP_S: Final = 60.0
SCRIPT: Final = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from elastic import ScalingAgent

agent = ScalingAgent.from_env()
data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
model, optimizer, loader = agent.load(
    lambda: nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.01), data, batch_size=16)
for epoch in agent.epochs(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    print("epoch", epoch, loss.item())
    agent.report(mse=loss.item())
"""
RETENTION: Final = f"""
[journal]
keep_inputs_s = {KEEP_S}
keep_events_s = {KEEP_S}
keep_jobs_s = {KEEP_S}
[store]
keep_logs_s = {KEEP_S}
keep_archives_s = {KEEP_S}
"""
PARTS: Final = {
    "search": re.compile(r"planner\.search_process"),
    "snapshots": re.compile(r"journal\.take_snapshot"),
    "zygote": re.compile(r"elastic\.worker\.zygote"),
}


def memory_mib(pids: dict[str, Any]) -> dict[str, float]:
    """Return the resident memory of the largest process of each kind."""
    found: dict[str, float] = {}
    for name, pid in (("controller", pids["controller"]), ("agent", pids["agents"][0])):
        for process in _family(pid):
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                kind = next((k for k, what in PARTS.items() if what.search(words)), "")
                kind = kind or (name if process.pid == pid else "")
                if kind:
                    rss = process.memory_info().rss / 2**20
                    found[kind] = max(found.get(kind, 0.0), rss)
    return found


def _family(pid: int) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        yield process
        yield from process.children(recursive=True)


def sizes_mib(home: Path) -> dict[str, float]:
    groups = {
        "journal": home.glob("state/journal.sqlite*"),
        "output": _below(home / "state/logs"),
        "archives": _below(home / "state/snapshots"),
        "checkpoints": _below(home / "state/checkpoints"),
        "work": _below(home / "state/work"),
        "run": _below(home / "run"),
        "daemons' logs": home.glob("logs/*"),
    }
    return {name: sum(map(_size, paths)) / 2**20 for name, paths in groups.items()}


def _below(folder: Path) -> Iterator[Path]:
    for inside, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(inside, name)


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.lstat().st_blocks * 512
    return 0


async def drive(cluster: Cluster, jobs: int, looks: list[dict[str, float]]) -> tuple[int, float]:
    """Submit jobs at an even pace, at most `AHEAD` at once; return the successes and the seconds."""
    folder = cluster.write(SCRIPT).parent
    spec = JobSpec(
        name="short", script="train.py", workdir=str(folder), batch_size=16, max_batch_size="keep",
        env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    began = time.monotonic()
    well = 0
    pids = cluster.up()
    look = {"at": 0.0, **memory_mib(pids), **sizes_mib(cluster.home)}
    looks.append(look)
    async with Client(cluster.home, timeout=60.0) as client:
        slots = asyncio.Semaphore(AHEAD)

        async def one(number: int) -> bool:
            await asyncio.sleep(max(0.0, began + number * DAY_S / JOBS - time.monotonic()))
            async with slots:
                job = await client.submit(spec)
                return (await client.wait(job)).summary.state == "succeeded"

        waiting = [asyncio.create_task(one(number)) for number in range(jobs)]
        ended = report.counted("job", asyncio.as_completed(waiting), jobs)
        for number, task in enumerate(ended, start=1):
            well += await task
            if number in {jobs // 4, jobs // 2, 3 * jobs // 4, jobs}:
                look_s = await _look_s(client)
                now = time.monotonic() - began
                looks.append(
                    {"at": now, "ps -a, s": look_s, **memory_mib(pids), **sizes_mib(cluster.home)}
                )
    return well, time.monotonic() - began


async def _look_s(client: Client) -> float:
    began = time.monotonic()
    await client.jobs(ended=True)
    return time.monotonic() - began


def main() -> None:
    chosen = report.arguments(__doc__, f"{QUICK} jobs")
    jobs = QUICK if chosen.quick else JOBS
    looks: list[dict[str, float]] = []
    with report.folder() as folder:
        cluster = Cluster(folder / "home", folder / "jobs", slots=SLOTS, policy="ones")
        agent = f"keep_work_s = {KEEP_S}\nkeep_checkpoints_s = {KEEP_S}\n"
        with report.running(cluster, RETENTION, agent):
            well, took_s = asyncio.run(drive(cluster, jobs, looks))
    kinds = list(dict.fromkeys(key for look in looks for key in look))
    rows = [(kind, *(look.get(kind, float("nan")) for look in looks)) for kind in kinds]
    report.table(
        f"{well} of {jobs} jobs in {took_s:.0f} s; memory and disk in MiB",
        ["", "before", "a quarter", "half", "three quarters", "end"],
        rows,
    )
    half, end = looks[2], looks[-1]
    both = [kind for kind in kinds if kind in half and kind in end]
    figures = {f"{kind}_end_vs_half": end[kind] / max(half[kind], 1e-9) for kind in both}
    report.write({"jobs": jobs, "succeeded": well, "took_s": took_s, **figures}, chosen.json)


if __name__ == "__main__":
    main()
