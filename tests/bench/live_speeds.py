"""Speeds of the examples by size, and quality of learning at fixed sizes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from controlplane.client import BlockingClient
from schemas.jobs import StopRule
from tests.bench import report
from tests.bench.live_cluster import Ended, Run, cluster, story
from tests.bench.live_jobs import SLOTS, Example, Job, spec_of

SEEDS: Final = (0, 1_000, 2_000)  # added to a job's own
BY_CHANCE: Final = 0.046  # see `Yardstick`
VERDICT: Final = """\
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
        better = self.job.example.better
        return better * min(better * metric for metric in self.metrics)

    def shortfall(self, metric: float) -> float:
        """Return how much a metric is below the worst run; negative: above."""
        return self.job.example.better * (self.worst - metric)

    def is_worse(self, metric: float) -> bool:
        return self.shortfall(metric) > self.spread


def reference(chosen: Sequence[Job], base: Path) -> dict[Job, Yardstick]:
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
    ranges = {job: max(metrics) - min(metrics) for job, metrics in reached.items()}
    usual = {
        example: statistics.median_low(ranges[job] for job in ranges if job.example == example)
        for example in dict.fromkeys(job.example for job in ranges)
    }
    return {
        job: Yardstick(job, tuple(metrics), max(ranges[job], usual[job.example]))
        for job, metrics in reached.items()
    }


def tell_quality(by: Mapping[Job, Yardstick], runs: Sequence[Run], ours: str) -> dict[str, float]:
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
        report.say(f"{policy}: {count} of {len(everyone)} worse")
    count = int(figures[f"metric_compared_{ours}"])
    report.say(VERDICT.format(share=BY_CHANCE, expected=BY_CHANCE * count, count=count))
    return figures


def _is_worse(by: Mapping[Job, Yardstick], ended: Ended) -> bool:
    return ended.metric is None or by[ended.job].is_worse(ended.metric)


ENDLESS: Final = 100_000  # epochs
SETTLES_S: Final = 1.5  # after a change, before its speed is looked at
LOOKS: Final = 8
LOOK_S: Final = 0.5
READY_S: Final = 60.0
Curve = dict[tuple[int, int], float]  # samples per second by (slots, times the first batch)


def measure(base: Path, examples: Sequence[Example], *, quick: bool) -> dict[str, Curve]:
    """Resize each example through all sizes; its own telemetry says how fast it is.

    Each size has the first batch, and, unless `quick`, the first batch on every slot.
    """
    sizes = [1, 2] if quick else list(range(1, SLOTS + 1))
    points = [(size, 1) for size in sizes] + ([] if quick else [(n, n) for n in sizes[1:]])
    found: dict[str, Curve] = {}
    with cluster(base / "curves", "fifo") as (_, client):
        for example in report.counted("speed of example", examples, len(examples)):
            found[example.name] = _curve(client, example, points, base, 4 if quick else LOOKS)
    return found


def _curve(
    client: BlockingClient,
    example: Example,
    points: Sequence[tuple[int, int]],
    base: Path,
    looks: int,
) -> Curve:
    spec = spec_of(Job(example, 1, 0), base / "scripts")
    name = client.submit(replace(spec, stop=StopRule(epochs=ENDLESS), record_samples=False))
    curve: Curve = {}
    for slots, times in points:
        client.resize(name, slots, times * spec.batch_size)
        _await(client, name, slots, times * spec.batch_size)
        time.sleep(SETTLES_S)
        seen = []
        for _ in range(looks):
            time.sleep(LOOK_S)
            seen.append(client.job(name).summary.samples_per_s)
        curve[slots, times] = statistics.median(seen)
    client.cancel(name)
    client.wait(name, READY_S)
    return curve


def _await(client: BlockingClient, name: str, slots: int, batch: int) -> None:
    def there() -> bool:
        job = client.job(name).summary
        trains = (job.state, job.slots, job.global_batch) == ("running", slots, batch)
        return trains and job.samples_per_s > 0.0

    report.until(there, READY_S, LOOK_S, lambda: client.job(name).summary)


def at_first_batch(curves: Mapping[str, Curve]) -> dict[str, dict[int, float]]:
    return {
        name: {slots: speed for (slots, times), speed in curve.items() if times == 1}
        for name, curve in curves.items()
    }


def tell_speeds(curves: Mapping[str, Curve]) -> dict[str, float]:
    points = list(next(iter(curves.values())))
    heads = [
        f"{slots} slot{'s' * (slots > 1)}" + (f", batch x{times}" if times > 1 else "")
        for slots, times in points
    ]
    rows: list[list[object]] = []
    figures: dict[str, float] = {}
    for name, curve in curves.items():
        rows.append([f"{name}, samples/s", *(round(curve[point]) for point in points)])
        ratios = [curve[point] / curve[points[0]] for point in points]
        rows.append([f"{name}, speed-up", *(f"{ratio:.2f}" for ratio in ratios)])
        figures[f"samples_per_s_{name}"] = curve[points[0]]
        for (slots, times), ratio in zip(points[1:], ratios[1:], strict=True):
            figures[f"speedup_{name}_{slots}" + (f"_batch_x{times}" if times > 1 else "")] = ratio
    cores = os.cpu_count()
    title = f"speed alone on the cluster, one thread per worker, {cores} cores"
    report.table(title, ["", *heads], rows)
    return figures
