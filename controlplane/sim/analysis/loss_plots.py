"""Figures of falling losses after the SLAQ paper, for simulations of jobs that have losses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from scipy.ndimage import uniform_filter1d

from controlplane.sim.analysis.loss_series import (
    GRID_S,
    GROUPS,
    FloatArray,
    LossSeries,
    loss_series,
    mean_time_to,
)
from controlplane.sim.analysis.plot_style import (
    DASHES,
    HATCHES,
    caption,
    grouped,
    new_figure,
    policy_legend,
    save,
    styles,
    tidy,
)
from controlplane.sim.analysis.summary import finished
from controlplane.sim.results import SimulationResult

REDUCTIONS: Final = (0.25, 0.50, 0.75, 0.80, 0.90, 0.95, 0.99)
GROUP_COLOURS: Final = ("#d55e00", "#e69f00", "#56b4e9")
GROUP_HATCHES: Final = ("//", "..", "")
SMOOTHING_WINDOW_S: Final = 15.0  # window of the running mean of slot shares


def normalised_loss(results: Sequence[SimulationResult], path: Path) -> None:
    """Draw the mean normalised loss of active jobs within the window (SLAQ figure 4).

    Curves show the first seed; the legend has means over all seeds.

    Raises:
        ResultsError: if there is nothing to draw, or the file cannot be written.
    """
    groups = grouped(results)
    look = styles(list(groups))
    figure = new_figure(7.6, 3.6)
    axes = figure.subplots()
    for place, (label, group) in enumerate(groups.items()):
        series, inside = _window(group[0])
        mean = np.mean([np.nanmean(s.mean_loss[i]) for s, i in map(_window, group)])
        jct_s = np.mean([job.jct_s or 0.0 for result in group for job in finished(result)])
        axes.plot(
            series.times_s[inside],
            series.mean_loss[inside],
            label=f"{label}: mean {mean:.3f}, completion {jct_s:.0f} s",
            color=look[label].colour,
            linestyle=DASHES[place % len(DASHES)],
            linewidth=1.5,
        )
    axes.set_xlabel("time since the first submission (s)")
    axes.set_ylabel("normalised loss, mean of active jobs")
    axes.set_ylim(bottom=0.0)
    tidy(axes)
    caption(figure, "how far jobs are from their lowest loss: 1 at first, 0 at the end")
    policy_legend(figure, axes, min(len(groups), 2))
    save(figure, path)


def slots_by_loss(results: Sequence[SimulationResult], path: Path) -> None:
    """Draw slot shares of jobs with high, medium and low losses, first seed (SLAQ figure 3).

    Raises:
        ResultsError: if there is nothing to draw, or the file cannot be written.
    """
    groups = grouped(results)
    figure = new_figure(0.6 + 4.2 * len(groups), 3.6)
    panels = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    shares = ("highest 25%", "next 25%", "lowest 50%")
    for axes, (label, group) in zip(panels, groups.items(), strict=True):
        series, inside = _window(group[0])
        smooth = 100.0 * np.array([_smoothed(column) for column in series.cores[inside].T])
        stacks = axes.stackplot(
            series.times_s[inside], *smooth, labels=shares, colors=GROUP_COLOURS, alpha=0.9
        )
        for stack, hatch in zip(stacks, GROUP_HATCHES, strict=True):
            stack.set(hatch=hatch, edgecolor="white", linewidth=0.3)
        means = [np.mean([np.nanmean(s.cores[i, g]) for s, i in map(_window, group)])
                 for g in range(len(GROUPS))]  # fmt: skip
        mean_shares = " / ".join(f"{mean:.0%}" for mean in means)
        axes.set_title(f"{label}: {mean_shares}", fontsize="medium")
        axes.set_xlabel("time since the first submission (s)")
        axes.set_ylim(0.0, 100.0)
        axes.margins(x=0.0)
        tidy(axes)
    panels[0].set_ylabel("share of the slots in use (%)")
    caption(figure, "slots of the jobs with high, medium and low losses; titles: their mean shares")
    policy_legend(figure, panels[0], len(GROUPS))
    save(figure, path)


def times_to_reductions(results: Sequence[SimulationResult], path: Path) -> None:
    """Draw the mean time from submission to given loss reductions, over all seeds (SLAQ figure 5).

    Raises:
        ResultsError: if there is nothing to draw, or the file cannot be written.
    """
    groups = grouped(results)
    look = styles(list(groups))
    figure = new_figure(7.6, 3.8)
    axes = figure.subplots()
    width = 0.8 / len(groups)
    for place, (label, group) in enumerate(groups.items()):
        aside = (place - (len(groups) - 1) / 2.0) * width
        heights = [_mean_time(group, reduction) for reduction in REDUCTIONS]
        bars = axes.bar(
            np.arange(len(REDUCTIONS)) + aside,
            heights,
            width * 0.92,
            label=label,
            color=look[label].colour,
            hatch=HATCHES[place % len(HATCHES)],
            alpha=0.9,
        )
        axes.bar_label(bars, fmt="%.0f", fontsize="small", padding=2)
    axes.set_xticks(range(len(REDUCTIONS)), [f"{100 * reduction:.0f}" for reduction in REDUCTIONS])
    axes.set_xlabel("loss reduction (%)")
    axes.set_ylabel("mean time since submission (s)")
    axes.margins(y=0.1)
    tidy(axes)
    caption(figure, "how long jobs take to so much of the fall of their loss; lower is better")
    policy_legend(figure, axes, len(groups))
    save(figure, path)


def _window(result: SimulationResult) -> tuple[LossSeries, np.ndarray]:
    """Return the series of a result, and a mask of its moments inside the window."""
    series = loss_series(result)
    first, last = series.window_s
    return series, (series.times_s >= first) & (series.times_s < last)


def _mean_time(results: Sequence[SimulationResult], reduction: float) -> float:
    """Return the mean over results; a result where no job reached the reduction counts as 0."""
    return float(np.mean([mean_time_to(result, reduction) or 0.0 for result in results]))


def _smoothed(values: FloatArray) -> FloatArray:
    """Return the running mean with continued ends; 0 where no slot is in use."""
    wide = max(1, round(SMOOTHING_WINDOW_S / GRID_S))
    smooth: FloatArray = uniform_filter1d(np.nan_to_num(values), wide, mode="nearest")
    return smooth
