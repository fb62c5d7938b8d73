"""Sixteen configurations of a real training in five ways, on four nodes with a slot each.

Hopping, hopping in an order that is known beforehand, in the paper's random order, task-parallel (each worker trains whole configurations
and every node has all data: a sweep with one partition that all hold), and elastic data-parallel
jobs on all slots, one after the other. What each way costs beside time: data on the nodes' disks,
states that hopped, gradients that were summed (a ring sends 2 (n - 1) times the model a step; Cerebro,
section 4.3). Three configurations are trained once more, alone, and compared bit by bit.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from tests.bench import report
from tests.bench.hopper_ways import (
    NODES,
    Training,
    Way,
    as_sweep,
    cluster_of_nodes,
    trainings,
    ways,
)

CURVE_EPOCHS: Final = 8


def training_figures(
    found: dict[str, dict[str, Way]], *, quick: bool, curves: Path | None, chosen: Sequence[str]
) -> dict[str, float]:
    """Print the tables; the figures of `bin/bench hopper`.

    Args:
        found: takes the ways of each training.
        quick: two configurations of digits, one epoch.
        curves: where what figures are drawn from is written.
        chosen: some of `WAYS`, `hopping` among them.
    """
    searched = trainings(quick=quick)
    with tempfile.TemporaryDirectory(prefix="ones-bench-") as folder:
        for one in searched:
            found[one.name] = ways(one, Path(folder) / one.name, chosen, quick=quick)
            told(one, found[one.name])
    if curves is not None:
        keep(curves, "ways", {name: {way: asdict(m) for way, m in mine.items()}
                              for name, mine in found.items()})  # fmt: skip
    return figures_of(found)


def learning_curves(
    trained: Mapping[str, Mapping[str, Way]], *, quick: bool, curves: Path | None
) -> dict[str, float]:
    """Train some configurations by hopping over four partitions, and each alone on all data.

    Args:
        trained: ways of each training, which `quick` does not train again.
        quick: two configurations of digits, one epoch.
        curves: where they are written for figures.

    Returns:
        How far the best metrics of both ways are apart, for each training.
    """
    found: dict[str, Any] = {}
    figures = {}
    with tempfile.TemporaryDirectory(prefix="ones-bench-") as folder:
        for training in trainings(quick=quick):
            one = (
                training if quick else replace(training, epochs=CURVE_EPOCHS, configurations=NODES)
            )
            base = Path(folder) / one.name
            report.now(f"{one.name}: learning curves, hopping and alone")
            known = trained.get(one.name, {}) if quick else {}
            if not {"hopping", "task-parallel"} <= known.keys():
                with cluster_of_nodes(base / "all") as up:
                    known = {
                        "hopping": as_sweep(one, base / "hops", NODES, 1, "greedy", shared=up),
                        "task-parallel": as_sweep(one, base / "own", 1, NODES, "greedy", shared=up),
                    }
            ways = {
                "hopping": known["hopping"].curves,
                "alone, on all data": known["task-parallel"].curves,
            }
            found[one.name] = {"metric": one.metric, "curves": ways}
            best = max if one.mode == "max" else min
            hopping, alone = (best(max(c) if one.mode == "max" else min(c) for c in each)
                              for each in ways.values())  # fmt: skip
            figures[f"{one.name}_{one.metric}_hopping_less_alone"] = hopping - alone
            report.table(
                f"{one.name}: best {one.metric} of {one.configurations} configurations, {one.epochs} epochs",
                ["hopping", "alone, on all data"],
                [[hopping, alone]],
            )
    if curves is not None:
        keep(curves, "curves", found)
    return figures


def keep(path: Path, key: str, value: dict[str, Any]) -> None:
    """Put one part into the file that figures are drawn from."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(before | {key: value}), encoding="utf-8")


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
    what = (
        f"{one.name}: {one.configurations} configurations, {one.epochs} epochs, {NODES} nodes; "
        f"load {os.getloadavg()[0]:.1f}"
    )
    report.table(what, heads, rows)


def figures_of(found: dict[str, dict[str, Way]]) -> dict[str, float]:
    """The keys of both trainings, together."""
    hops = [mine["hopping"] for mine in found.values()]
    figures = {
        "hop_share": sum(h.waited_s for h in hops) / sum(h.waited_s + h.trained_s for h in hops),
        "hop_ms": 1000.0 * sum(h.waited_s for h in hops) / sum(h.units for h in hops),
        "bit_equal": float(all(h.bit_equal for h in hops)),
    }
    elastic = [mine["elastic jobs"] for mine in found.values() if "elastic jobs" in mine]
    if elastic:
        sent = sum(way.network_bytes for way in elastic)
        figures["bytes_vs_ddp"] = sum(h.network_bytes for h in hops) / sent
    for name, mine in found.items():
        whole = mine["hopping"].makespan_s
        for way, measured in mine.items():
            if way != "hopping":
                key = way.replace(" ", "_").replace("-", "_")
                figures[f"{name}_makespan_vs_{key}"] = whole / measured.makespan_s
    return figures
