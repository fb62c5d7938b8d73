"""What people wait for on a large cluster: lists of ten thousand jobs and a thousand nodes, and submissions.

A real controller with simulated agents and CURVE. Lists are whole commands, from the shell to the
last line; each is asked for some times, and the median counts.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import zmq

from controlplane.client import Client, JobSpec
from tests.bench import report
from tests.support.fleet import Fleet
from tests.support.simulated_agent import SimulatedAgent

ONES: Final = Path(sys.executable).with_name("ones")
AGENTS: Final = 1000
SLOTS: Final = 8
JOBS: Final = 10_000
CLIENTS: Final = 4
TIMES: Final = 5
LISTS: Final = {
    "ps_s": ("ps", "-a"),
    "ps_json_s": ("ps", "-a", "-o", "json"),
    "node_list_s": ("node", "list"),
}


async def submit(home: Path, spec: JobSpec, snapshot: str, count: int) -> None:
    """One client, one job after the other."""
    async with Client(home, timeout=60.0) as client:
        for _ in range(count):
            await client.submit_stored(spec, snapshot)


def command_s(home: Path, words: tuple[str, ...]) -> float:
    """Of a whole process, median."""
    took = []
    for _ in range(TIMES):
        began = time.monotonic()
        subprocess.run(
            [str(ONES), *words],
            check=True,
            env={**os.environ, "ONES_HOME": str(home)},
            stdout=subprocess.DEVNULL,
        )
        took.append(time.monotonic() - began)
    return statistics.median(took)


async def measure(base: Path, *, agents: int, jobs: int) -> dict[str, float]:
    """Submissions, then lists."""
    work = base / "work"
    work.mkdir()
    (work / "train.py").write_text("")
    spec = JobSpec(name="one", script="train.py", workdir=str(work), batch_size=8)
    fleet = Fleet(base / "home", agents, make=lambda *given: SimulatedAgent(*given, slots=SLOTS))
    fleet.context.set(zmq.MAX_SOCKETS, 3 * agents + 100)
    async with fleet:
        async with Client(fleet.home) as client:
            first = await client.submit(spec)
            snapshot = (await client.job(first)).snapshot
        began = time.monotonic()
        each = [submit(fleet.home, spec, snapshot, jobs // CLIENTS) for _ in range(CLIENTS)]
        await asyncio.gather(*each)
        figures = {"submissions_per_s": jobs / (time.monotonic() - began)}
        for name, words in LISTS.items():
            figures[name] = await asyncio.to_thread(command_s, fleet.home, words)
    return figures


def main() -> None:
    """Print the table and write the figures."""
    chosen = report.arguments(__doc__ or "")
    agents, jobs = (AGENTS // 10, JOBS // 10) if chosen.quick else (AGENTS, JOBS)
    with tempfile.TemporaryDirectory(prefix="ones-bench-") as folder:
        figures = asyncio.run(measure(Path(folder), agents=agents, jobs=jobs))
    report.table(f"{jobs} jobs, {agents} nodes of {SLOTS} slots", ["figure", "value"], list(figures.items()))  # fmt: skip
    report.write(figures, chosen.json)


if __name__ == "__main__":
    main()
