"""Observation of a cluster for many minutes: no job should stay at a size known to be slow.

Jobs come to four slots at random times. A job is *held* while it is at a size and has measured a better one: with
fewer slots, or with more while so many are idle. Each time that lasts for more than `PATIENCE_S` is a violation.
Predicted speed-ups and starts are compared with the actual ones.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from controlplane.client import BlockingClient
from controlplane.prediction.throughput import statistical_efficiency
from schemas.ids import JobId
from schemas.wire.client import Decision, Explanation, JobDetail, JobSummary
from tests.bench import report
from tests.bench.live_cluster import cluster, submitted
from tests.bench.live_jobs import SLOTS
from tests.bench.live_sleepers import load, sleepers, spec_of

WAITING: Final = "queued"
HEADS: Final = ["", "how many", "off by, median", "at worst", "came / promised"]


@dataclass(frozen=True)
class Promise:
    kind: str  # of job
    promised: float
    came: float
    first: bool  # growth of its kind

    @property
    def off_by(self) -> float:
        return math.exp(abs(math.log(self.came / self.promised)))


def promises(told: Sequence[tuple[str, Explanation]]) -> list[Promise]:
    decisions = sorted(
        ((one.time, kind, one) for kind, each in told for one in each.decisions),
        key=lambda found: found[0],
    )
    found: list[Promise] = []
    grown: set[str] = set()
    for _, kind, one in decisions:
        numbers = one.numbers
        before, then = numbers.get("speed_now"), numbers.get("speed_then")
        came = numbers.get("speed_realised")
        grows = bool(one.before.slots) and len(one.to.slots) > len(one.before.slots)
        if before and then and came:
            first = grows and kind not in grown
            found.append(Promise(kind, then / before, came / before, first))
            grown |= {kind} if grows else set()
    return found


@dataclass(frozen=True)
class Start:
    """First forecast of a job's first start; seconds since the epoch."""

    told_at: float
    at: float
    earliest: float
    latest: float


def start_told(told: Explanation) -> Start | None:
    """Return the present forecast of a waiting job; None: there is none."""
    last: Decision | None = told.decisions[-1] if told.decisions else None
    if last is None or last.outcome != "waits" or "start_s" not in last.numbers:
        return None
    after = (last.numbers[name] for name in ("start_s", "start_earliest_s", "start_latest_s"))
    return Start(last.time, *(last.time + seconds for seconds in after))


def began(detail: JobDetail) -> float | None:
    """Return when a job left the queue for the first time; None: never."""
    left = (change.time for change in detail.history if change.from_state == WAITING)
    return next(left, None)


def promise_figures(found: Sequence[Promise]) -> dict[str, float]:
    """Print how right promised speed-ups were.

    Returns:
        `promises`; `promise_off_median` and `promise_off_most`: the larger over the smaller one of
        what was promised and what came; `promise_bias`: what came over it, geometric mean.
    """
    rows = []
    for name, some in (
        ("all changes", found),
        *((f"first growth, {one.kind} ({one.promised:.2f}, came {one.came:.2f})", [one])
          for one in found if one.first),
    ):  # fmt: skip
        if some:
            off = [one.off_by for one in some]
            rows.append([name, len(some), statistics.median(off), max(off), _bias(some)])
    report.table("promised speed-ups, held against the first whole epoch", HEADS, rows)
    if not found:
        return {"promises": 0.0}
    off = [one.off_by for one in found]
    return {
        "promises": float(len(found)),
        "promise_off_median": statistics.median(off),
        "promise_off_most": max(off),
        "promise_bias": _bias(found),
    }


def _bias(some: Sequence[Promise]) -> float:
    return statistics.geometric_mean(one.came / one.promised for one in some)


def start_figures(
    told: Mapping[JobId, Start], starts: Mapping[JobId, float | None]
) -> dict[str, float]:
    """Print how right the first forecasts of starts were, as `ones sim` counts them.

    Returns:
        `start_forecasts`: of jobs that waited on after they were told, and started.
        `start_wait_s_mean`: how long these waited from then on.
        `start_error_median`: of |expected - real| / real, of the waits from the forecast on.
        `start_error_s_median`, `start_error_s_most`: the same in seconds. `start_coverage`: share
        of starts within the interval that was told, which is meant for 80%.
    """
    came = [(said, starts[job]) for job, said in told.items()]
    held = [(said, at) for said, at in came if at is not None and at > said.told_at]
    if not held:
        return {"start_forecasts": 0.0}
    seconds = [abs(said.at - at) for said, at in held]
    figures = {
        "start_forecasts": float(len(held)),
        "start_wait_s_mean": statistics.fmean(at - said.told_at for said, at in held),
        "start_error_median": statistics.median(
            abs(said.at - at) / (at - said.told_at) for said, at in held
        ),
        "start_error_s_median": statistics.median(seconds),
        "start_error_s_most": max(seconds),
        "start_coverage": statistics.fmean(said.earliest <= at <= said.latest for said, at in held),
    }
    report.table("first forecasts of starts", ["", ""], list(figures.items()))
    return figures


PATIENCE_S: Final = 10.0
SETTLES_S: Final = 3.0  # after a change, before its speed is looked at
ENOUGH: Final = 4  # looks that a speed is the median of
CLEARLY: Final = 0.9  # of the better size's progress; nearer is noise
GAP_S: Final = 9.0  # mean between submissions: two to three of four slots' work, so that jobs grow
DRAIN_S: Final = 180.0  # for the last jobs to end
ALIVE: Final = frozenset({"running", "rescaling"})
Shape = tuple[int, int]  # slots, and samples of a step


@dataclass(frozen=True)
class Look:
    at: float  # seconds
    job: str
    slots: int
    batch: int  # global, samples per step
    samples_per_s: float
    noise_scale: float | None = None  # of its last epoch, samples

    @property
    def shape(self) -> Shape:
        return self.slots, self.batch


@dataclass
class Violation:
    job: str
    began: float  # seconds
    ended: float
    shape: Shape
    progress: float  # samples per second, each worth one at the first batch
    better: Shape
    better_progress: float

    @property
    def reason(self) -> str:
        if self.better[0] > self.shape[0]:
            return "slots were idle"
        return "the same or fewer slots"


@dataclass
class _Watched:
    first_batch: int
    shape: Shape
    since: float
    room_since: float
    idle: int = 0
    speeds: dict[Shape, list[float]] = field(default_factory=dict)  # settled looks
    here: list[float] = field(default_factory=list)  # of the present stay
    held: Violation | None = None


class SizeWatch:
    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.most_s = 0.0  # that anybody was held, shorter ones too
        self._jobs: dict[str, _Watched] = {}

    def take(self, looks: Sequence[Look], idle: int) -> list[Violation]:
        found = [one for look in looks if (one := self._take(look, idle)) is not None]
        for name in self._jobs.keys() - {look.job for look in looks}:
            self._jobs[name].held = None
        return found

    def _take(self, look: Look, idle: int) -> Violation | None:
        known = self._jobs.get(look.job)
        if known is None:
            known = _Watched(look.batch, look.shape, look.at, look.at)
            self._jobs[look.job] = known
        if known.shape != look.shape:
            known.shape, known.since, known.here, known.held = look.shape, look.at, [], None
        if known.idle != idle:
            known.idle, known.room_since = idle, look.at
        if look.at - known.since >= SETTLES_S and look.samples_per_s > 0.0:
            known.here.append(look.samples_per_s)
            known.speeds.setdefault(look.shape, []).append(look.samples_per_s)
        return self._judged(known, look)

    def _judged(self, known: _Watched, look: Look) -> Violation | None:
        if len(known.here) < ENOUGH:
            return None
        now = self._progress(known, look.shape, known.here[-ENOUGH:], look)
        best: tuple[float, Shape] | None = None
        for shape, speeds in known.speeds.items():
            possible = shape[0] <= look.slots + known.idle
            comparable = look.noise_scale is not None or shape[1] <= look.batch
            if shape != look.shape and possible and comparable and len(speeds) >= ENOUGH:
                then = self._progress(known, shape, speeds, look)
                if now < CLEARLY * then and (best is None or best[0] < then):
                    best = (then, shape)
        if best is None:
            known.held = None
            return None
        since = known.since if best[1][0] <= look.slots else max(known.since, known.room_since)
        self.most_s = max(self.most_s, look.at - since)
        if look.at - since <= PATIENCE_S:
            return None
        if known.held is not None:
            known.held.ended = look.at
            return None
        known.held = Violation(look.job, since, look.at, look.shape, now, best[1], best[0])
        self.violations.append(known.held)
        return known.held

    @staticmethod
    def _progress(known: _Watched, shape: Shape, speeds: Sequence[float], look: Look) -> float:
        speed = statistics.median(speeds)
        if look.noise_scale is None:
            return speed
        batch = np.array([float(shape[1])])
        return speed * float(statistical_efficiency(batch, known.first_batch, look.noise_scale)[0])


def watch(policy: str, minutes: float, base: Path, home: Path, seed: int = 1) -> dict[str, float]:
    coming = sleepers(seed, GAP_S, until_s=60.0 * minutes)
    report.say(
        f"{policy}: {len(coming)} jobs in {minutes:g} minutes, {load(coming):.1f} slots' work"
    )
    looks = _Looks()
    limit_s = 60.0 * minutes + DRAIN_S
    with cluster(home, policy) as (made, client):
        names = submitted(
            made, client, coming, lambda job: spec_of(job, base / "sleepers"),
            look=lambda jobs, now: looks.look(client, jobs, now), limit_s=limit_s,
        )  # fmt: skip
        details = {name: client.job(name) for name in names}
        told = [client.explain(name) for name in names]
    held = looks.seen.violations
    rows: list[list[object]] = [
        [one.job, one.shape, f"{one.progress:.0f}", one.better, f"{one.better_progress:.0f}",
         f"{one.ended - one.began:.1f}", one.reason] for one in held
    ]  # fmt: skip
    heads = ["", "slots, batch", "progress/s", "known", "progress/s", "held, s", ""]
    report.table(f"{policy}: held for more than {PATIENCE_S:g} s", heads, rows)
    kinds = [job.kind.name for job in coming]
    found = promise_figures(promises(list(zip(kinds, told, strict=True))))
    starts = {name: began(detail) for name, detail in details.items()}
    found |= start_figures(looks.starts, starts)
    jobs = [detail.summary for detail in details.values()]
    found |= {
        "jobs": float(len(coming)),
        "avg_jct_s": statistics.fmean(
            detail.history[-1].time - detail.summary.submitted_at for detail in details.values()
        ),
        "rescales_per_job": statistics.fmean(job.rescales for job in jobs),
        "batch_changes_per_job": statistics.fmean(job.batch_changes for job in jobs),
        "not_done": float(sum(job.state != "succeeded" for job in jobs)),
        "violations": float(len(held)),
        "held_most_s": looks.seen.most_s,
        "load": statistics.fmean(looks.loads),
    }
    return {f"{name}_{policy}": value for name, value in found.items()}


class _Looks:
    def __init__(self) -> None:
        self.seen = SizeWatch()
        self.starts: dict[JobId, Start] = {}  # the first forecast of each job that waited
        self.loads: list[float] = []  # of the host, processes that want a core
        self._noise: dict[JobId, tuple[int, float | None]] = {}  # by its last epoch

    def look(self, client: BlockingClient, jobs: Sequence[JobSummary], now: float) -> None:
        self.loads.append(os.getloadavg()[0])
        for job in jobs:
            if job.state == WAITING and job.job not in self.starts:
                said = start_told(client.explain(job.job))
                self.starts |= {} if said is None else {job.job: said}
        waits = any(job.state not in ALIVE for job in jobs)
        idle = 0 if waits else max(0, SLOTS - sum(job.slots for job in jobs))
        looks = [
            Look(
                now, job.job, job.slots, job.global_batch, job.samples_per_s,
                self._noise_scale(client, job),
            )
            for job in jobs
            if job.state in ALIVE
        ]  # fmt: skip
        for one in self.seen.take(looks, idle):
            report.say(
                f"{now:.0f} s: {one.job} is held at {one.shape} ({one.progress:.0f}/s): "
                f"{one.better} was {one.better_progress:.0f}/s; {one.reason}"
            )

    def _noise_scale(self, client: BlockingClient, job: JobSummary) -> float | None:
        if self._noise.get(job.job, (-1, None))[0] != job.epoch:
            epochs = client.job(job.job).epochs
            self._noise[job.job] = job.epoch, epochs[-1].noise_scale if epochs else None
        return self._noise[job.job][1]
