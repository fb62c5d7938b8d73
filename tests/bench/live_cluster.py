"""Runs of one policy on a real cluster, and the outcome of each job."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from controlplane.client import BlockingClient
from controlplane.client.allocations import Allocation, allocations_from
from schemas.ids import JobId
from schemas.jobs import ENDED, JobSpec
from schemas.wire.client import JobDetail, JobSummary
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

    def mean(self, measure: str) -> float:
        """Return the mean of a field of the jobs."""
        return statistics.fmean(getattr(job, measure) for job in self.jobs)


def failed(jobs: Iterable[Ended]) -> int:
    return sum(job.state != "succeeded" for job in jobs)


def inexact(jobs: Iterable[Ended]) -> int:
    return sum(not job.exact for job in jobs)


MEASURES: Final[Mapping[str, Callable[[Run], object]]] = {  # of a run, by their column
    "avg JCT s": lambda run: f"{run.average_s:.1f}",
    "p90": lambda run: f"{run.p90_s:.1f}",
    "queue": lambda run: f"{run.mean('queued_s'):.1f}",
    "ran": lambda run: f"{run.mean('ran_s'):.1f}",
    "makespan": lambda run: f"{run.makespan_s:.1f}",
    "all slots taken": lambda run: f"{run.full:.0%}",
    "re-scales/job": lambda run: f"{run.mean('rescales'):.1f}",
    "batch changes/job": lambda run: f"{run.mean('batch_changes'):.1f}",
    "not exact": lambda run: inexact(run.jobs),
    "failed": lambda run: failed(run.jobs),
    "load": lambda run: f"{run.load:.1f}",
}


def job_figures(policy: str, jobs: Sequence[Ended]) -> dict[str, float]:
    """Return the figures of a policy's jobs that every study has."""
    return {
        f"rescales_per_job_{policy}": statistics.fmean(job.rescales for job in jobs),
        f"not_exact_{policy}": inexact(jobs),
        f"failed_{policy}": failed(jobs),
    }


@contextlib.contextmanager
def cluster(
    home: Path, policy: str, *, slots: int = SLOTS, agents: int = 1, options: str = ""
) -> Iterator[tuple[Cluster, BlockingClient]]:
    made = Cluster(home, home, slots=slots, agents=agents, policy=policy.removesuffix(FIXED))
    more = f"options = {options}\n" if options else ""  # [policy] is the last section
    with report.running(made, more), BlockingClient(home, timeout=60.0) as client:
        yield made, client


class Coming(Protocol):
    @property
    def at(self) -> float: ...  # seconds after the first


C = TypeVar("C", bound=Coming)


def submitted(
    made: Cluster,
    client: BlockingClient,
    coming: Sequence[C],
    spec: Callable[[C], JobSpec],
    *,
    look: Callable[[Sequence[JobSummary], float], None] = lambda *_: None,
    limit_s: float = LIMIT_S,
) -> list[JobId]:
    """Submit jobs at their times, and look at those that are there until all have ended."""
    names: list[JobId] = []
    began = time.monotonic()
    while True:
        now = time.monotonic() - began
        while len(names) < len(coming) and coming[len(names)].at <= now:
            names.append(client.submit(spec(coming[len(names)])))
        left = client.jobs()
        report.now(f"{made.policy}: {len(names)} of {len(coming)} jobs came, {len(left)} are left")
        if len(names) == len(coming) and not left:
            return names
        said = [f"{job.job} {job.state}: {job.reason}" for job in left]
        assert now < limit_s, "\n".join([*said, made.said()])
        look(left, now)
        time.sleep(LOOK_S)


def run(policy: str, coming: Sequence[Arrival], base: Path, home: Path, options: str = "") -> Run:
    def spec(arrival: Arrival) -> JobSpec:
        return spec_of(
            arrival.job, base / "scripts", wanted=arrival.wanted, fixed=policy.endswith(FIXED),
            utility=arrival.utility,
        )  # fmt: skip

    loads: list[float] = []
    with cluster(home, policy, options=options) as (made, client):
        names = submitted(
            made, client, coming, spec, look=lambda *_: loads.append(os.getloadavg()[0])
        )  # fmt: skip
        details = [client.job(name) for name in names]
        events = list(client.events())
        jobs = [story(client, a.job, d) for a, d in zip(coming, details, strict=True)]
    first = min(detail.summary.submitted_at for detail in details)
    last = max(detail.history[-1].time for detail in details)
    full = taken(allocations_from(events, until=last), first, last)
    shutil.rmtree(home / "state" / "work", ignore_errors=True)
    return Run(policy, jobs, last - first, full, statistics.fmean(loads))


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
