"""Jobs that disturb each other on a real cluster: what a policy learns and does.

Two agents on this host, each with two CPU slots and bound with its workers to one core. One kind of training
multiplies matrices all the time, the other waits for each batch as for a slow disk. Two of the first kind halve
each other's speed; the second kind hardly disturbs any job. They arrive so that a policy without knowledge puts
equal kinds together; then it learns from reports and moves jobs. The slow-downs printed beside the learnt ones
are measured separately: each kind alone on a core, and beside each kind. Finally a new policy reads the journal,
as after a restart of the controller.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from controlplane.client import BlockingClient
from controlplane.core.policy_events import KEPT_JOBS, history
from controlplane.journal.reader import Reader
from controlplane.policy.harmony.policy import Harmony
from controlplane.policy.options import HarmonyOptions
from schemas.ids import node_of
from tests.bench import report
from tests.bench.live_cluster import cluster, inexact_epochs
from tests.support.cluster import Cluster

KINDS: Final = ("grinder", "waiter")
SAMPLES: Final = 600
ALONE: Final = 8  # epochs of a job until the next one comes
LOOK_S: Final = 0.5
EPOCHS: Final = 5  # that a speed is the median of
LIMIT_S: Final = 240.0  # until all are apart that hurt each other
OPTIONS: Final = {  # what takes minutes in a cluster shall take seconds here
    "harmony": "{ settle_s = 15.0, rescale_stall_s = 1.0, margin = 0.15 }",
    "ones": '{ report_interval_s = 15.0, search = "evolution" }',  # greedy moves nobody for this
}
SCRIPT: Final = """
import fcntl, os, sys, time
import torch
from torch import nn
from torch.utils.data import Dataset
from elastic import ScalingAgent

KIND, DISK = sys.argv[1:]
WIDTH = 640 if KIND == "grinder" else 8
DISK += f"-{min(os.sched_getaffinity(0))}"  # of the node


class Slow(Dataset):
    def __len__(self):
        return 600

    def __getitem__(self, index):
        return torch.full((WIDTH,), index / 600.0), torch.tensor([index / 600.0])

    def __getitems__(self, indices):
        if KIND == "waiter":  # for a disk far away
            time.sleep(0.025)
        if KIND == "reader":  # from the node's disk, which serves one at a time
            with open(DISK, "w") as disk:
                fcntl.flock(disk, fcntl.LOCK_EX)
                time.sleep(0.025)
        return [self[index] for index in indices]


agent = ScalingAgent.from_env()
model, optimizer, loader = agent.load(
    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
                          nn.Linear(WIDTH, 1)),
    lambda parameters: torch.optim.SGD(parameters, lr=0.01), Slow(), batch_size=20, lr=0.01)
for epoch in agent.epochs(100_000):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    agent.report()
"""
Places = Mapping[str, str]  # node of each job


@contextlib.contextmanager
def two_cores(
    base: Path, policy: str, *, agents: int = 2, options: str = ""
) -> Iterator[tuple[Cluster, BlockingClient]]:
    with cluster(base / "home", policy, slots=2, agents=agents, options=options) as (made, client):
        cores = sorted(os.sched_getaffinity(0))
        for core, pid in enumerate(made.up()["agents"]):
            bind(pid, cores[core % len(cores)])
        yield made, client


def bind(pid: int, core: int) -> None:
    agent = psutil.Process(pid)
    for process in (agent, *agent.children(recursive=True)):
        for thread in process.threads():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread.id, {core})


def submit(made: Cluster, kind: str) -> str:
    return made.submit(
        SCRIPT, name=kind, args=[kind, str(made.base / "disk")], batch_size=20, max_batch_size="keep", slots=[1, 1],
        record_samples=True, stop={"epochs": 100_000},
    )  # fmt: skip


def speed(client: BlockingClient, job: str, epochs: int) -> float:
    """Return the median samples per second of epochs that start from now on."""
    begun = client.job(job).summary.epoch + 1  # the epoch of now has begun before
    reached(client, job, begun + epochs)
    epochs_seen = client.job(job).epochs
    return statistics.median(e.samples_per_s for e in epochs_seen if e.epoch > begun)


def reached(client: BlockingClient, job: str, epoch: int) -> None:
    """Wait until a job has finished an epoch."""
    report.until(
        lambda: client.job(job).summary.epoch >= epoch, LIMIT_S, LOOK_S, lambda: client.job(job)
    )


def measured(base: Path, epochs: int) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    with two_cores(base, "fifo", agents=1) as (made, client):
        for kind in KINDS:
            mine = submit(made, kind)
            report.now(f"{kind} alone")
            alone = speed(client, mine, epochs)
            for other in KINDS:
                neighbour = submit(made, other)
                report.now(f"{kind} beside {other}")
                speed(client, neighbour, 1)  # it trains by now
                found[kind, other] = 1.0 - speed(client, mine, epochs) / alone
                client.cancel(neighbour)
                gone(client, neighbour)
            client.cancel(mine)
            gone(client, mine)
    return found


def gone(client: BlockingClient, job: str) -> None:
    report.until(
        lambda: not client.job(job).workers, LIMIT_S, LOOK_S, lambda: client.job(job).summary
    )


def places(client: BlockingClient, jobs: Sequence[str]) -> Places:
    found = {job: {worker.node for worker in client.job(job).workers} for job in jobs}
    return {job: str(min(nodes)) for job, nodes in found.items() if len(nodes) == 1}


def is_apart(where: Places) -> bool:
    nodes = [node for job, node in where.items() if not job.startswith("waiter")]
    return len(nodes) == 2 == len(set(nodes)) and len(where) == 4


def arrive(
    made: Cluster, client: BlockingClient, kinds: Sequence[str] = KINDS, alone: int = ALONE
) -> list[str]:
    jobs: list[str] = []
    for kind in (*kinds, *kinds):
        jobs.append(submit(made, kind))
        reached(client, jobs[-1], alone)
    return jobs


def moved(client: BlockingClient, jobs: Sequence[str], limit_s: float = LIMIT_S) -> Places:
    until = time.monotonic() + limit_s
    while not is_apart(where := places(client, jobs)) and time.monotonic() < until:
        time.sleep(LOOK_S)
    return where


def inexact(client: BlockingClient, jobs: Sequence[str]) -> int:
    return sum(inexact_epochs(client, job, SAMPLES) for job in jobs)


def learnt(home: Path) -> dict[tuple[str, str], float]:
    policy = Harmony(HarmonyOptions())
    with contextlib.closing(Reader(home / "state" / "journal.sqlite")) as journal:
        jobs = journal.ended.latest(KEPT_JOBS)
        for at, event in history(jobs, journal.records):
            policy.observe(event, at)
    named = {job.spec.name: job.family for job in jobs}
    return {
        (kind, other): 1.0 - math.exp(-policy.costs.cost(named[kind], named[other]))
        for kind in KINDS
        for other in KINDS
    }


def main() -> None:
    chosen = report.arguments(__doc__, "shorter speeds, only harmony, 40 s to move in")
    epochs, alone, limit_s = (2, 4, 40.0) if chosen.quick else (EPOCHS, ALONE, LIMIT_S)
    figures: dict[str, float] = {}
    with report.folder() as base:
        real = measured(base / "alone", epochs)
        for policy in ("harmony",) if chosen.quick else ("harmony", "ones"):
            with two_cores(base / policy, policy, options=OPTIONS[policy]) as (made, client):
                report.now(f"{policy}: jobs arrive")
                jobs = arrive(made, client, alone=alone)
                report.now(f"{policy}: moves them apart")
                began = time.monotonic()
                after = moved(client, jobs, limit_s)
                took_s = time.monotonic() - began
                tell(client, policy, jobs)
                figures[f"{policy}_began_together"] = float(began_together(client, jobs))
                wrong = inexact(client, jobs)
                for job in jobs:
                    client.cancel(job)
            figures |= {f"{policy}_apart_s": took_s, f"{policy}_apart": float(is_apart(after))}
            figures[f"{policy}_samples_wrong"] = float(wrong)
            if policy == "harmony":
                known = learnt(made.home)
                rows = [
                    [" beside ".join(pair), f"{real[pair]:.0%}", f"{known[pair]:.0%}"]
                    for pair in real
                ]
                report.table("share of speed lost", ["", "measured apart", "learnt"], rows)
                for kind, other in real:
                    figures[f"lost_{kind}_{other}"] = real[kind, other]
                    figures[f"learnt_{kind}_{other}"] = known[kind, other]
    report.finish(figures, chosen.json, "interference")


def tell(client: BlockingClient, policy: str, jobs: Sequence[str]) -> None:
    found = [(each.time, job, each) for job in jobs for each in client.explain(job).decisions]
    found.sort(key=lambda entry: entry[0])
    rows = [
        [f"{at - found[0][0]:.0f}", job, " ".join(sorted(each.to.slots)) or "-", each.reason]
        for at, job, each in found
    ]
    report.table(policy, ["s", "job", "slots", "why"], rows)


def began_together(client: BlockingClient, jobs: Sequence[str]) -> bool:
    first = [client.explain(job).decisions[0].to.slots for job in jobs if job.startswith(KINDS[0])]
    return len({node_of(slot) for slots in first for slot in slots}) == 1


if __name__ == "__main__":
    main()
