"""A job's losses and their fit, drawn in a terminal and into a PNG file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.text import Text

from controlplane.cli.loss_curve import LossCurve, LossPoint, in_words
from controlplane.cli.timeline_png import new_figure, save
from schemas.errors import BadFieldError

ROWS: Final = 14
LEAST_COLUMNS: Final = 20
STEEP: Final = 100.0  # the largest loss over the smallest, from which on the scale is logarithmic
MARKS: Final = (  # what is drawn later is above
    ("predicted", "○", "cyan"),
    ("fitted", "·", "yellow"),
    ("reported", "●", "green"),
    ("running", "◇", "green"),
)
LABELS: Final = {
    "reported": "loss of each epoch",
    "running": "the epoch that runs, so far",
    "fitted": "curve through them",
    "predicted": "where the curve goes",
}
BATCH: Final[dict[str, Any]] = {"color": "#8cab68", "linewidth": 1.4, "label": "batch size"}
DOTS: Final[dict[str, Any]] = {"color": "#333333", "linestyle": "", "marker": "o", "markersize": 4}
STYLES: Final[dict[str, dict[str, Any]]] = {
    "predicted": {"color": "#4e79a7", "linestyle": "--"},
    "fitted": {"color": "#f28e2b", "linewidth": 2.0},
    "reported": DOTS,
    "running": {**DOTS, "fillstyle": "none"},
}


def loss_terminal(curve: LossCurve, width: int, rows: int = ROWS) -> Text:
    """Losses over epochs as a text, what is said of them above it; only that without any."""
    text = Text("\n".join(in_words(curve)), no_wrap=True, overflow="ellipsis")
    everything = _shown(curve)
    if not everything:
        return text
    labels = [f"{loss:.4g}" for loss in _levels(everything, rows)]
    indent = max(map(len, labels)) + 2
    columns = max(width - indent - 1, LEAST_COLUMNS)
    grid = _grid(curve, everything, columns, rows)
    text.append("\n\n")
    for row, line in enumerate(grid):
        named = row % (rows - 1) == 0 or row == rows // 2
        text.append((labels[row] if named else "").rjust(indent - 2) + " ┤", style="dim")
        for glyph, style in line:
            text.append(glyph, style=style)
        text.append("\n")
    text.append(f"{' ' * (indent - 1)}└{'─' * columns}\n", style="dim")
    last = f"{max(point.epoch for point in everything):.0f}"
    first = f"{' ' * indent}{min(point.epoch for point in everything):.0f}"
    text.append(first + f"epochs {last}".rjust(indent + columns - len(first)) + "\n", style="dim")
    text.append(_legend(curve))
    return text


def loss_png(curve: LossCurve, path: Path) -> None:
    """Draw the same into a file.

    Raises:
        BadFieldError: if there is no loss to draw.
        SettingsError: if matplotlib is not installed, or the file cannot be written.
    """
    everything = _shown(curve)
    if not everything:
        what = f"{curve.job} has reported no loss that could be drawn"
        raise BadFieldError(what, "try again when it has finished an epoch", "loss")
    figure = new_figure(9.0, 4.5)
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 - it is there: the figure is

    axes = figure.add_subplot()
    points = _points(curve)
    if curve.predicted:
        points["predicted"] = (*curve.fitted[-1:], *curve.predicted)  # one line
    for name, style in STYLES.items():
        if drawn := points[name]:
            label = LABELS[name]
            axes.plot([p.epoch for p in drawn], [p.loss for p in drawn], label=label, **style)
    if curve.limit is not None:
        label = "the curve falls no lower"
        axes.axhline(curve.limit, color="#999999", linewidth=0.8, linestyle=":", label=label)
    axes.set_xlabel("epochs")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_ylabel("training loss")
    if _steep(everything):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    title = f"training loss of {curve.job} ({curve.state})"
    axes.spines[["top", "right"]].set_visible(False)
    if curve.batches:  # none before the first epoch has ended
        title += " and its batch size"
        _draw_batches(axes, curve.batches)
    axes.set_title(title, loc="left")
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize="small")
    save(figure, path)


def _draw_batches(axes: Any, batches: Sequence[tuple[float, int]]) -> None:
    from matplotlib.ticker import FixedLocator  # noqa: PLC0415 - it is there: the axes are

    batch = axes.twinx()
    batch.set_ylim(0.0, 1.15 * max(size for _, size in batches))
    batch.step(*zip(*batches, strict=True), where="pre", **BATCH)
    batch.set_ylabel("global batch size", color=BATCH["color"])
    sizes = sorted({size for _, size in batches})
    batch.yaxis.set_major_locator(FixedLocator(sizes, nbins=8))  # those that it had
    batch.tick_params(axis="y", colors=BATCH["color"])
    batch.spines[["top", "right"]].set_visible(False)
    axes.set_zorder(batch.get_zorder() + 1)  # the losses are above
    axes.patch.set_visible(False)


# --- of the text


def _points(curve: LossCurve) -> dict[str, tuple[LossPoint, ...]]:
    running = (curve.running,) if curve.running is not None else ()
    return {
        "reported": curve.reported,
        "running": running,
        "fitted": curve.fitted,
        "predicted": curve.predicted,
    }


def _shown(curve: LossCurve) -> tuple[LossPoint, ...]:
    return tuple(point for points in _points(curve).values() for point in points)


def _steep(points: Sequence[LossPoint]) -> bool:
    least = min(point.loss for point in points)
    return least > 0.0 and max(point.loss for point in points) > STEEP * least


def _levels(points: Sequence[LossPoint], rows: int) -> list[float]:
    """The loss of each row, from the top."""
    low, high = min(point.loss for point in points), max(point.loss for point in points)
    shares = [1.0 - row / (rows - 1) for row in range(rows)]
    if _steep(points):
        return [low * (high / low) ** share for share in shares]
    return [low + (high - low) * share for share in shares]


def _grid(
    curve: LossCurve, everything: Sequence[LossPoint], columns: int, rows: int
) -> list[list[tuple[str, str]]]:
    steep = _steep(everything)

    def height(loss: float) -> float:
        return math.log(loss) if steep else loss

    low, high = (height(pick(p.loss for p in everything)) for pick in (min, max))
    first, last = (pick(p.epoch for p in everything) for pick in (min, max))
    grid, points = [[(" ", "")] * columns for _ in range(rows)], _points(curve)
    for name, glyph, style in MARKS:
        for point in points[name]:
            column = (point.epoch - first) / ((last - first) or 1.0) * (columns - 1)
            row = (high - height(point.loss)) / ((high - low) or 1.0) * (rows - 1)
            grid[round(row)][round(column)] = (glyph, style)
    return grid


def _legend(curve: LossCurve) -> Text:
    legend, glyphs = Text(), {name: (glyph, style) for name, glyph, style in MARKS}
    for name, points in _points(curve).items():
        if points:
            legend.append("   " if legend else "").append(*glyphs[name]).append(f" {LABELS[name]}")
    return legend
