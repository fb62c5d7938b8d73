"""The Cerebro paper's figures, drawn anew: makespans, what the ways cost, and learning curves.

`bin/bench hopper_figures --into docs/figures [--curves FILE]`. Makespans come from plays in virtual
time; costs and learning curves come from the file that `bin/bench hopper --curves FILE` wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any, Final

from controlplane.sim.analysis.plot_style import COLOURS, new_figure, save, tidy
from controlplane.sweeps.configurations import stream
from controlplane.sweeps.hopping import HopProblem, makespan_bound
from controlplane.sweeps.visit_order import best_weights, makespan
from tests.bench import report
from tests.bench.hopper_order import ROLLOUTS, at_random, problem

SLOTS: Final = 8
CONFIGURATIONS: Final = (8, 12, 16, 24, 32, 48, 64)
SEEDS: Final = 20
ORDERS: Final[Mapping[str, Callable[[HopProblem, Random], float]]] = {
    "random (the paper)": at_random,
    "greedy": lambda one, _: makespan(one),
    f"greedy, {ROLLOUTS} rollouts": lambda one, rng: makespan(
        one, best_weights(one, ROLLOUTS, rng)
    ),
}


def makespans(*, alike: bool, quick: bool) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ORDERS}
    kind = "alike" if alike else "different"
    for many in report.counted(f"{kind}: size", CONFIGURATIONS, len(CONFIGURATIONS)):
        seeds = range(2 if quick else SEEDS)
        problems = [problem(many, SLOTS, alike=alike, seed=seed) for seed in seeds]
        for name, order in ORDERS.items():
            over = [
                order(one, stream(name, seed)) / makespan_bound(one)
                for seed, one in enumerate(problems)
            ]
            found[name].append((mean(over), max(over)))
    return found


def draw_makespans(path: Path, *, quick: bool) -> dict[str, float]:
    """Two panels, alike and different; lines are means, the shade reaches to the worst seed.

    Returns:
        The means.
    """
    figures: dict[str, float] = {}
    figure = new_figure(9.0, 3.8)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, alike in zip(panels, (True, False), strict=True):
        for colour, (name, cells) in zip(
            COLOURS, makespans(alike=alike, quick=quick).items(), strict=False
        ):
            means, worst = zip(*cells, strict=True)
            for many, value in zip(CONFIGURATIONS, means, strict=True):
                figures[f"{name}, {many} {'alike' if alike else 'different'}"] = value
            axes.plot(CONFIGURATIONS, means, color=colour, marker="o", markersize=3, label=name)
            axes.fill_between(CONFIGURATIONS, means, worst, color=colour, alpha=0.15, linewidth=0)
        kind = "all alike" if alike else "different configurations and slots"
        axes.set_title(kind, fontsize=10)
        axes.set_xlabel(f"configurations on {SLOTS} slots")
        tidy(axes)
    panels[0].set_ylabel("makespan over the bound")
    panels[1].legend(frameon=False, fontsize=9)
    save(figure, path)
    return figures


def draw_costs(measured: Mapping[str, Any], path: Path) -> None:
    """Draw two bars for each way: bytes on the nodes' disks, and over the network."""
    figure = new_figure(9.0, 3.8)
    panels = figure.subplots(1, len(measured))
    for axes, (training, ways) in zip(panels, measured.items(), strict=True):
        names = list(ways)
        for aside, key, colour, label in (
            (-0.2, "data_bytes", COLOURS[0], "data on disks"),
            (0.2, "network_bytes", COLOURS[1], "over the network"),
        ):
            places = [at + aside for at in range(len(names))]
            bars = [max(1e-3, ways[name][key] / 1e6) for name in names]
            axes.bar(places, bars, width=0.38, color=colour, label=label)
        axes.set_yscale("log")
        axes.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names], fontsize=8)
        axes.set_title(training, fontsize=10)
        axes.set_ylabel("MB")
        tidy(axes)
    panels[-1].legend(frameon=False, fontsize=9)
    save(figure, path)


def draw_curves(measured: Mapping[str, Any], path: Path) -> None:
    figure = new_figure(9.0, 3.8)
    panels = figure.subplots(1, len(measured))
    for axes, (training, found) in zip(panels, measured.items(), strict=True):
        for style, (name, curves) in zip(("-", "--"), found["curves"].items(), strict=True):
            for number, (colour, values) in enumerate(zip(COLOURS, curves, strict=False)):
                epochs = range(1, len(values) + 1)
                label = name if number == 0 else None
                axes.plot(epochs, values, color=colour, linestyle=style, linewidth=1, label=label)
        axes.set_title(training, fontsize=10)
        axes.set_xlabel("epoch")
        axes.set_ylabel(found["metric"])
        tidy(axes)
    panels[-1].legend(frameon=False, fontsize=9)
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser(__doc__ or "", "two seeds")
    parser.add_argument("--into", type=Path, required=True, help="folder of the pictures")
    parser.add_argument("--curves", type=Path, help="what bin/bench hopper kept")
    given = parser.parse_args(arguments)
    figures = draw_makespans(given.into / "hopper-makespans.png", quick=given.quick)
    report.write(figures, given.json)
    if given.curves is not None:
        measured = json.loads(given.curves.read_text(encoding="utf-8"))
        draw_costs(measured["ways"], given.into / "hopper-costs.png")
        draw_curves(measured["curves"], given.into / "hopper-curves.png")


if __name__ == "__main__":
    main()
