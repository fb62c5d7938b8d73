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
from tests.support.cluster import Cluster, kill

SCRIPT = """
import os, time, torch
from torch import nn
from torch.utils.data import TensorDataset
from elastic import ScalingAgent

agent = ScalingAgent.from_env()
inputs = torch.randn(1600, 64)
data = TensorDataset(inputs, inputs.mean(dim=1, keepdim=True))
width = int(os.environ["WIDTH"])


def build_model():
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                         nn.Linear(width, 1))


model, optimizer, loader = agent.load(
    build_model, lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), data, batch_size=32)
steps = open(os.environ["STEPS"] + os.environ["ONES_JOB"], "w", buffering=1)
for epoch in agent.epochs(100):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        time.sleep(float(os.environ["IDLE_S"]))
        steps.write(f"{time.time()}\\n")
"""
WORKERS = 4
DISTURBED_RATIO = 3.0


@dataclass
class Case:
    name: str
    median_ms: float
    largest_ratio: float
    disturbed: int
    back_s: float


def gaps(files: list[Path], start: float, end: float) -> list[tuple[float, float]]:
    """Return the median and the largest seconds between two steps in the window, by worker."""
    found = []
    for path in files:
        times = [float(line) for line in path.read_text().split("\n")[:-1]]
        inside = [t for t in times if start <= t <= end]
        between = [b - a for a, b in itertools.pairwise(inside)]
        found.append((statistics.median(between), max(between)))
    return found


def window(name: str, files: list[Path], seconds: float, act: Callable[[], float]) -> Case:
    report.now(name)
    start = time.time()
    until(start + seconds / 3)
    back_s = act()
    until(max(time.time(), start + seconds))
    found = gaps(files, start, time.time())
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
    cluster: Cluster, pids: dict[str, Any], base: Path, of: dict[str, float], window_s: float
) -> tuple[list[Case], float, int]:
    environ = {"OMP_NUM_THREADS": "1", "STEPS": f"{base}/steps."}
    environ |= {name: str(value) for name, value in of.items()}
    jobs = [
        cluster.submit(SCRIPT, batch_size=32, stop={"epochs": 10_000}, env=environ)
        for _ in range(WORKERS)
    ]
    for job in jobs:
        cluster.until_epoch(job, 2)
    files = [base / f"steps.{job}" for job in jobs]

    def again(pid: int) -> float:
        kill(pid)
        began = time.time()
        cluster.up()
        return time.time() - began

    cases = [
        window("undisturbed", files, window_s, lambda: 0.0),
        window("controller killed", files, window_s, lambda: again(pids["controller"])),
        window("agent killed", files, window_s, lambda: again(pids["agents"][0])),
    ]
    before: dict[str, Any] = {job: cluster.show(job) for job in jobs}
    lost = sum(
        [epoch["epoch"] for epoch in shown["epochs"]] != list(range(1, len(shown["epochs"]) + 1))
        or len(shown["versions"]) != 1
        for shown in before.values()
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
