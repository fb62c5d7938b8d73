"""Sixteen configurations of a real training in four ways, on four nodes with a slot each.

Hopping, hopping in the paper's random order, task-parallel (each worker trains whole configurations
and every node has all data: a sweep with one partition that all hold), and elastic data-parallel
jobs on all slots, one after the other. What each way costs beside time: data on the nodes' disks,
states that hopped, gradients that were summed (a ring sends 2 (n - 1) times the model a step; Cerebro,
section 4.3). Three configurations are trained once more, alone, and compared bit by bit.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench import report
from tests.bench.hopper_ways import NODES, Training, Way, trainings, ways


def training_figures(*, quick: bool, curves: Path | None) -> dict[str, float]:
    """Print the tables; the figures of `bin/bench hopper`.

    Args:
        quick: four configurations, one epoch.
        curves: where what figures are drawn from is written.
    """
    searched = trainings(quick=quick)
    found: dict[str, dict[str, Way]] = {}
    with tempfile.TemporaryDirectory(prefix="ones-bench-") as folder:
        for one in searched:
            found[one.name] = ways(one, Path(folder) / one.name)
            told(one, found[one.name])
    if curves is not None:
        curves.write_text(json.dumps(for_figures(searched, found)), encoding="utf-8")
    return figures_of(found)


def told(one: Training, mine: dict[str, Way]) -> None:
    """Print one training's table."""
    best = max if one.mode == "max" else min
    whole = mine["hopping"]
    rows: list[list[object]] = [
        [
            name,
            way.makespan_s,
            way.makespan_s / whole.makespan_s,
            best(curve[-1] for curve in way.curves),
            way.data_bytes / 1e6,
            way.network_bytes / 1e6,
            way.waited_s / max(1, way.units) * 1000.0,
        ]
        for name, way in mine.items()
    ]
    heads = ["way", "makespan, s", "over hopping", f"best {one.metric}", "data on disks, MB",
             "over the network, MB", "wait for a state, ms"]  # fmt: skip
    what = f"{one.name}: {one.configurations} configurations, {one.epochs} epochs, {NODES} nodes"
    report.table(what, heads, rows)


def figures_of(found: dict[str, dict[str, Way]]) -> dict[str, float]:
    """The keys of both trainings, together."""
    hops = [mine["hopping"] for mine in found.values()]
    figures = {
        "hop_share": sum(h.waited_s for h in hops) / sum(h.waited_s + h.trained_s for h in hops),
        "hop_ms": 1000.0 * sum(h.waited_s for h in hops) / sum(h.units for h in hops),
        "bit_equal": float(all(h.bit_equal for h in hops)),
        "bytes_vs_ddp": sum(h.network_bytes for h in hops)
        / sum(mine["elastic jobs"].network_bytes for mine in found.values()),
    }
    for name, mine in found.items():
        whole = mine["hopping"].makespan_s
        for way, measured in mine.items():
            if way != "hopping":
                key = way.replace(" ", "_").replace("-", "_")
                figures[f"{name}_makespan_vs_{key}"] = whole / measured.makespan_s
    return figures


def for_figures(
    searched: Sequence[Training], found: Mapping[str, Mapping[str, Way]]
) -> dict[str, Any]:
    """What `bin/bench hopper_figures` draws: costs, and the curves of the best configuration."""
    curves = {}
    for one in searched:
        mine = found[one.name]
        last = [curve[-1] for curve in mine["hopping"].curves]
        best = last.index((max if one.mode == "max" else min)(last))
        chosen = {name: way.curves[best] for name, way in mine.items() if name != "random order"}
        curves[one.name] = {"metric": one.metric, "curves": chosen}
    return {
        "ways": {name: {way: asdict(m) for way, m in mine.items()} for name, mine in found.items()},
        "curves": curves,
    }
