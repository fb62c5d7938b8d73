"""SIGKILL of every kind of process at every stage of a change of size: the effect on the job.

In each case a job trains on two or three slots, a change is ordered, and the victim ends where the case says.
Shown: the longest time between two ends of a step of any worker, the recovery, and whether every sample of
every epoch was trained on exactly once.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.bench import report
from tests.support.cluster import Cluster, kill

SAMPLES: Final = 480
SCRIPT: Final = """
import os, time, torch
from torch import nn
from torch.utils.data import TensorDataset
from elastic import ScalingAgent

agent = ScalingAgent.from_env()
inputs = torch.randn(480, 16)
data = TensorDataset(inputs, inputs.mean(dim=1, keepdim=True))
model, optimizer, loader = agent.load(
    lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)),
    lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), data, batch_size=24)
out = open(os.environ["STEPS"] + os.path.basename(os.environ["ONES_WORKER"]), "w", buffering=1)
for epoch in agent.epochs(100000):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        time.sleep(0.02)
        out.write(f"{time.time()}\\n")
    agent.report(size=agent.world_size)
"""


@dataclass(frozen=True)
class Case:
    """Victim and its fault, while a job of `start` slots is resized to `to` (None: is not resized)."""

    stage: str
    victim: str
    faults: str
    start: int = 2
    to: int | None = 3
    process: str = ""  # "agent", "controller" or "zygote": killed from outside instead


CASES: Final = (
    Case("newcomer builds its model", "newcomer", "load:rank=2:version=2=kill"),
    Case("newcomer is about to be ready", "newcomer", "ready:rank=2:version=2=kill"),
    Case("newcomer never becomes ready", "newcomer", "ready:rank=2:version=2=stop"),
    Case("group is built", "newcomer", "build:rank=2:version=2=kill"),
    Case("group is built", "rank 0", "build:rank=0:version=2=kill"),
    Case("group is built", "rank 1", "build:rank=1:version=2=kill"),
    Case("group is there", "newcomer", "built:rank=2:version=2=kill"),
    Case("boundary is agreed on", "rank 0", "announce:rank=0:version=2=kill"),
    Case("boundary is agreed on", "rank 1", "announce:rank=1:version=2=kill"),
    Case("boundary", "rank 0", "boundary:rank=0:version=2=kill"),
    Case("boundary", "rank 1", "boundary:rank=1:version=2=kill"),
    Case("swapped", "rank 0", "swapped:rank=0:version=2=kill"),
    Case("swapped", "rank 1", "swapped:rank=1:version=2=kill"),
    Case("state is sent", "rank 0", "handover.send:rank=0:version=2=kill"),
    Case("state is sent", "rank 1", "handover.send:rank=1:version=2=kill"),
    Case("state is received", "newcomer", "handover.receive:rank=2:version=2=kill"),
    Case("state was received", "newcomer", "handed_over:rank=2:version=2=kill"),
    Case("leaver at the boundary", "rank 2", "boundary:rank=2:version=2=kill", 3, 2),
    Case("stayer at the boundary", "rank 0", "boundary:rank=0:version=2=kill", 3, 2),
    Case("stayer has swapped", "rank 1", "swapped:rank=1:version=2=kill", 3, 2),
    Case("mid all-reduce", "rank 0", "reduce:rank=0:step=30:version=1=kill", 3, None),
    Case("mid all-reduce", "rank 2", "reduce:rank=2:step=30:version=1=kill", 3, None),
    Case(
        "mid all-reduce, one-step skew", "rank 1",
        "reduced:rank=1:step=30:version=1=kill; reduced:rank=0:step=30:version=1=fail", 3, None,
    ),
    Case("at the epoch's report", "rank 0", "report:rank=0:version=1=kill", 3, None),
    Case(
        "survivor at rest",
        "ranks 2, 1",
        "reduce:rank=2:step=30:version=1=kill; quiesce:rank=1:version=2=kill",
        3,
        None,
    ),
    Case(
        "survivors build a group",
        "ranks 2, 1",
        "reduce:rank=2:step=30:version=1=kill; recover:rank=1:version=2=kill",
        3,
        None,
    ),
    Case(
        "survivors have a group",
        "ranks 2, 1",
        "reduce:rank=2:step=30:version=1=kill; recovered:rank=1:version=2=kill",
        3,
        None,
    ),
    Case("newcomers are prepared", "agent", "ready:rank=2:version=2=stall 1.5", process="agent"),
    Case(
        "newcomers are prepared",
        "controller",
        "ready:rank=2:version=2=stall 1.5",
        process="controller",
    ),
    Case("newcomers are prepared", "zygote", "ready:rank=2:version=2=stall 1.5", process="zygote"),
    Case("group is built", "agent", "built:rank=1:version=2=stall 1.5", process="agent"),
    Case("group is built", "controller", "built:rank=1:version=2=stall 1.5", process="controller"),
    Case("pause's checkpoint (3 s)", "rank 0", "suspend:rank=0:version=2=kill", 2, 0),
    Case("pause is written (3 s)", "rank 0", "suspended:rank=0:version=2=kill", 2, 0),
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    gap_ms: float
    usual_ms: float
    story: str
    restarts: int
    exact: bool


def run(cluster: Cluster, pids: Callable[[], dict[str, Any]], folder: Path, case: Case) -> Result:
    folder.mkdir()
    job = cluster.submit(
        SCRIPT,
        batch_size=24,
        max_local_batch=24,
        slots=[1, 4],
        slots_wanted=case.start,
        record_samples=True,
        stop={"epochs": 100_000},
        env={"OMP_NUM_THREADS": "1", "STEPS": f"{folder}/", "ELASTIC_FAULTS": case.faults},
    )
    cluster.until(job, lambda shown: shown["state"] == "running")
    began = time.time()
    time.sleep(0.5)
    if case.to is not None:
        cluster.ones("resize", job, "--slots", str(case.to))
    if case.process:
        time.sleep(0.6)
        kill(victim(cluster, pids(), case.process))
        cluster.up()
    goal = case.to or case.start
    time.sleep(3.0)
    if case.to == 0:
        cluster.until(job, lambda shown: shown["state"] == "paused")
        cluster.ones("resize", job, "--slots", "2")
        goal = 2
    cluster.until(job, lambda s: s["state"] in {"running", "rescaling"} and s["slots"] <= goal)
    epoch = cluster.show(job)["epoch"]
    shown = cluster.until(job, lambda s: s["epoch"] > epoch + 1)
    cluster.ones("cancel", job)
    ends = sorted(
        float(line)
        for path in folder.iterdir()
        for line in path.read_text().split("\n")[:-1]
        if float(line) > began
    )
    gaps = [b - a for a, b in itertools.pairwise(ends)]
    epochs = cluster.samples(job)
    whole = [ids for number, ids in sorted(epochs.items()) if number <= shown["epoch"]]
    versions = shown["versions"]
    return Result(
        gap_ms=max(gaps) * 1e3,
        usual_ms=statistics.median(g for g in gaps if g > 0.01) * 1e3,
        story=", ".join(f"{v['kind']} {v['outcome'] or '...'}" for v in versions[1:5]),
        restarts=sum(v["kind"] == "start" for v in versions) - 1,
        exact=all(ids == list(range(SAMPLES)) for ids in whole) and bool(whole),
    )


def victim(cluster: Cluster, pids: dict[str, Any], process: str) -> int:
    if process == "agent":
        return int(pids["agents"][0])
    if process == "controller":
        return int(pids["controller"])
    sockets = f"--socket\0{cluster.home}/"
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_text()
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if sockets in command and not _is_zygote(parent, sockets):
                return int(entry.name)
    raise AssertionError("no zygote")


def _is_zygote(pid: int, sockets: str) -> bool:
    try:
        return sockets in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def main() -> None:
    chosen = report.arguments(__doc__, "every fourth case")
    cases = CASES[::4] if chosen.quick else CASES
    rows: list[tuple[object, ...]] = []
    figures: dict[str, float] = {}
    with report.folder() as base:
        cluster = Cluster(base / "home", base / "jobs")
        with report.running(cluster):
            for number, case in enumerate(report.counted("case", cases, len(cases))):
                found = run(cluster, cluster.up, base / f"steps-{number}", case)
                exact = "yes" if found.exact else "NO"
                rows.append(
                    (case.stage, case.victim, found.gap_ms, found.usual_ms, found.story,
                     found.restarts, exact)
                )  # fmt: skip
    report.table(
        "kill -9 by stage and victim; steps of 20 ms on a device of their own",
        ["stage", "victim", "longest ms", "usual ms", "versions", "restarts", "exact"],
        rows,
    )
    figures["cases"] = len(rows)
    figures["inexact"] = sum(row[-1] != "yes" for row in rows)
    figures["longest_ms_median"] = statistics.median(float(str(row[2])) for row in rows)
    report.finish(figures, chosen.json)


if __name__ == "__main__":
    main()
