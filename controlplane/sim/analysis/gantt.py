"""Figures of slots over time: which job held which slot, and how many slots were busy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from controlplane.sim.analysis.plot_style import (
    GRID,
    caption,
    grouped,
    new_figure,
    policy_legend,
    save,
    styles,
    tidy,
    time_unit,
)
from controlplane.sim.cluster import ResultsError
from controlplane.sim.results import JobResult, SimulationResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Neighbours in this order are easy to tell apart, also for the colour-blind (after P. Tol).
SHADES: Final = (
    "#332288",
    "#ddcc77",
    "#117733",
    "#cc6677",
    "#88ccee",
    "#882255",
    "#44aa99",
    "#eebb44",
    "#4477aa",
    "#aa4499",
    "#bbcc33",
    "#994455",
)
IDLE: Final = "#f3f3f3"
MAX_LABELLED_ROWS: Final = 48  # up to this many rows get labels
LETTER_WIDTH: Final = 0.0075  # width of a letter in a bar, as a share of the axis
DARK_LUMA: Final = 140.0  # luma below which white text is easier to read


def gantt(result: SimulationResult, path: Path) -> None:
    """Draw which job held which slot when: a row per slot, a colour per job.

    Raises:
        ResultsError: if the allocations were not recorded, or the file cannot be written.
    """
    jobs = [job for job in result.jobs if job.allocations]
    rows = {slot: row for row, slot in enumerate(_slots(jobs))}
    _require_allocations(rows)
    unit, name = time_unit(result.ended_at)
    named = len(rows) <= MAX_LABELLED_ROWS
    figure = new_figure(12.0, min(max(1.4 + 0.24 * len(rows), 2.6), 11.0))
    axes = figure.add_subplot()
    end = max(allocation.until for job in jobs for allocation in job.allocations) / unit
    axes.set_xlim(0.0, end)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_facecolor(IDLE)
    _draw_bars(axes, jobs, rows, unit, half=0.42 if named else 0.5)
    if named:
        _draw_names(axes, jobs, rows, unit, end)
        axes.set_yticks(range(len(rows)), list(rows))
    else:
        axes.set_ylabel("slots")
    for row in _first_rows(list(rows))[1:]:
        axes.axhline(row - 0.5, color="#808080", linewidth=0.6)
    axes.set_xlabel(name)
    title = f"which of {len(result.jobs)} jobs had which of {result.slots} slots; grey: free"
    axes.set_title(f"{result.policy}: {title}", loc="left", fontsize="medium")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def utilisation(results: Sequence[SimulationResult], path: Path) -> None:
    """Draw the mean share of slots that jobs held over time, one curve for each policy.

    Raises:
        ResultsError: if the allocations were not recorded, or the file cannot be written.
    """
    groups = grouped(results)
    look = styles(list(groups))
    longest = max(result.ended_at for result in results)
    unit, name = time_unit(longest)
    edges = np.linspace(0.0, max(longest, 1e-9), 201)
    figure = new_figure(9.0, 3.4)
    axes = figure.add_subplot()
    for label, group in groups.items():
        share = np.mean([busy_share(result, edges) for result in group], axis=0)
        style = look[label]
        axes.stairs(
            100.0 * share,
            edges / unit,
            label=label,
            color=style.colour,
            linestyle=style.dash,
            linewidth=1.5,
            baseline=None,
        )
    axes.set_ylim(0.0, 104.0)
    axes.set_xlim(0.0, edges[-1] / unit)
    axes.set_ylabel("slots held (%)")
    axes.set_xlabel(name)
    tidy(axes, along="both")
    caption(figure, "share of the slots that jobs held, mean over short intervals")
    policy_legend(figure, axes, len(groups))
    save(figure, path)


def busy_share(result: SimulationResult, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of the cluster's slot seconds that jobs held in each interval.

    Args:
        edges: of the intervals, shape (N + 1,), seconds, increasing.

    Returns:
        Shape (N,), in [0, 1].

    Raises:
        ResultsError: if the allocations were not recorded.
    """
    allocations = [allocation for job in result.jobs for allocation in job.allocations]
    _require_allocations(allocations)
    held = np.zeros(len(edges))
    for allocation in allocations:  # slot seconds held up to each edge
        held += np.clip(edges, allocation.since, allocation.until) - allocation.since
    return np.diff(held) / (np.diff(edges) * result.slots)


def _require_allocations(recorded: object) -> None:
    if not recorded:
        problem = "the result has no allocations of slots"
        raise ResultsError(problem, "repeat the simulation and record allocations")


def _slots(jobs: Sequence[JobResult]) -> list[str]:
    """Sort slots by node and index; numbers in names compare as numbers."""
    found = {allocation.slot for job in jobs for allocation in job.allocations}
    return sorted(found, key=lambda slot: [(len(p), p) for p in re.findall(r"\d+|\D+", slot)])


def _first_rows(slots: Sequence[str]) -> list[int]:
    nodes = [slot.rpartition("/")[0] for slot in slots]
    return [row for row, node in enumerate(nodes) if row == 0 or nodes[row - 1] != node]


def _draw_bars(
    axes: Axes, jobs: Sequence[JobResult], rows: dict[str, int], unit: float, half: float
) -> None:
    from matplotlib.collections import PolyCollection  # noqa: PLC0415 - not always there

    for index, job in enumerate(jobs):
        boxes = []
        for allocation in job.allocations:
            left, right, row = (
                allocation.since / unit,
                allocation.until / unit,
                rows[allocation.slot],
            )
            low, high = row - half, row + half
            boxes.append([(left, low), (right, low), (right, high), (left, high)])
        axes.add_collection(
            PolyCollection(boxes, facecolors=_shade(index), edgecolors=GRID, linewidths=0.2)
        )


def _draw_names(
    axes: Axes, jobs: Sequence[JobResult], rows: dict[str, int], unit: float, end: float
) -> None:
    """Write a job's name into its bars that are wide enough, once per vertical run of bars."""
    for index, job in enumerate(jobs):
        ink = "white" if _luma(_shade(index)) < DARK_LUMA else "black"
        wide = [
            s
            for s in job.allocations
            if (s.until - s.since) / unit > end * LETTER_WIDTH * (len(job.job) + 1)
        ]
        for allocation in wide:
            above = [s for s in wide if rows[s.slot] == rows[allocation.slot] - 1]
            if not any(s.since < allocation.until and allocation.since < s.until for s in above):
                left = allocation.since / unit + end * LETTER_WIDTH / 2.0
                axes.text(
                    left,
                    rows[allocation.slot],
                    job.job,
                    color=ink,
                    fontsize="x-small",
                    va="center",
                    clip_on=True,
                )


def _shade(index: int) -> str:
    return SHADES[index % len(SHADES)]


def _luma(colour: str) -> float:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue
