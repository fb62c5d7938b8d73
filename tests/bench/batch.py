"""Learning with the batches that `max_batch_size` allows by default, and with a job's own batch.

Each training runs with several seeds: once with its batch kept, once with the batch raised to the
present limit as soon as the limit changes, which is more than any policy does.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from controlplane.client import BlockingClient
from controlplane.client.job_file import load_job
from schemas.errors import OnesError
from schemas.ids import JobId
from schemas.jobs import ENDED, JobSpec, StopRule
from tests.bench import report
from tests.bench.live_cluster import cluster
from tests.bench.live_jobs import EXAMPLES, seeded

OWN: Final = Path(__file__).parent / "trainings"
MAX_SLOTS: Final = 8  # a job may say: the batch that fits them is no bound here
LOOK_S: Final = 0.1
KEPT, RAISED = "kept", "by default"
ABOUT: Final = """\
A training is worse when the mean over its seeds is worse than with its batch kept, by more than the
spread: the range over the seeds with the batch kept."""


@dataclass(frozen=True)
class Training:
    name: str
    folder: Path
    metric: str
    better: int  # 1: more of the metric is better, -1: less


TRAININGS: Final = (
    Training("digits", EXAMPLES / "digits", "accuracy", 1),
    Training("language", EXAMPLES / "language", "perplexity", -1),
    Training("embedding", EXAMPLES / "embedding", "error", -1),
    Training("mlp", OWN / "mlp", "accuracy", 1),
    Training("attention", OWN / "attention", "accuracy", 1),
)


@dataclass
class Outcome:
    metric: float = math.nan
    loss: float = math.nan  # of the last epoch's training
    batches: list[int] = field(default_factory=list)  # one after the other
    steps: int = 0
    noise_scale: float | None = None  # median over its epochs, samples


Outcomes = dict[tuple[str, str], list[Outcome]]  # by training and way


def main() -> None:
    names = [one.name for one in TRAININGS]
    chosen = report.arguments(
        __doc__,
        "one seed, a quarter of the epochs",
        seeds=(int, None, "of every training; default: 3, quick: 1"),
        only=(report.some_of(names), names, "some trainings"),
    )
    trainings = [one for one in TRAININGS if one.name in chosen.only]
    with report.folder() as folder:
        seeds = range(chosen.seeds or (1 if chosen.quick else 3))
        found = outcomes(trainings, seeds, folder, quick=chosen.quick)
    figures = tell(trainings, found)
    report.write(figures, chosen.json)


def outcomes(
    trainings: Sequence[Training], seeds: Sequence[int], base: Path, *, quick: bool
) -> Outcomes:
    found: Outcomes = {(one.name, way): [] for one in trainings for way in (KEPT, RAISED)}
    with cluster(base / "cluster", "fifo") as (_, client):
        names: dict[JobId, tuple[Training, str]] = {}
        for seed in seeds:
            for one in trainings:
                for way in (KEPT, RAISED):
                    spec = spec_of(one, way, seed, base / "scripts", quick=quick)
                    names[client.submit(spec)] = one, way
        raised = {name for name, (_, way) in names.items() if way == RAISED}
        while ended := [job.state in ENDED for job in client.jobs(ended=True)]:
            report.now(f"{sum(ended)} of {len(ended)} trainings have ended")
            if all(ended):
                break
            raise_batches(client, raised)
            time.sleep(LOOK_S)
        for name, (one, way) in names.items():
            found[one.name, way].append(_outcome(client, name, one))
    return found


def spec_of(one: Training, way: str, seed: int, scripts: Path, *, quick: bool) -> JobSpec:
    spec = load_job(one.folder / "job.toml")
    epochs = spec.stop.epochs if spec.stop and spec.stop.epochs else 1
    kept = way == KEPT
    return replace(
        spec, workdir=str(seeded(one.folder, scripts, seed)),
        stop=StopRule(epochs=max(2, epochs // 4) if quick else epochs), seed=seed,
        slots=(1, 1) if kept else (1, MAX_SLOTS), slots_wanted=1 if kept else 2,
        max_batch_size="keep" if kept else "auto", max_local_batch=None,
    )  # fmt: skip


def raise_batches(client: BlockingClient, names: set[JobId]) -> None:
    for job in client.jobs():
        if job.job not in names or job.state != "running":
            continue
        limit = client.job(job.job).batch_limit or 0
        wanted = min(limit, 2 * job.global_batch)
        if wanted != job.global_batch and wanted >= job.slots:
            try:
                client.resize(job.job, batch=wanted)
            except OnesError:
                continue  # it ended just now


def _outcome(client: BlockingClient, name: JobId, one: Training) -> Outcome:
    detail = client.job(name)
    last = detail.epochs[-1]
    batches = [info.global_batch for info in detail.epochs]
    scales = [info.noise_scale for info in detail.epochs if info.noise_scale is not None]
    return Outcome(
        metric=last.metrics.get(one.metric, math.nan),
        loss=math.nan if last.train_loss is None else last.train_loss,
        batches=[b for place, b in enumerate(batches) if not place or b != batches[place - 1]],
        steps=last.step,
        noise_scale=statistics.median(scales) if scales else None,
    )


def tell(
    trainings: Sequence[Training], found: Mapping[tuple[str, str], Sequence[Outcome]]
) -> dict[str, float]:
    figures: dict[str, float] = {"batch_worse": 0.0, "batch_compared": float(len(trainings))}
    rows: list[list[object]] = []
    for one in trainings:
        kept, raised = found[one.name, KEPT], found[one.name, RAISED]
        means = [statistics.fmean(run.metric for run in runs) for runs in (kept, raised)]
        spread = max(run.metric for run in kept) - min(run.metric for run in kept)
        shortfall = one.better * (means[0] - means[1])
        worse = not shortfall <= spread
        batch = max(max(run.batches) for run in raised) / kept[0].batches[0]
        steps = statistics.fmean(run.steps for run in raised) / kept[0].steps
        said = (means[0], means[1], spread, shortfall, batch, steps)
        keys = ("kept", "default", "spread", "shortfall", "batch_ratio", "steps_ratio")
        figures |= {f"{one.name}_{key}": value for key, value in zip(keys, said, strict=True)}
        figures["batch_worse"] += worse
        cells = [_range(kept), _range(raised), f"{spread:.4f}", f"{shortfall:+.4f}", _noise(raised)]
        verdict = "WORSE" if worse else "as good"
        rows.append(
            [f"{one.name}, {one.metric}", *cells, f"{batch:.2f} x", f"{steps:.2f}", verdict]
        )
    heads = ["", KEPT, RAISED, "spread", "worse by", "noise scale", "largest batch", "steps", ""]
    seeds = len(found[trainings[0].name, KEPT])
    report.table(f"final held-out metrics, {seeds} seeds: mean (range)", heads, rows)
    report.say(ABOUT)
    return figures


def _range(runs: Sequence[Outcome]) -> str:
    low, high = min(run.metric for run in runs), max(run.metric for run in runs)
    return f"{statistics.fmean(run.metric for run in runs):.4f} ({low:.4f} to {high:.4f})"


def _noise(runs: Sequence[Outcome]) -> str:
    known = [run.noise_scale for run in runs if run.noise_scale is not None]
    return f"{min(known):.0f} to {max(known):.0f}" if known else "none"


if __name__ == "__main__":
    main()
