"""Runs of one policy on a real cluster, and the outcome of each job."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from controlplane.cli.allocations import Allocation, allocations_from
from controlplane.client import BlockingClient
from schemas.ids import JobId
from schemas.jobs import ENDED
from schemas.wire.client import JobDetail
from tests.bench import report
from tests.bench.live_jobs import SLOTS, Arrival, Job, spec_of
from tests.support.cluster import Cluster

LIMIT_S: Final = 1200.0  # of one run; a job that never ends shall not hold up the bench for ever
LOOK_S: Final = 0.5  # between looks at the jobs
FIXED: Final = "-fixed"  # of a policy's name: nobody's size or batch may change, only the order
JOURNAL: Final = Path("state") / "journal.sqlite"


@dataclass(frozen=True)
class Ended:
    job: Job
    state: str
    jct_s: float  # submission to end
    queued_s: float  # without slots
    ran_s: float  # with slots, or starting on them
    rescales: int
    batch_changes: int
    metric: float | None  # the last one that the script reported
    exact: bool  # every sample of every epoch was taken exactly once
    losses: tuple[tuple[float, float], ...]  # of each epoch, seconds after the job's submission
    promised_s: float | None  # by when it was promised to be done, after its submission
    said: str  # the reason of its end


@dataclass(frozen=True)
class Run:
    policy: str
    jobs: list[Ended]  # in order of arrival
    makespan_s: float  # first submission to last end
    full: float  # share of that time in which every slot was taken
    load: float  # of the host meanwhile, mean, processes that want a core

    @property
    def jct_s(self) -> list[float]:
        return [job.jct_s for job in self.jobs]

    @property
    def average_s(self) -> float:
        return statistics.fmean(self.jct_s)

    @property
    def p90_s(self) -> float:
        return statistics.quantiles(self.jct_s, n=10, method="inclusive")[-1]


@contextlib.contextmanager
def cluster(
    home: Path, policy: str, *, slots: int = SLOTS, agents: int = 1, options: str = ""
) -> Iterator[tuple[Cluster, BlockingClient]]:
    made = Cluster(home, home, slots=slots, agents=agents, policy=policy.removesuffix(FIXED))
    try:
        made.up()
        if options:
            made.down()
            with (home / "controller.toml").open("a", encoding="utf-8") as file:
                file.write(f"options = {options}\n")  # [policy] is the last section
            made.up()
        with BlockingClient(home, timeout=60.0) as client:
            yield made, client
    finally:
        if (made.home / "controller.toml").exists():
            made.down()


def run(policy: str, coming: Sequence[Arrival], base: Path, home: Path, options: str = "") -> Run:
    fixed = policy.endswith(FIXED)
    with cluster(home, policy, options=options) as (made, client):
        names: dict[str, Arrival] = {}
        loads: list[float] = []
        began = time.monotonic()
        while len(names) < len(coming) or not over(client, made, began):
            seconds = time.monotonic() - began
            for arrival in itertools.islice(coming, len(names), None):
                if arrival.at > seconds:
                    break
                spec = spec_of(
                    arrival.job, base / "scripts", wanted=arrival.wanted, fixed=fixed,
                    utility=arrival.utility,
                )  # fmt: skip
                names[client.submit(spec)] = arrival
                report.now(f"{policy}: {len(names)} of {len(coming)} jobs are submitted")
            loads.append(os.getloadavg()[0])
            time.sleep(LOOK_S)
        ended = {name: client.job(name) for name in names}
        events = list(client.events())
        jobs = [story(client, arrival.job, ended[name]) for name, arrival in names.items()]
    first = min(detail.summary.submitted_at for detail in ended.values())
    last = max(detail.history[-1].time for detail in ended.values())
    full = taken(allocations_from(events, until=last), first, last)
    shutil.rmtree(home / "state" / "work", ignore_errors=True)
    return Run(policy, jobs, last - first, full, statistics.fmean(loads))


def over(client: BlockingClient, made: Cluster, began: float) -> bool:
    left = client.jobs()
    report.now(f"{made.policy}: {len(left)} jobs are left")
    if not left:
        return True
    said = [f"{job.job} {job.state}: {job.reason}" for job in left]
    assert time.monotonic() - began < LIMIT_S, "\n".join([*said, made.said()])
    return False


def story(client: BlockingClient, job: Job, detail: JobDetail) -> Ended:
    summary = detail.summary
    assert summary.state in ENDED, summary
    return Ended(
        job=job,
        state=summary.state,
        jct_s=detail.history[-1].time - summary.submitted_at,
        queued_s=summary.queued_s,
        ran_s=summary.running_s,
        rescales=summary.rescales,
        batch_changes=summary.batch_changes,
        metric=summary.metrics.get(job.example.metric),
        exact=summary.state == "rejected" or _exact(client.samples(summary.job), job),
        losses=tuple(
            (epoch.time - summary.submitted_at, epoch.train_loss)
            for epoch in detail.epochs
            if epoch.train_loss is not None
        ),
        promised_s=(
            None if summary.promised_end is None else summary.promised_end - summary.submitted_at
        ),
        said=summary.reason,
    )


def _exact(records: Iterator[dict[str, Any]], job: Job) -> bool:
    by_epoch = samples_by_epoch(records)
    whole = list(range(job.example.samples))
    return len(by_epoch) == job.epochs and all(sorted(ids) == whole for ids in by_epoch.values())


def samples_by_epoch(records: Iterator[dict[str, Any]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for record in records:
        found[record["epoch"]].extend(record["ids"])
    return found


def inexact_epochs(client: BlockingClient, job: JobId, samples: int) -> int:
    """Return the finished epochs in which not every sample was taken exactly once."""
    finished = client.job(job).summary.epoch
    by_epoch, whole = samples_by_epoch(client.samples(job)), list(range(samples))
    return sum(sorted(by_epoch[epoch]) != whole for epoch in sorted(by_epoch)[:finished])


def taken(allocations: Sequence[Allocation], begin: float, end: float) -> float:
    edges = sorted({begin, end, *(s.begin for s in allocations), *(s.end for s in allocations)})
    full_s = 0.0
    for low, high in itertools.pairwise(edge for edge in edges if begin <= edge <= end):
        middle = (low + high) / 2
        if sum(allocation.begin <= middle < allocation.end for allocation in allocations) >= SLOTS:
            full_s += high - low
    return full_s / max(end - begin, 1e-9)
