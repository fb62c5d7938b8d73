"""`ones sweep plot`: learning curves of all trials in a PNG file."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from controlplane.cli.output import COMMON, Common, Exit, JobName, print_data
from controlplane.client import BlockingClient
from controlplane.client.sweeps.sweep import format_value
from controlplane.client.sweeps.tables import best_of, ranked
from controlplane.sim.analysis.plot_style import new_figure, save
from schemas.errors import BadFieldError
from schemas.wire.client import SweepDetail, TrialInfo

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMED_TRIALS: Final = 8  # trials with their own colour and legend entry
COLOURS: Final = (
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#b07aa1", "#edc948", "#9c755f"
)  # fmt: skip
OTHER_COLOUR: Final = "#c8c8c8"


def plot(
    job: JobName,
    /,
    *,
    png: Annotated[Path, Parameter(help="file to write")],
    metric: Annotated[
        str | None, Parameter(help="metric to draw (default: that of the search)")
    ] = None,
    time_: Annotated[
        bool, Parameter(name="--time", help="draw over time instead of epochs")
    ] = False,
    common: Common = COMMON,
) -> int:
    """Draw the learning curves of all trials of sweep JOB."""
    with BlockingClient(common.home) as client:
        detail = client.sweep(job)
    draw(detail, png, metric or detail.spec.search.metric, over_time=time_)
    if common.output in {"json", "jsonl"}:
        print_data({"job": job, "file": str(png)}, common.output)
    elif common.output == "table":
        sys.stdout.write(f"{png}\n")
    return Exit.OK


def draw(detail: SweepDetail, path: Path, metric: str, *, over_time: bool = False) -> None:
    """Draw learning curves over epochs, or over the time since submission, into a PNG file.

    Raises:
        BadFieldError: if no trial has reported the metric.
        ResultsError: if matplotlib is not installed, or the file cannot be written.
    """
    names = sorted({name for one in detail.trials for each in one.metrics for name in each})
    if metric not in names:
        known = f"one of {', '.join(names)}" if names else "wait for the first epoch"
        problem = f"no trial of {detail.summary.job} has reported {metric!r}"
        raise BadFieldError(problem, known, "metric")
    figure = new_figure(10.0, 5.0)
    axes = figure.add_subplot()
    order = [trial for trial in ranked(detail) if trial.metrics]
    scale = _time_scale(detail)
    for place, trial in reversed(list(enumerate(order))):
        _curve(axes, detail, trial, metric, place, unit_s=scale[0] if over_time else None)
    axes.set_xlabel(f"{scale[1]} since it was submitted" if over_time else "epochs")
    axes.set_ylabel(metric)
    best = best_of(detail)
    text = "" if best is None else f", best {detail.spec.search.metric} {best.score:.4g}"
    state = detail.summary.state
    axes.set_title(f"{detail.summary.job} ({state}): {len(order)} trials{text}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color="#eeeeee")
    axes.set_axisbelow(True)
    if not over_time:
        axes.locator_params(axis="x", integer=True)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], frameon=False, fontsize="small",
        loc="center left", bbox_to_anchor=(1.0, 0.5),
    )  # fmt: skip
    save(figure, path, ".png")


def _curve(
    axes: Axes,
    detail: SweepDetail,
    trial: TrialInfo,
    metric: str,
    place: int,
    *,
    unit_s: float | None,
) -> None:
    named = place < NAMED_TRIALS
    points = [
        (_when(detail, trial, at, unit_s) if unit_s else float(trial.first_epoch + at), value)
        for at, one in enumerate(trial.metrics)
        if (value := one.get(metric)) is not None and math.isfinite(value)
    ]
    values = ", ".join(f"{name} {format_value(value)}" for name, value in trial.values.items())
    label = f"{trial.number}: {values}" if len(values) <= 60 else f"trial {trial.number}"  # noqa: PLR2004
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        color=COLOURS[place] if named else OTHER_COLOUR,
        linewidth=2.4 if place == 0 else 1.4 if named else 0.9,
        marker="o",
        markersize=3.5 if named else 2.0,
        label=label if named else "_others",
    )


def _time_scale(detail: SweepDetail) -> tuple[float, str]:
    """Return the unit of the time axis, in seconds, and its name."""
    begin = detail.summary.submitted_at
    last = max(
        (trial.ended_at[-1] - begin for trial in detail.trials if trial.ended_at), default=0.0
    )
    if last < 120:  # noqa: PLR2004 - two minutes
        return 1.0, "seconds"
    return (60.0, "minutes") if last < 7200 else (3600.0, "hours")  # noqa: PLR2004


def _when(detail: SweepDetail, trial: TrialInfo, at: int, unit_s: float) -> float:
    ended = trial.ended_at[at] if at < len(trial.ended_at) else math.nan
    return (ended - detail.summary.submitted_at) / unit_s
