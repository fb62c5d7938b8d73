"""Slots over time as bars in a PNG file."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

from controlplane.cli.timeline_allocations import (
    Allocation,
    Window,
    clipped,
    colour_indices,
    full_window,
    job_colour,
)
from schemas.errors import SettingsError
from schemas.ids import JobId, NodeId, SlotId, node_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IDLE: Final = "#f3f3f3"
NODE_LINE: Final = "#b0b0b0"
LETTER: Final = 0.008  # the width of one in a bar, as a share of the axis
MANY_SLOTS: Final = 48  # rows that can each have a name
LEGEND_ROWS: Final = 30
LEGEND_MOST: Final = 2 * LEGEND_ROWS - 2  # jobs


def png(
    allocations: Sequence[Allocation],
    slots: Sequence[SlotId],
    path: Path,
    title: str,
    *,
    window: Window | None = None,
) -> None:
    """Draw who had which slot into a file, however many slots there are.

    Args:
        allocations: who had which slot.
        slots: the rows, from the top.
        path: of the file.
        title: above the bars.
        window: what the axis spans; default: all allocations.

    Raises:
        SettingsError: if matplotlib is not installed, or the file cannot be written.
    """
    window = window or full_window(allocations)
    jobs = colour_indices(allocations)
    height = min(max(1.6 + 0.3 * len(slots), 2.5), 12.0)
    figure = new_figure(13.0, height)
    axes = figure.add_subplot()
    _draw_bars(axes, clipped(allocations, window), slots, jobs, window)
    if len(slots) <= MANY_SLOTS:
        _draw_names(axes, clipped(allocations, window), slots, jobs, window)
    _draw_frame(axes, slots, window)
    _draw_legend(axes, jobs)
    axes.set_title(title, loc="left")
    save(figure, path)


def new_figure(width: float, height: float) -> Figure:
    """An empty picture.

    Args:
        width: inches.
        height: inches.

    Raises:
        SettingsError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - seldom needed, not always there
    except ImportError:
        hint = "in a checkout of ONES: pip install '.[sim]'"
        raise SettingsError("a PNG needs matplotlib", hint) from None
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Write a picture into a file.

    Args:
        figure: the picture.
        path: of the file.

    Raises:
        SettingsError: if it cannot be written.
    """
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}", "choose another file") from None


def _draw_bars(
    axes: Axes,
    allocations: Iterable[Allocation],
    slots: Sequence[SlotId],
    jobs: Mapping[JobId, int],
    window: Window,
) -> None:
    from matplotlib.collections import PolyCollection  # noqa: PLC0415

    rows = {slot: row for row, slot in enumerate(slots)}
    half = 0.4 if len(slots) <= MANY_SLOTS else 0.5
    boxes: defaultdict[JobId, list[list[tuple[float, float]]]] = defaultdict(list)
    for allocation in allocations:
        if allocation.slot not in rows:
            continue
        left, right, row = (
            allocation.begin - window.begin,
            allocation.end - window.begin,
            rows[allocation.slot],
        )
        low, high = row - half, row + half
        boxes[allocation.job].append([(left, low), (right, low), (right, high), (left, high)])
    for job, index in jobs.items():
        axes.add_collection(PolyCollection(boxes[job], facecolors=job_colour(index), linewidths=0))


def _draw_names(
    axes: Axes,
    allocations: Sequence[Allocation],
    slots: Sequence[SlotId],
    jobs: Mapping[JobId, int],
    window: Window,
) -> None:
    """A job's name in its bars that are wide enough, once where they are below each other."""
    row_of = {slot: row for row, slot in enumerate(slots)}
    named: defaultdict[tuple[int, JobId], list[Allocation]] = defaultdict(list)
    for allocation in allocations:
        if allocation.end - allocation.begin > window.length * LETTER * (len(allocation.job) + 1):
            named[row_of.get(allocation.slot, -1), allocation.job].append(allocation)
    for (row, job), here in named.items():
        above = named.get((row - 1, job), []) if row > 0 else []
        ink = "white" if is_dark(job_colour(jobs[job])) else "black"
        for allocation in here:
            if row >= 0 and not any(
                a.begin < allocation.end and allocation.begin < a.end for a in above
            ):
                left = allocation.begin - window.begin + window.length * LETTER / 2
                axes.text(left, row, job, color=ink, fontsize="small", va="center", clip_on=True)


def is_dark(colour: str) -> bool:
    """Whether white is easier to read on `colour` (#rrggbb) than black."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140  # noqa: PLR2004 - by eye


def _draw_frame(axes: Axes, slots: Sequence[SlotId], window: Window) -> None:
    """Axes, the names of rows, and a line between nodes."""
    axes.set_xlim(0.0, window.length)
    axes.set_ylim(max(len(slots), 1) - 0.5, -0.5)
    axes.set_xlabel("seconds")
    axes.set_facecolor(IDLE)
    nodes = {node: list(rows) for node, rows in groupby(range(len(slots)), _node_of_row(slots))}
    for rows in list(nodes.values())[1:]:
        axes.axhline(rows[0] - 0.5, color=NODE_LINE, linewidth=0.5, zorder=0.5)
    if len(slots) <= MANY_SLOTS:
        axes.set_yticks(range(len(slots)), slots)
    else:
        named = list(nodes.items())[:: math.ceil(len(nodes) / MANY_SLOTS)]
        axes.set_yticks(
            [(rows[0] + rows[-1]) / 2 for _, rows in named], [name for name, _ in named]
        )
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def _node_of_row(slots: Sequence[SlotId]) -> Callable[[int], NodeId]:
    return lambda row: node_of(slots[row])


def _draw_legend(axes: Axes, jobs: Mapping[JobId, int]) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415

    shown = list(jobs.items())[:LEGEND_MOST]
    handles = [Patch(color=job_colour(index), label=job) for job, index in shown]
    if len(jobs) > len(shown):
        handles.append(Patch(alpha=0.0, label=f"and {len(jobs) - len(shown)} more"))
    handles.append(Patch(facecolor=IDLE, edgecolor=NODE_LINE, linewidth=0.5, label="idle"))
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        ncols=math.ceil(len(handles) / LEGEND_ROWS),
        fontsize="small",
        frameon=False,
        borderaxespad=0.0,
    )
