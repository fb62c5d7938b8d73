"""The SLAQ paper's figures, drawn anew: losses, slots, times, decisions and predictions.

`bin/bench slaq_figures --into docs/figures`. Figures 3 to 5 come from simulations of the paper's
setting (`--physics curves`), figure 6 from decisions of the shipped policy in this process; that of
predictions has no counterpart among the paper's, only its "less than 5%".
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Final

import numpy as np

from controlplane.policy.api import ClusterView, EpochSeen, JobView, SlotView
from controlplane.policy.registry import make
from controlplane.prediction.convergence_curves import KEPT_REPORTS, fit_curves
from controlplane.sim import experiment
from controlplane.sim.analysis import loss_plots
from controlplane.sim.analysis.plot_style import COLOURS, new_figure, policy_legend, save, tidy
from controlplane.sim.analysis.results_by_policy import means
from controlplane.sim.models.curves.loss_curves import LossCurve, shipped_curves
from controlplane.sim.run_scenario import simulate
from controlplane.sim.scenario import SLAQ
from controlplane.sim.simulation_result import SimulationResult
from schemas.ids import JobId, NodeId, Seconds, slot_id
from tests.bench import report

AHEAD: Final = 10  # iterations
FIRST: Final = 5  # reports, at least, before anything is predicted
PER_NODE: Final = 32
SIZES: Final = ((1000, 16384), (2000, 16384), (3000, 16384), (4000, 16384))  # jobs, slots
SAMPLES: Final = 1 << 20  # of an iteration

# --- predictions


def errors_by_family(
    curves: Iterable[LossCurve], ahead: int = AHEAD
) -> dict[str, tuple[float, float]]:
    """Mean relative error of a loss so many iterations ahead, of the fits and of the last loss kept.

    After each iteration from the fifth on, from the losses that a policy has seen by then: all but
    the one before the first iteration. Each curve of a family counts as much as any other.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for curve in curves:
        losses = np.array(curve.losses[1:])
        known = list(range(FIRST, len(losses) - ahead + 1))
        if known:
            found.setdefault(curve.family, []).append(_errors(losses, known, ahead))
    return {
        family: (fmean(ours for ours, _ in each), fmean(kept for _, kept in each))
        for family, each in found.items()
    }


def _errors(losses: np.ndarray, known: Sequence[int], ahead: int) -> tuple[float, float]:
    reports = np.full((len(known), KEPT_REPORTS), np.nan)
    positions = np.full((len(known), KEPT_REPORTS), np.nan)
    for row, n in enumerate(known):
        first = max(0, n - KEPT_REPORTS)
        reports[row, : n - first] = losses[first:n]
        positions[row, : n - first] = np.arange(first + 1, n + 1)
    ends = np.array(known, dtype=float)
    predicted = fit_curves(positions, reports).at(ends + ahead)
    truth, last = losses[np.array(known) - 1 + ahead], losses[np.array(known) - 1]
    scale = np.abs(truth)
    return float(np.mean(np.abs(predicted - truth) / scale)), float(
        np.mean(np.abs(last - truth) / scale)
    )


# --- decisions


def decision_s(jobs: int, slots: int, repeats: int = 3) -> float:
    """Median seconds of one decision of `slaq`, all jobs with a new loss since the one before."""
    curves = shipped_curves().curves
    policy, now = make("slaq"), 1000.0
    names = [JobId(f"j-{number}") for number in range(jobs)]
    per_job = slots // jobs
    for number in range(KEPT_REPORTS):
        for place, name in enumerate(names):
            policy.observe(
                _seen(name, curves[place % len(curves)], number + 1, per_job), Seconds(now)
            )
    took = []
    for repeat in range(repeats):
        now, epoch = now + 10.0, KEPT_REPORTS + repeat + 1
        for place, name in enumerate(names):
            policy.observe(_seen(name, curves[place % len(curves)], epoch, per_job), Seconds(now))
        view = _view(names, epoch, per_job, slots)
        began = time.perf_counter()
        policy.plan(view, Seconds(now))
        took.append(time.perf_counter() - began)
    return median(took)


def _seen(name: JobId, curve: LossCurve, epoch: int, slots: int) -> EpochSeen:
    return EpochSeen(
        job=name,
        family=curve.family,
        slots=slots,
        nodes=1,
        global_batch=SAMPLES,
        samples_per_s=SAMPLES * slots / 60.0,
        whole=True,
        epoch=epoch,
        samples_done=epoch * SAMPLES,
        train_loss=curve.losses[min(epoch, curve.iterations)],
    )


def _view(names: Sequence[JobId], epoch: int, per_job: int, slots: int) -> ClusterView:
    """Every job on as many slots as any other, close together."""
    where = [
        (NodeId(f"n{slot // PER_NODE}"), slot_id(NodeId(f"n{slot // PER_NODE}"), slot % PER_NODE))
        for slot in range(slots)
    ]
    jobs = {}
    for place, name in enumerate(names):
        mine = [slot for _, slot in where[place * per_job : (place + 1) * per_job]]
        jobs[name] = JobView(
            job=name,
            submitted_at=Seconds(float(place)),
            batch_size=SAMPLES,
            batch_limit=SAMPLES,
            local_limit=SAMPLES,
            least=1,
            most=128,
            wanted=16,
            family="f",
            running_on=dict.fromkeys(mine, SAMPLES // per_job),
            epoch=epoch,
            epoch_samples=SAMPLES,
            samples_done=epoch * SAMPLES,
        )
    used = per_job * len(names)
    views = tuple(
        SlotView(slot=slot, node=node, kind="cpu", usable=place >= used)
        for place, (node, slot) in enumerate(where)
    )
    return ClusterView(version=epoch, slots=views, jobs=jobs)


# --- pictures


def draw_errors(errors: Mapping[str, tuple[float, float]], path: Path) -> None:
    """A pair of bars for each family: our error ten ahead, and that of the last loss kept."""
    figure = new_figure(7.6, 3.8)
    axes = figure.subplots()
    for aside, which, label, colour, hatch in (
        (-0.2, 0, "fitted curve", COLOURS[1], ""), (0.2, 1, "last loss kept", COLOURS[5], "//"),
    ):  # fmt: skip
        heights = [100.0 * each[which] for each in errors.values()]
        bars = axes.bar(np.arange(len(errors)) + aside, heights, 0.37, label=label, color=colour,
                        hatch=hatch, alpha=0.9)  # fmt: skip
        axes.bar_label(bars, fmt="%.2g", fontsize="x-small", padding=2)
    axes.axhline(5.0, color="black", linewidth=0.8, linestyle=":", label="5%, the paper's bound")
    axes.set_xticks(range(len(errors)), list(errors), rotation=25, ha="right", fontsize="small")
    axes.set_ylabel(f"error {AHEAD} iterations ahead (%)")
    axes.margins(y=0.12)
    tidy(axes)
    policy_legend(figure, axes, 3)
    save(figure, path)


def draw_decisions(took_s: Mapping[tuple[int, int], float], path: Path) -> None:
    """Seconds of a decision over the number of jobs (SLAQ figure 6)."""
    figure = new_figure(6.0, 3.4)
    axes = figure.subplots()
    jobs = [count for count, _ in took_s]
    axes.plot(jobs, list(took_s.values()), marker="o", color=COLOURS[1], linewidth=1.6)
    for count, seconds in zip(jobs, took_s.values(), strict=True):
        axes.annotate(f"{seconds:.2f}", (count, seconds), (0, 7), textcoords="offset points",
                      ha="center", fontsize="small")  # fmt: skip
    axes.set_xlabel(f"jobs on {next(iter(took_s))[1]} slots")
    axes.set_ylabel("time of a full decision (s)")
    axes.set_xticks(jobs)
    axes.set_ylim(0.0, 1.2 * max(took_s.values()))
    tidy(axes)
    save(figure, path)


def simulated(seeds: Sequence[int], kept: Path | None, processes: int) -> list[SimulationResult]:
    """`fair` and `slaq` in the paper's setting."""
    cells = experiment.grid([("fair", {}), ("slaq", {})], [SLAQ], list(seeds))
    with experiment.bar() as progress:
        return experiment.run(cells, _simulate, kept, processes, progress)


def _simulate(cell: experiment.Cell) -> SimulationResult:
    return simulate(cell.policy, cell.scenario, cell.seed, cell.options)


def main() -> None:
    """Simulate, measure, draw, print."""
    parser = argparse.ArgumentParser(prog="bin/bench slaq_figures", description=__doc__)
    parser.add_argument("--into", type=Path, required=True, help="folder for the figures")
    parser.add_argument("--seeds", type=int, default=3, help="simulations of each policy")
    parser.add_argument("--results", type=Path, help="keeps simulations, to go on after Ctrl-C")
    chosen = parser.parse_args()
    into: Path = chosen.into
    into.mkdir(parents=True, exist_ok=True)

    errors = errors_by_family(shipped_curves().curves)
    draw_errors(errors, into / "slaq-errors.png")
    rows = [[family, 100.0 * ours, 100.0 * kept] for family, (ours, kept) in errors.items()]
    report.table("mean error ten iterations ahead, %", ("algorithm", "fit", "last loss"), rows)

    took_s = {(jobs, slots): decision_s(jobs, slots) for jobs, slots in SIZES}
    draw_decisions(took_s, into / "slaq-decisions.png")
    sizes = [[f"{jobs} jobs, {slots} slots", took] for (jobs, slots), took in took_s.items()]
    report.table("a full decision of `slaq`, s", ("", "median"), sizes)

    results = simulated(range(chosen.seeds), chosen.results, os.cpu_count() or 1)
    loss_plots.normalised_loss(results, into / "slaq-losses.png")
    loss_plots.slots_by_loss(results, into / "slaq-slots.png")
    loss_plots.times_to_reductions(results, into / "slaq-times.png")
    names = ("mean_loss", "t90_s", "t95_s", "loss_area_s", "cores_high", "cores_low",
             "avg_jct_s", "p99_jct_s", "makespan_s")  # fmt: skip
    both = {
        policy: means([result for result in results if result.policy == policy])
        for policy in ("fair", "slaq")
    }
    lines = [[policy, *(found[name] for name in names)] for policy, found in both.items()]
    report.table(f"160 jobs on 640 cores, means over {chosen.seeds} seeds", ("", *names), lines)


if __name__ == "__main__":
    main()
