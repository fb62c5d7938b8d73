"""The learning curve of a training: as a table, and as a picture."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from controlplane.sim.analysis.plot_style import COLOURS, new_figure, save, tidy

Row = dict[str, float | str]  # of one iteration; a number that was not measured in it is NaN
DOTS: Final = 40  # a line of no more points than this shows them


def as_csv(rows: Sequence[Row]) -> str:
    """The rows as CSV, an iteration on each line, counted from 1; a NaN is an empty cell.

    Args:
        rows: of the iterations, all with the same columns.
    """
    columns = list(rows[0]) if rows else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("iteration", *columns))
    for place, row in enumerate(rows, 1):
        writer.writerow((place, *(_cell(row[column]) for column in columns)))
    return text.getvalue()


def draw_curve(rows: Sequence[Row], path: Path, title: str) -> None:
    """Every column of numbers over the iterations, one below the other.

    Args:
        rows: of the iterations; a column of texts names phases, whose changes are marked.
        path: of the figure; its suffix says the format.

    Raises:
        ResultsError: if matplotlib is missing, or the file cannot be written.
    """
    first = rows[0] if rows else {}
    columns = [name for name, value in first.items() if not isinstance(value, str)]
    phases = [name for name, value in first.items() if isinstance(value, str)]
    figure = new_figure(7.2, 0.6 + 1.6 * max(1, len(columns)))
    panels = figure.subplots(max(1, len(columns)), 1, sharex=True, squeeze=False)[:, 0]
    for place, (axes, column) in enumerate(zip(panels, columns, strict=False)):
        points = [(at, float(row[column])) for at, row in enumerate(rows, 1)]
        seen = [(at, value) for at, value in points if not math.isnan(value)]
        axes.plot(
            [at for at, _ in seen],
            [value for _, value in seen],
            color=COLOURS[place % len(COLOURS)],
            linewidth=1.3,
            marker="o" if len(seen) <= DOTS else "",
            markersize=3,
        )
        axes.set_ylabel(column.replace("_", " "), fontsize="small")
        for phase in phases:
            for at in range(1, len(rows)):
                if rows[at][phase] != rows[at - 1][phase]:
                    axes.axvline(at + 0.5, color="#4d4d4d", linewidth=0.8, linestyle=":")
        tidy(axes)
    panels[-1].set_xlabel("iteration")
    figure.suptitle(title, fontsize="medium")
    save(figure, path)


def _cell(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return "" if math.isnan(value) else f"{value:.6g}"
