"""Completion times of `harmony` and of the placers of its paper, for jobs that slow each other down.

Simulations in virtual time on the model of the paper's testbed (`--physics harmony`: six servers of two GPUs,
six models, one to three workers and parameter servers), with its three patterns of arrival and the same jobs
for all policies. All serve gangs in order of arrival, without backfill, so that they differ in places only.
`jct_vs_NAME` is the geometric mean of the ratio of average completion times over patterns and seeds, `_low` and
`_high` its 95% interval (Student's, of logarithms), `_pairwise` and `_class` the same under other rules of
interference. `oracle` is `harmony` with the simulator's truth about neighbours. `drl_vs_lb` compares
`harmony-drl`, with the model that ships, with load balancing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, Final

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before the workers import numpy

import numpy as np
from msgspec.structs import replace

from controlplane.policy.learned.gang_model import read
from controlplane.sim.analysis.plot_style import (
    COLOURS,
    HATCHES,
    new_figure,
    policy_legend,
    save,
    tidy,
)
from controlplane.sim.results import JobResult, SimulationResult
from controlplane.sim.scenario import HARMONY
from tests.bench import report
from tests.bench.simulations import Bench, Ratio, Way, average_s, interval

SEEDS: Final = tuple(range(200, 212))  # nothing was trained on these, no constant chosen
PATTERNS: Final = {"uniform": "uniform", "Poisson": "poisson", "bursty": "bursts"}
RULES: Final = ("pairwise:0.3", "class:0.3")  # beside that of the testbed, `resources:0.3`
LINE: Final = {"backfill": False}  # gangs in order of arrival, as `fifo` serves them


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""  # `jct_vs_KEY`; empty: it has none


ROWS: Final = (
    Row("load balancing", "fifo", {"placer": "load-balancing"}, "lb"),
    Row("tetris", "fifo", {"placer": "tetris"}, "tetris"),
    Row("LIF linear", "fifo", {"placer": "lif-linear"}, "lif_linear"),
    Row("LIF quadratic", "fifo", {"placer": "lif-quadratic"}, "lif_quadratic"),
    Row("consolidate", "fifo", {"placer": "consolidate"}, "consolidate"),
    Row("harmony, placement only", "harmony", LINE | {"migrations": "none"}, "placement"),
    Row("harmony, free moves", "harmony", LINE | {"migrations": "free"}, "free_moves"),
    Row("harmony", "harmony", LINE),
    Row("harmony-drl", "harmony-drl", LINE),
    Row("oracle", "harmony", LINE | {"slowdowns": "oracle"}, "oracle"),
)
OURS: Final = "harmony"
LEARNED: Final = "harmony-drl"
Found = Mapping[tuple[str, str], Sequence[SimulationResult]]  # by row and pattern, of each seed


def simulated(
    rows: Sequence[Row], seeds: Sequence[int], changes: Mapping[str, Any], keep: Path | None
) -> Found:
    ways = {
        (row.name, name): Way(
            replace(HARMONY, arrivals=arrivals, **changes), row.options, row.policy
        )
        for row in rows
        for name, arrivals in PATTERNS.items()
    }
    bench = Bench(seeds, os.cpu_count() or 1, keep)
    bench.do(ways.values())
    return {key: [bench.result(way, seed) for seed in seeds] for key, way in ways.items()}


def ended_s(job: JobResult) -> float:
    assert job.ended_at is not None, job
    return job.ended_at - job.submitted_at


def averages(found: Found, name: str, pattern: str | None = None) -> list[float]:
    return [
        average_s(result, result.ended_at)
        for each in PATTERNS
        if pattern in {None, each}
        for result in found[name, each]
    ]


def table(found: Found, rows: Sequence[Row], title: str) -> None:
    lines: list[list[object]] = []
    for row in rows:
        results = [result for each in PATTERNS for result in found[row.name, each]]
        jobs = [job for result in results for job in result.jobs if job.counted]
        lines.append([
            row.name,
            *(f"{mean(averages(found, row.name, each)):.0f}" for each in PATTERNS),
            "{0.mean:.3f} ({0.sure_low:.3f} to {0.sure_high:.3f})".format(
                Ratio.of(averages(found, row.name), averages(found, rows[0].name))
            ),
            f"{np.quantile([ended_s(job) for job in jobs], 0.9):.0f}",
            f"{mean(job.rescales for job in jobs):.1f}",
            f"{mean(ms for result in results for ms in result.decisions_ms):.1f}",
        ])  # fmt: skip
    heads = ["", *(f"{each}, s" for each in PATTERNS), f"over {rows[0].name} (95%)", "p90, s",
             "moves per job", "ms per decision"]  # fmt: skip
    report.table(title, heads, lines)


def figures_of(found: Found, rows: Sequence[Row]) -> dict[str, float]:
    ours = averages(found, OURS)
    ratios = {
        f"jct_vs_{row.key}": Ratio.of(ours, averages(found, row.name)) for row in rows if row.key
    }
    ratios["drl_vs_lb"] = Ratio.of(averages(found, LEARNED), averages(found, rows[0].name))
    figures: dict[str, float] = {}
    for key, one in ratios.items():
        figures |= {key: one.mean, f"{key}_low": one.sure_low, f"{key}_high": one.sure_high}
    figures["drl_train_cpu_s"] = trained_cpu_s()
    jobs = [job for each in PATTERNS for result in found[OURS, each] for job in result.jobs]
    figures["moves_per_job"] = mean(job.rescales for job in jobs)
    return figures


def trained_cpu_s() -> float:
    """What the training of the model that ships took, by its card."""
    return read(None).card.figures["cpu_s"]


def draw(found: Found, rows: Sequence[Row], path: Path) -> None:
    """Draw average completion times by pattern, with 95% intervals (the paper's evaluation)."""
    figure = new_figure(9.0, 4.0)
    axes = figure.subplots()
    width = 0.85 / len(rows)
    for number, row in enumerate(rows):
        for place, pattern in enumerate(PATTERNS):
            times = averages(found, row.name, pattern)
            off = interval(times)[1] if len(times) > 1 else 0.0
            axes.bar(
                place + (number - (len(rows) - 1) / 2) * width, mean(times), width * 0.92,
                yerr=off, capsize=2, color=COLOURS[number % len(COLOURS)],
                hatch=HATCHES[number // len(COLOURS)], label=row.name if not place else None,
            )  # fmt: skip
    axes.set_xticks(range(len(PATTERNS)), list(PATTERNS))
    axes.set_ylabel("average completion time (s)")
    tidy(axes)
    policy_legend(figure, axes, 4)
    save(figure, path)


def main() -> None:
    options = report.arguments(
        __doc__,
        "one seed, 25 jobs",
        seeds=(report.seeds, SEEDS, "as in 200-211"),
        keep=(Path, None, "results as they come; go on from them"),
        figure=(Path, None, "draw average completion times here"),
    )
    seeds = options.seeds[:1] if options.quick else options.seeds
    changes = {"jobs": 25} if options.quick else {}
    found = simulated(ROWS, seeds, changes, options.keep)
    jobs = changes.get("jobs", HARMONY.jobs)
    table(found, ROWS, f"{jobs} jobs on 6 servers of 2 GPUs, seeds {seeds[0]} to {seeds[-1]}")
    figures = figures_of(found, ROWS)
    for rule in RULES:
        few = [row for row in ROWS if row.key in {"lb", "tetris", "oracle"} or row.name == OURS]
        found_too = simulated(few, seeds, {**changes, "interference": rule}, options.keep)
        table(found_too, few, f"the same jobs where neighbours hurt as {rule} says")
        kind = rule.partition(":")[0]
        for row in few:
            if row.key:
                ours, theirs = averages(found_too, OURS), averages(found_too, row.name)
                figures[f"jct_vs_{row.key}_{kind}"] = Ratio.of(ours, theirs).mean
    report.finish(figures, options.json, "harmony")
    if options.figure is not None:
        draw(found, ROWS, options.figure)


if __name__ == "__main__":
    main()
