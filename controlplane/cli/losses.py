"""Losses of a job, the curve fitted to them and its forecast, as values, text and PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from rich.text import Text

from controlplane.prediction.convergence_curves import MAX_REPORTS, Form, job_curve
from controlplane.sim.analysis.plot_style import new_figure, save
from schemas.errors import BadFieldError
from schemas.ids import JobId
from schemas.jobs import ENDED
from schemas.wire.client import EpochInfo, JobDetail

MIN_FORECAST_EPOCHS: Final = 10
FIT_POINTS: Final = 200
FORMS: Final = {Form.SUBLINEAR: "sublinear", Form.EXPONENTIAL: "exponential"}
SHAPES: Final = {  # descriptions of the forms of curves
    "sublinear": "falls ever more slowly",
    "exponential": "falls by the same share in each epoch",
}


class LossPoint(msgspec.Struct, frozen=True):
    """Loss at one point of the training."""

    epoch: float  # number of finished epochs
    loss: float


class LossCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Reported losses of one job and the curve fitted to them."""

    job: JobId
    state: str
    reported: tuple[LossPoint, ...]  # at the ends of epochs; finite losses only
    left_out: int  # number of losses that are not finite
    running: LossPoint | None  # mean of the running epoch, in the middle of its trained part
    batches: tuple[tuple[int, int], ...] = ()  # (epoch, global batch at its end)
    form: str = ""  # sublinear or exponential; empty without a curve
    reason: str = ""  # why there is no curve
    error: float | None = None  # root mean square of weighted residuals, in units of the loss
    limit: float | None = None  # lower bound of the curve
    fitted: tuple[LossPoint, ...] = ()  # along the losses to which the curve was fitted
    predicted: tuple[LossPoint, ...] = ()  # one for each forecast epoch; empty after the job's end


def loss_curve(detail: JobDetail) -> LossCurve:
    """Return the losses of a job and a curve fitted to them, for any policy.

    The curve is fitted as in policy `slaq` (SLAQ section 2), but only to losses at ends of epochs.
    """
    known = {e.epoch: e.train_loss for e in detail.epochs if e.train_loss is not None}
    finite = {epoch: loss for epoch, loss in sorted(known.items()) if math.isfinite(loss)}
    reported = tuple(LossPoint(float(epoch), loss) for epoch, loss in finite.items())
    curve = LossCurve(
        job=detail.summary.job,
        state=detail.summary.state,
        reported=reported,
        left_out=len(known) - len(reported),
        running=_running(detail),
        batches=tuple((e.epoch, e.global_batch) for e in detail.epochs),
    )
    return msgspec.structs.replace(curve, **_fit(reported, _forecast_epochs(detail)))


def describe_curve(curve: LossCurve) -> list[str]:
    """Return lines of text about the reported losses, the fitted curve and the forecast."""
    lines = [f"{curve.job}  {curve.state}"]
    if curve.reported:
        last, lowest = curve.reported[-1], min(point.loss for point in curve.reported)
        lines.append(
            f"  loss       {last.loss:.4g} after epoch {last.epoch:.0f}, lowest {lowest:.4g}"
        )
    if curve.running is not None:
        epoch = math.floor(curve.running.epoch) + 1
        lines.append(f"  now        {curve.running.loss:.4g}, mean of epoch {epoch} so far")
    if curve.left_out:
        none = "1 loss that is not finite"
        many = none if curve.left_out == 1 else f"{curve.left_out} losses that are not finite"
        lines.append(f"  left out   {many}")
    if not curve.form:
        return [*lines, f"  curve      none: {curve.reason}"]
    used = min(len(curve.reported), MAX_REPORTS)
    lines.append(
        f"  curve      {SHAPES[curve.form]}, never below {curve.limit:.4g}; fitted to the last "
        f"{used} losses, off by {curve.error:.2g} (root mean square)"
    )
    if curve.predicted:
        next_one, far = curve.predicted[0], curve.predicted[-1]
        text = f"{next_one.loss:.4g} after epoch {next_one.epoch:.0f}"
        if far is not next_one:
            text += f", {far.loss:.4g} after epoch {far.epoch:.0f}"
        lines.append(f"  predicted  {text}")
    return lines


def _fit(reported: Sequence[LossPoint], ahead: int) -> dict[str, object]:
    """Return the fields of `LossCurve` that describe the fitted curve, or only `reason`."""
    positions, losses = [p.epoch for p in reported], [p.loss for p in reported]
    curves = job_curve(positions, losses)
    form = Form(int(curves.forms[0]))
    if form is Form.FLAT:
        return {"reason": "the losses do not fall"}
    if form not in FORMS:
        count = len(reported) or "none"
        return {"reason": f"a curve needs 3 losses, the job has reported {count}"}

    def points(epochs: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[LossPoint, ...]:
        along = curves.at(epochs[None, :])[0]
        return tuple(
            LossPoint(float(at), float(loss)) for at, loss in zip(epochs, along, strict=True)
        )

    first, last = positions[-MAX_REPORTS:][0], positions[-1]
    return {
        "form": FORMS[form],
        "error": float(curves.error[0]),
        "limit": float(curves.limit[0]),
        "fitted": points(np.linspace(first, last, FIT_POINTS)),
        "predicted": points(last + np.arange(1.0, ahead + 1.0)) if ahead else (),
    }


def _forecast_epochs(detail: JobDetail) -> int:
    """Return how many epochs to forecast: as many as reported, at least 10, up to the stop."""
    if detail.summary.state in ENDED:
        return 0
    seen = detail.summary.epoch
    ahead, stop = max(MIN_FORECAST_EPOCHS, len(detail.epochs)), detail.spec.stop
    return ahead if stop is None or stop.epochs is None else max(0, min(ahead, stop.epochs - seen))


def _running(detail: JobDetail) -> LossPoint | None:
    """Return the mean loss of the running epoch, or None before telemetry of this epoch arrives."""
    loss = detail.summary.train_loss
    last: EpochInfo | None = detail.epochs[-1] if detail.epochs else None
    if loss is None or not math.isfinite(loss) or detail.summary.state in ENDED:
        return None
    if last is None:
        return LossPoint(0.5, loss)
    done = detail.samples_done - last.samples_done
    if done <= 0 or not last.samples_done or not last.epoch_samples:
        return None
    return LossPoint(last.epoch + min(done / last.epoch_samples, 1.0) / 2, loss)


ROWS: Final = 14
MIN_COLUMNS: Final = 20
LOG_SCALE_RATIO: Final = 100.0  # ratio of losses above which the scale is logarithmic
MARKS: Final = (  # in drawing order: later marks cover earlier ones
    ("predicted", "○", "cyan"),
    ("fitted", "·", "yellow"),
    ("reported", "●", "green"),
    ("running", "◇", "green"),
)
LABELS: Final = {
    "reported": "loss of each epoch",
    "running": "running epoch so far",
    "fitted": "fitted curve",
    "predicted": "predicted by the curve",
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
    """Return a text plot of losses over epochs, below a description of the curve."""
    text = Text("\n".join(describe_curve(curve)), no_wrap=True, overflow="ellipsis")
    everything = _shown(curve)
    if not everything:
        return text
    labels = [f"{loss:.4g}" for loss in _levels(everything, rows)]
    indent = max(map(len, labels)) + 2
    columns = max(width - indent - 1, MIN_COLUMNS)
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
    """Draw losses over epochs into a PNG file."""
    everything = _shown(curve)
    if not everything:
        problem = f"{curve.job} has reported no finite loss"
        raise BadFieldError(problem, "try again after its first epoch", "loss")
    figure = new_figure(9.0, 4.5)
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 - matplotlib made the figure

    axes = figure.add_subplot()
    points = _points(curve)
    if curve.predicted:
        points["predicted"] = (*curve.fitted[-1:], *curve.predicted)  # joined to the fitted curve
    for name, style in STYLES.items():
        if drawn := points[name]:
            label = LABELS[name]
            axes.plot([p.epoch for p in drawn], [p.loss for p in drawn], label=label, **style)
    if curve.limit is not None:
        label = "lower bound of the curve"
        axes.axhline(curve.limit, color="#999999", linewidth=0.8, linestyle=":", label=label)
    axes.set_xlabel("epochs")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_ylabel("training loss")
    if _log_scale(everything):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    title = f"training loss of {curve.job} ({curve.state})"
    axes.spines[["top", "right"]].set_visible(False)
    if curve.batches:  # empty before the first epoch has ended
        title += " and its batch size"
        _draw_batches(axes, curve.batches)
    axes.set_title(title, loc="left")
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize="small")
    save(figure, path, ".png")


def _draw_batches(axes: Any, batches: Sequence[tuple[float, int]]) -> None:
    from matplotlib.ticker import FixedLocator  # noqa: PLC0415 - matplotlib made the axes

    batch = axes.twinx()
    batch.set_ylim(0.0, 1.15 * max(size for _, size in batches))
    batch.step(*zip(*batches, strict=True), where="pre", **BATCH)
    batch.set_ylabel("global batch size", color=BATCH["color"])
    sizes = sorted({size for _, size in batches})
    batch.yaxis.set_major_locator(FixedLocator(sizes, nbins=8))  # batch sizes that occurred
    batch.tick_params(axis="y", colors=BATCH["color"])
    batch.spines[["top", "right"]].set_visible(False)
    axes.set_zorder(batch.get_zorder() + 1)  # losses are drawn on top of batch sizes
    axes.patch.set_visible(False)


# --- parts of the text


def _points(curve: LossCurve) -> dict[str, tuple[LossPoint, ...]]:
    running = (curve.running,) if curve.running is not None else ()
    return {
        "reported": curve.reported, "running": running, "fitted": curve.fitted,
        "predicted": curve.predicted,
    }  # fmt: skip


def _shown(curve: LossCurve) -> tuple[LossPoint, ...]:
    return tuple(point for points in _points(curve).values() for point in points)


def _log_scale(points: Sequence[LossPoint]) -> bool:
    least = min(point.loss for point in points)
    return least > 0.0 and max(point.loss for point in points) > LOG_SCALE_RATIO * least


def _levels(points: Sequence[LossPoint], rows: int) -> list[float]:
    low, high = min(point.loss for point in points), max(point.loss for point in points)
    shares = [1.0 - row / (rows - 1) for row in range(rows)]
    if _log_scale(points):
        return [low * (high / low) ** share for share in shares]
    return [low + (high - low) * share for share in shares]


def _grid(
    curve: LossCurve, everything: Sequence[LossPoint], columns: int, rows: int
) -> list[list[tuple[str, str]]]:
    height = math.log if _log_scale(everything) else float
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
