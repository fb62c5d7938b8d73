"""How fast each example trains on 1, 2, 3 and 4 slots of this machine, alone on a cluster."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from controlplane.client import BlockingClient
from schemas.jobs import StopRule
from tests.bench import report
from tests.bench.live_cluster import cluster
from tests.bench.live_jobs import SLOTS, Example, Job, spec_of

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
    """Until it trains at this size, and has said how fast."""
    deadline = time.monotonic() + READY_S
    while True:
        job = client.job(name).summary
        there = (job.state, job.slots, job.global_batch) == ("running", slots, batch)
        if there and job.samples_per_s > 0.0:
            return
        assert time.monotonic() < deadline, job
        time.sleep(LOOK_S)


def at_first_batch(curves: Mapping[str, Curve]) -> dict[str, dict[int, float]]:
    """Samples per second by slots, at the batch that users begin with."""
    return {
        name: {slots: speed for (slots, times), speed in curve.items() if times == 1}
        for name, curve in curves.items()
    }


def tell(curves: Mapping[str, Curve]) -> dict[str, float]:
    """Print the curves; the figures of them."""
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
