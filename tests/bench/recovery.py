"""kill -9 of controller and agent under four training workers: the effect on the workers.

Each case is compared with an undisturbed window of the same length in the same run, because four workers on few
cores disturb one another too. Every worker writes the time of each step into a file. Then `resync`: the same
kill under a thousand simulated agents.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench import report, resync
from tests.bench.steps import ends, submit
from tests.support.cluster import Cluster, kill

WORKERS = 4
DISTURBED_RATIO = 3.0


@dataclass
class Case:
    name: str
    median_ms: float
    largest_ratio: float
    disturbed: int
    back_s: float


def gaps(folders: list[Path], start: float, end: float) -> list[tuple[float, float]]:
    """Return the median and the largest seconds between two steps in the window, by job."""
    found = []
    for folder in folders:
        inside = [at for at in ends(folder) if start <= at <= end]
        between = [b - a for a, b in itertools.pairwise(inside)]
        found.append((statistics.median(between), max(between)))
    return found


def window(name: str, folders: list[Path], seconds: float, act: Callable[[], float]) -> Case:
    report.now(name)
    start = time.time()
    until(start + seconds / 3)
    back_s = act()
    until(max(time.time(), start + seconds))
    found = gaps(folders, start, time.time())
    ratios = [largest / median for median, largest in found]
    return Case(
        name, statistics.median(m for m, _ in found) * 1000, max(ratios),
        sum(ratio > DISTURBED_RATIO for ratio in ratios), back_s,
    )  # fmt: skip


def until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))


def adopted(cluster: Cluster) -> float:
    agent, controller = (
        [json.loads(line) for line in (cluster.home / "logs" / name).read_text().splitlines()]
        for name in ("agent-1.log", "controller.log")
    )
    ready = next(line["timestamp"] for line in agent if line["event"] == "worker adopted")
    greeted = [line for line in controller if line["event"] == "node greeted"][-1]
    return seconds(greeted["timestamp"]) - seconds(ready)


def seconds(stamp: str) -> float:
    """Return an ISO time of one day as seconds."""
    hours, minutes, rest = stamp.partition("T")[2].rstrip("Z").split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(rest)


def run(base: Path, width: int, idle_s: float, window_s: float) -> tuple[list[Case], float, int]:
    """Return the cases, the seconds of the adoption, and the lost events."""
    cluster = Cluster(base / "home", base / "jobs")
    report.now("four jobs start")
    with report.running(cluster) as pids:
        return measured(cluster, pids, base, {"WIDTH": width, "IDLE_S": idle_s}, window_s)


def measured(
    cluster: Cluster, pids: dict[str, Any], base: Path, env: dict[str, float], window_s: float
) -> tuple[list[Case], float, int]:
    folders = [base / f"steps-{number}" for number in range(WORKERS)]
    fields = {"slots": [1, 1], "record_samples": False}
    jobs = [submit(cluster, one, samples=1600, batch=32, env=env, **fields) for one in folders]
    for job in jobs:
        cluster.until_epoch(job, 2)

    def again(pid: int) -> float:
        kill(pid)
        began = time.time()
        cluster.up()
        return time.time() - began

    cases = [
        window("undisturbed", folders, window_s, lambda: 0.0),
        window("controller killed", folders, window_s, lambda: again(pids["controller"])),
        window("agent killed", folders, window_s, lambda: again(pids["agents"][0])),
    ]
    shown = [cluster.show(job) for job in jobs]
    lost = sum(
        [epoch["epoch"] for epoch in one["epochs"]] != list(range(1, len(one["epochs"]) + 1))
        or len(one["versions"]) != 1
        for one in shown
    )
    adopt_s = adopted(cluster)
    for job in jobs:
        cluster.ones("cancel", job)
    return cases, adopt_s, lost


def main() -> None:
    chosen = report.arguments(__doc__, "windows of 5 s, a fifth of the agents")
    window_s = 5.0 if chosen.quick else 20.0
    figures: dict[str, float] = {}
    for kind, width, idle_s in (("one thread idle", 64, 0.03), ("all threads busy", 1200, 0.0)):
        with report.folder() as folder:
            cases, adopt_s, lost = run(folder, width, idle_s, window_s)
        report.table(
            f"{WORKERS} workers, {kind}, {os.cpu_count()} cores, windows of {window_s:.0f} s",
            ["case", "median step ms", "largest gap / median", "workers above 3 x", "up again s"],
            [(c.name, c.median_ms, c.largest_ratio, c.disturbed, c.back_s) for c in cases],
        )
        prefix = "" if idle_s else "busy_"
        for case in cases:
            figures[f"{prefix}gap_ratio_{case.name.split()[0]}"] = case.largest_ratio
        figures[f"{prefix}controller_resync_s"] = cases[1].back_s
        figures[f"{prefix}agent_adopt_s"] = adopt_s
        figures[f"{prefix}workers_disturbed"] = sum(case.disturbed for case in cases[1:])
        figures[f"{prefix}acked_lost"] = lost
    crowd = resync.run(200, 2000) if chosen.quick else resync.run(1000, 10_000)
    resync.show(crowd)
    figures |= crowd
    report.finish(figures, chosen.json)


if __name__ == "__main__":
    main()
