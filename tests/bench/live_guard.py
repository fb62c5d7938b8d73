"""Whether jobs learn as well when a policy changes their size as when nobody touches them."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.bench import report
from tests.bench.live_cluster import Ended, Run, cluster, story
from tests.bench.live_jobs import SLOTS, Job, spec_of
from tests.bench.live_tables import say

SEEDS: Final = (0, 1_000, 2_000)  # added to a job's own
BY_CHANCE: Final = 0.046  # see `Yardstick`
ABOUT: Final = """\
A job counts as worse when its final held-out metric is worse than the worst of three runs on one slot
(its own seed and two others, nobody resizes them) by more than the spread: the range of the three, or
the lower median of the ranges of its example's jobs if that is larger. If sizes did nothing at all to
learning, {share:.1%} of such comparisons would still say worse (normal errors), here {expected:.1f} of {count}."""


@dataclass(frozen=True)
class Yardstick:
    """What fixed-size runs of one job reached.

    Three runs say little of the range of a job's metric, so a range is at least as large as is
    usual for its example: the lower median, because short jobs vary more. With four jobs of an
    example and normal errors, a fourth run of the same kind is called worse in 4.6% of all cases
    (by simulation; with the job's own range alone in 6.7%).
    """

    job: Job
    metrics: tuple[float, ...]  # one for each seed
    spread: float

    @property
    def worst(self) -> float:
        """The worst of them."""
        better = self.job.example.better
        return better * min(better * metric for metric in self.metrics)

    def shortfall(self, metric: float) -> float:
        """By how much a metric is worse than the worst; negative: it is better."""
        return self.job.example.better * (self.worst - metric)

    def is_worse(self, metric: float) -> bool:
        """Whether it is worse by more than the spread."""
        return self.shortfall(metric) > self.spread


def reference(chosen: Sequence[Job], base: Path) -> dict[Job, Yardstick]:
    """Every job with every seed, on one slot from start to end, on as many slots as cores."""
    slots = min(os.cpu_count() or 1, SLOTS)
    longest_first = sorted(chosen, key=lambda job: -job.epochs / job.example.epochs[-1])
    reached: dict[Job, list[float]] = {job: [] for job in chosen}
    with cluster(base / "reference", "fifo", slots=slots) as (_, client):
        names = {
            client.submit(spec_of(job, base / "scripts", fixed=True, seed=job.seed + more)): job
            for job in longest_first
            for more in SEEDS
        }
        for name, job in report.counted("run at a fixed size", names.items(), len(names)):
            ended = story(client, job, client.wait(name))
            assert ended.metric is not None, (name, ended)
            reached[job].append(ended.metric)
    return yardsticks(reached)


def yardsticks(reached: Mapping[Job, Sequence[float]]) -> dict[Job, Yardstick]:
    """The measure of each job, from the final metrics of its runs."""
    ranges = {job: max(metrics) - min(metrics) for job, metrics in reached.items()}
    usual = {
        example: statistics.median_low(ranges[job] for job in ranges if job.example == example)
        for example in dict.fromkeys(job.example for job in ranges)
    }
    return {
        job: Yardstick(job, tuple(metrics), max(ranges[job], usual[job.example]))
        for job, metrics in reached.items()
    }


def tell(by: Mapping[Job, Yardstick], runs: Sequence[Run], ours: str) -> dict[str, float]:
    """Print a line for each job under `ours`; figures for every policy, the others as a control."""
    rows: list[list[object]] = []
    for job, yardstick in by.items():
        live = [e for run in runs if run.policy == ours for e in run.jobs if e.job == job]
        low, high = sorted((min(yardstick.metrics), max(yardstick.metrics)))
        worse = [ended for ended in live if _is_worse(by, ended)]
        rows.append(
            [job.name, job.example.metric, f"{low:.4f} to {high:.4f}", f"{yardstick.spread:.4f}",
             " ".join("none" if e.metric is None else f"{e.metric:.4f}" for e in live),
             f"WORSE in {len(worse)}" if worse else "as good"]
        )  # fmt: skip
    heads = ["", "metric", "fixed size, 3 seeds", "spread", f"under {ours}, by repeat", ""]
    report.table("final held-out metrics", heads, rows)
    figures: dict[str, float] = {}
    for policy in dict.fromkeys(run.policy for run in runs):
        everyone = [e for run in runs if run.policy == policy for e in run.jobs]
        count = sum(_is_worse(by, ended) for ended in everyone)
        figures["metric_worse" if policy == ours else f"metric_worse_{policy}"] = count
        figures[f"metric_compared_{policy}"] = len(everyone)
        say(f"{policy}: {count} of {len(everyone)} worse")
    count = int(figures[f"metric_compared_{ours}"])
    say(ABOUT.format(share=BY_CHANCE, expected=BY_CHANCE * count, count=count))
    return figures


def _is_worse(by: Mapping[Job, Yardstick], ended: Ended) -> bool:
    """A job that reported nothing is worse than any."""
    return ended.metric is None or by[ended.job].is_worse(ended.metric)
