"""The SLAQ paper's figures, drawn anew: losses, slots, times, decisions and predictions.

`bin/bench slaq_figures --into docs/figures`. Figures 3 to 5 come from simulations of the paper's
setting (`--physics curves`), figure 6 from decisions of the shipped policy in this process; that of
predictions has no counterpart among the paper's, only its "less than 5%".
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
from msgspec.structs import replace

from controlplane.prediction.convergence_curves import fit_curves
from controlplane.sim import experiment
from controlplane.sim.analysis import plots
from controlplane.sim.analysis.comparison import means
from controlplane.sim.analysis.plot_style import COLOURS, new_figure, policy_legend, save, tidy
from controlplane.sim.cluster import NodeGroup
from controlplane.sim.results import SimulationResult
from controlplane.sim.scenario import SLAQ
from tests.bench import report
from tests.bench.simulations import simulate_cell
from tests.bench.slaq import AHEAD, SLOTS, decision_s, errors, predicted, windows

PER_NODE: Final = 32
REPEATS: Final = 3  # of a decision
SIZES: Final = (1000, 2000, 3000, 4000)  # jobs

# --- measures


def errors_by_family() -> dict[str, tuple[float, float]]:
    known = windows()
    ours = errors(predicted(fit_curves(known.places, known.losses), known), known)
    kept = errors(known.last, known)
    found = {}
    for family in dict.fromkeys(known.families):
        mine = np.array([name == family for name in known.families])
        found[family] = (float(ours[mine].mean()), float(kept[mine].mean()))
    return found


# --- pictures


def draw_errors(by_family: Mapping[str, tuple[float, float]], path: Path) -> None:
    figure = new_figure(7.6, 3.8)
    axes = figure.subplots()
    for aside, which, label, colour, hatch in (
        (-0.2, 0, "fitted curve", COLOURS[1], ""), (0.2, 1, "last loss kept", COLOURS[5], "//"),
    ):  # fmt: skip
        heights = [100.0 * each[which] for each in by_family.values()]
        bars = axes.bar(np.arange(len(by_family)) + aside, heights, 0.37, label=label, color=colour,
                        hatch=hatch, alpha=0.9)  # fmt: skip
        axes.bar_label(bars, fmt="%.2g", fontsize="x-small", padding=2)
    axes.axhline(5.0, color="black", linewidth=0.8, linestyle=":", label="5%, the paper's bound")
    axes.set_xticks(
        range(len(by_family)), list(by_family), rotation=25, ha="right", fontsize="small"
    )
    axes.set_ylabel(f"error {AHEAD} iterations ahead (%)")
    axes.margins(y=0.12)
    tidy(axes)
    policy_legend(figure, axes, 3)
    save(figure, path)


def draw_decisions(took_s: Mapping[int, float], path: Path) -> None:
    """Draw the seconds of a decision by the number of jobs (SLAQ figure 6)."""
    figure = new_figure(6.0, 3.4)
    axes = figure.subplots()
    jobs = list(took_s)
    axes.plot(jobs, list(took_s.values()), marker="o", color=COLOURS[1], linewidth=1.6)
    for count, seconds in zip(jobs, took_s.values(), strict=True):
        axes.annotate(f"{seconds:.2f}", (count, seconds), (0, 7), textcoords="offset points",
                      ha="center", fontsize="small")  # fmt: skip
    axes.set_xlabel(f"jobs on {SLOTS} slots")
    axes.set_ylabel("time of a full decision (s of a core)")
    axes.set_xticks(jobs)
    axes.set_ylim(0.0, 1.2 * max(took_s.values()))
    tidy(axes)
    save(figure, path)


def simulated(seeds: Sequence[int], cores: int, kept: Path | None) -> list[SimulationResult]:
    """Simulate `fair` and `slaq` in the paper's setting, or at its load on fewer cores."""
    scenario = replace(
        SLAQ,
        nodes=(NodeGroup(count=cores // PER_NODE, slots=PER_NODE, kind="cpu"),),
        work_core_s=SLAQ.work_core_s * cores / SLAQ.slots,
    )
    cells = experiment.grid([("fair", {}), ("slaq", {})], [scenario], list(seeds))
    return experiment.run(cells, simulate_cell, kept, os.cpu_count() or 1, report.simulated)


def main() -> None:
    chosen = report.arguments(
        __doc__,
        "one seed on 64 cores, one decision of each size",
        into=(Path, ..., "folder for the figures"),
        seeds=(report.seeds, "30-31", "of simulations, as in 30-31"),
        cores=(int, SLAQ.slots, "whole nodes of 32"),
        results=(Path, None, "keeps simulations, to go on after Ctrl-C"),
    )
    if chosen.quick:
        chosen.seeds, chosen.cores = chosen.seeds[:1], 2 * PER_NODE
    into: Path = chosen.into
    into.mkdir(parents=True, exist_ok=True)

    by_family = errors_by_family()
    draw_errors(by_family, into / "slaq-errors.png")
    rows = [[family, 100.0 * ours, 100.0 * kept] for family, (ours, kept) in by_family.items()]
    report.table("mean error ten iterations ahead, %", ("algorithm", "fit", "last loss"), rows)

    repeats = 1 if chosen.quick else REPEATS
    took_s = {
        jobs: median(decision_s(jobs, SLOTS)[0] for _ in range(repeats))
        for jobs in report.counted("number of jobs", SIZES, len(SIZES))
    }
    draw_decisions(took_s, into / "slaq-decisions.png")
    sizes = [[f"{jobs} jobs, {SLOTS} slots", took] for jobs, took in took_s.items()]
    report.table("`slaq` decides, every curve fitted anew: seconds of a core", ("", "s"), sizes)

    seeds: range = chosen.seeds
    results = simulated(seeds, chosen.cores, chosen.results)
    plots.normalised_loss(results, into / "slaq-losses.png")
    plots.slots_by_loss(results, into / "slaq-slots.png")
    plots.times_to_reductions(results, into / "slaq-times.png")
    names = ("mean_loss", "t90_s", "t95_s", "loss_area_s", "cores_high", "cores_low",
             "avg_jct_s", "p99_jct_s", "makespan_s")  # fmt: skip
    both = {
        policy: means([result for result in results if result.policy == policy])
        for policy in ("fair", "slaq")
    }
    lines = [[policy, *(found[name] for name in names)] for policy, found in both.items()]
    report.table(
        f"160 jobs on {chosen.cores} cores, seeds {seeds[0]}-{seeds[-1]}", ("", *names), lines
    )
    figures = {f"{name}_{policy}": found[name] for policy, found in both.items() for name in names}
    report.write(figures, chosen.json)


if __name__ == "__main__":
    main()
