"""Predicted and actual effect of growth, and the life of growths that lose.

A cluster of four slots on this host, which may have fewer cores; the examples join one after the other and
never end by themselves. Speeds are those of telemetry.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from controlplane.client import BlockingClient
from schemas.jobs import StopRule
from tests.bench import report
from tests.bench.live_cluster import cluster
from tests.bench.live_jobs import TRAININGS, Job, spec_of

ENDLESS: Final = 100_000  # epochs
LOOK_S: Final = 0.5
ALONE_S, CROWDED_S = 40.0, 60.0  # for each example, and for all together
SETTLES: Final = 3  # looks at a new group that do not count
LOSES: Final = 0.95  # of the speed before


@dataclass
class Stretch:
    job: str
    slots: int
    batch: int
    began: float
    ended: float
    speeds: list[float] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Median samples per second after settling; nan while too little was seen."""
        settled = self.speeds[SETTLES:]
        return statistics.median(settled) if settled else math.nan


def main() -> None:
    chosen = report.arguments(__doc__, "a quarter of the time")
    share = 0.25 if chosen.quick else 1.0
    seen: list[Stretch] = []
    with report.folder() as base, cluster(base / "cluster", "ones") as (_, client):
        for example in TRAININGS:
            report.now(f"{example.name} alone")
            name = submit(client, Job(example, ENDLESS, 0), base)
            seen += watched(client, share * ALONE_S)
            client.cancel(name)
            client.wait(name, 60.0)
        for example in TRAININGS:
            report.now(f"{example.name} joins")
            submit(client, Job(example, ENDLESS, 1), base)
            seen += watched(client, share * CROWDED_S / len(TRAININGS))
        gains = [event.detail for event in client.events() if event.event == "job.gain"]
        for job in client.jobs():
            client.cancel(job.job)
    figures = tell(seen, [(float(g["predicted"]), float(g["realised"])) for g in gains])
    report.write(figures, chosen.json)


def submit(client: BlockingClient, job: Job, base: Path) -> str:
    spec = spec_of(job, base / "scripts")
    return client.submit(replace(spec, stop=StopRule(epochs=ENDLESS), record_samples=False))


def watched(client: BlockingClient, seconds: float) -> list[Stretch]:
    found: dict[str, list[Stretch]] = {}
    until = time.monotonic() + seconds
    while (now := time.monotonic()) < until:
        for job in client.jobs():
            mine = found.setdefault(job.job, [])
            if job.state not in {"running", "rescaling"}:
                continue
            if not mine or (mine[-1].slots, mine[-1].batch) != (job.slots, job.global_batch):
                mine.append(Stretch(job.job, job.slots, job.global_batch, now, now))
            mine[-1].ended = now
            mine[-1].speeds.append(job.samples_per_s)
        time.sleep(LOOK_S)
    return list(itertools.chain.from_iterable(found.values()))


def tell(seen: Sequence[Stretch], gains: Sequence[tuple[float, float]]) -> dict[str, float]:
    rows: list[list[object]] = []
    losing: list[float] = []
    grown = 0
    for before, now in itertools.pairwise(seen):
        grows = before.job == now.job and now.slots > before.slots
        ratio = now.speed / before.speed if before.job == now.job else math.nan
        grown += grows
        if grows and ratio < LOSES:
            losing.append(now.ended - now.began)
        what = [now.job, f"{before.slots} -> {now.slots}", f"{before.batch} -> {now.batch}"]
        if before.job == now.job:
            rows.append([*what, round(before.speed, 1), round(now.speed, 1), f"{ratio:.2f}",
                         f"{now.ended - now.began:.1f}"])  # fmt: skip
    heads = ["", "slots", "batch", "samples/s before", "then", "ratio", "lived, s"]
    report.table("changes, speeds by telemetry", heads, rows)
    pairs = [[f"{one:.2f}", f"{two:.2f}", f"{two / one:.2f}"] for one, two in gains]
    report.table("gains of whole epochs", ["predicted", "realised", "ratio"], pairs)
    off = [abs(math.log(two / one)) for one, two in gains]
    figures = {
        "growths": float(grown),
        "losing_growths": float(len(losing)),
        "losing_growth_s": max(losing, default=0.0),
        "gains": float(len(gains)),
        "gain_off_median": math.exp(statistics.median(off)) if off else 1.0,
        "gain_off_worst": math.exp(max(off, default=0.0)),
        "predicted_most": max((one for one, _ in gains), default=0.0),
    }
    report.table("figures", ["key", "value"], list(figures.items()))
    return figures


if __name__ == "__main__":
    main()
