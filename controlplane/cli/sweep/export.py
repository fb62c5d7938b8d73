"""`ones sweep export` and `plot`: results as CSV, scalars or PNG, and the best model."""

from __future__ import annotations

import csv
import io
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from controlplane.cli.output import COMMON, Common, JobName, say
from controlplane.cli.terminal import drawn
from controlplane.client import BlockingClient
from controlplane.client.files import replacement
from controlplane.client.sweeps.runs import best_of, epoch_rows, ranked
from controlplane.client.sweeps.sweep import format_values
from controlplane.sim.analysis.plot_style import new_figure, save
from schemas.errors import BadFieldError, SettingsError, install_hint
from schemas.wire.client import SweepDetail, TrialInfo

if TYPE_CHECKING:
    from matplotlib.axes import Axes


CSV_HELP = "file for every epoch of every trial; - is the standard output"
BOARD_HELP = "folder for TensorBoard scalars, a run for each trial"
MODEL_HELP = "file for the model as a plain state_dict: torch.load(FILE, weights_only=True)"


def export(
    job: JobName,
    /,
    *,
    csv_: Annotated[
        Path | None, Parameter(name="--csv", allow_leading_hyphen=True, help=CSV_HELP)
    ] = None,
    model: Annotated[Path | None, Parameter(help=MODEL_HELP)] = None,
    trial: Annotated[int | None, Parameter(help="trial of the model (default: the best)")] = None,
    tensorboard: Annotated[Path | None, Parameter(help=BOARD_HELP)] = None,
    python: Annotated[str | None, Parameter(help="interpreter that has torch, for --model")] = None,
    common: Common = COMMON,
) -> None:
    """Write results of sweep JOB: curves as CSV or for TensorBoard, the best model for torch."""
    if csv_ is None and model is None and tensorboard is None:
        hint = "give --csv FILE, --model FILE or --tensorboard DIR"
        raise BadFieldError("nothing to export", hint, "csv")
    if trial is not None and model is None:
        raise BadFieldError("--trial requires --model", "give --model FILE", "trial")
    made: dict[str, Any] = {"job": job, "csv": None, "tensorboard": None, "model": None}
    with BlockingClient(common.home) as client:
        detail = client.sweep(job)
        if csv_ is not None:
            count = write_csv(detail, csv_)
            made["csv"] = {"file": str(csv_), "epochs": count}
        if tensorboard is not None:
            count = write_scalars(detail, tensorboard)
            made["tensorboard"] = {"folder": str(tensorboard), "scalars": count}
        if model is not None:
            one = client.sweep_run(job).export(model, trial, python)
            made["model"] = {"file": str(one.path), "trial": one.trial, "epoch": one.epoch}
    lines = []
    if made["csv"]:
        lines.append(f"{csv_}: {made['csv']['epochs']} epochs")
    if board := made["tensorboard"]:
        folder = board["folder"]
        lines.append(f"{folder}: {board['scalars']} scalars; tensorboard --logdir {folder}")
    if one := made["model"]:
        lines.append(f"{one['file']}: trial {one['trial']} after {one['epoch']:g} epochs")
    say(common, made, *(lines if str(csv_) != "-" else ()))


def write_csv(detail: SweepDetail, path: Path) -> int:
    """Write one line for every epoch of every trial to a file or `-`; return their number."""
    rows = epoch_rows(detail)
    values = [f"config.{name}" for name in detail.spec.search.space]
    metrics = sorted({name for one in detail.trials for each in one.metrics for name in each})
    columns = ["trial", "parent", *values, "epoch", "ended", *metrics]

    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    if str(path) == "-":
        out = sys.stdout if sys.stdout.isatty() else drawn(sys.stdout)
        out.write(text.getvalue())
    else:
        with replacement(path, "choose another file", "csv") as fresh:
            fresh.write_text(text.getvalue(), encoding="utf-8", newline="")
    return len(rows)


def write_scalars(detail: SweepDetail, folder: Path) -> int:
    """Write metrics for TensorBoard, with a run for each trial; return the number of scalars."""
    try:
        from tensorboardX import SummaryWriter  # noqa: PLC0415 - seldom needed, not always there
    except ImportError:
        raise SettingsError(
            "--tensorboard needs tensorboardX", install_hint("tensorboard"), "tensorboard"
        ) from None
    count = 0
    try:
        for trial in detail.trials:
            if not trial.metrics:
                continue
            with SummaryWriter(str(folder / f"trial-{trial.number}")) as writer:
                text = "  \n".join(f"{name}: {value}" for name, value in trial.values.items())
                writer.add_text("configuration", text)
                for row in epoch_rows(detail, (trial.number,)):
                    for name in trial.metrics[row["epoch"] - trial.first_epoch]:
                        writer.add_scalar(name, row[name], row["epoch"], row["ended"])
                        count += 1
    except OSError as error:
        problem = f"{folder}: {error.strerror}"
        raise BadFieldError(problem, "choose another folder", "tensorboard") from None
    return count


NAMED_TRIALS: Final = 8  # trials with their own colour and legend entry
TRIAL_COLOURS: Final = (
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
) -> None:
    """Draw the learning curves of all trials of sweep JOB."""
    with BlockingClient(common.home) as client:
        detail = client.sweep(job)
    draw(detail, png, metric or detail.spec.search.metric, over_time=time_)
    say(common, {"job": job, "file": str(png)}, str(png))


def draw(detail: SweepDetail, path: Path, metric: str, *, over_time: bool = False) -> None:
    """Draw learning curves over epochs, or over the time since submission, into a PNG file."""
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
    values = format_values(trial.values)
    label = f"{trial.number}: {values}" if len(values) <= 60 else f"trial {trial.number}"  # noqa: PLR2004
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        color=TRIAL_COLOURS[place] if named else OTHER_COLOUR,
        linewidth=2.4 if place == 0 else 1.4 if named else 0.9,
        marker="o",
        markersize=3.5 if named else 2.0,
        label=label if named else "_others",
    )


def _time_scale(detail: SweepDetail) -> tuple[float, str]:
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
